"""Figures without a screen."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


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
