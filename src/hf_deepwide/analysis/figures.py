"""Figures without a screen."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..errors import UserError


def new_figure(rows: int, columns: int, panel: tuple[float, float], **options: object) -> tuple[Figure, np.ndarray]:
    """A figure of `rows` by `columns` panels, each `panel` inches wide and high; `options` are those of `subplots`."""
    width, height = panel
    figure = Figure(figsize=(1.2 + width * columns, 0.6 + height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, path: Path) -> Path:
    """Write the image; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def run_labels(folders: Sequence[Path]) -> list[str]:
    """What runs are called in a figure: their folder's name, or as much of its path as tells them apart.

    A checkpoint is called by its run, too: `latent/checkpoint-400`.

    Raises:
        UserError: a folder is given twice.
    """
    paths = [folder.resolve().parts for folder in folders]
    if len(set(paths)) < len(paths):
        twice = next(folder for folder, path in zip(folders, paths, strict=True) if paths.count(path) > 1)
        raise UserError(f"{twice} is given twice")
    for count in range(1, max(map(len, paths)) + 1):
        labels = ["/".join(path[-count - path[-1].startswith("checkpoint-") :]) for path in paths]
        if len(set(labels)) == len(labels):
            break
    return labels
