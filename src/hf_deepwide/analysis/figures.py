"""Make and save figures without a screen."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedFormatter, FuncFormatter

from ..durable import whole_file
from ..errors import UserError, quote

FEW = 3  # a curve with fewer points gets markers, because a line of one point cannot be seen


def new_figure(rows: int, columns: int, panel: tuple[float, float], **options: object) -> tuple[Figure, np.ndarray]:
    """Make a figure of `rows` by `columns` panels.

    `panel` is the width and height of a panel in inches. `options` are passed to `subplots`.
    """
    width, height = panel
    figure = Figure(figsize=(1.2 + width * columns, 0.6 + height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def image_path(path: Path) -> Path:
    """Return the path of the file that `save` writes: a name without an ending gets `.png`.

    Raises:
        UserError: the file's ending names no image format.
    """
    path = Path(path)
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise UserError(f"{path}: {quote(path.suffix)} is no kind of image; accepted: {', '.join(sorted(kinds))}")
    return path


def save(figure: Figure, path: Path) -> Path:
    """Write the image, in full or not at all, and return its path. Make its folder if needed.

    All text is shown as it is, even if the name of a run, a language or a file contains dollar signs. Only the numbers
    that Matplotlib itself puts on an axis are formulas (powers of ten).

    Raises:
        UserError: the file's ending names no image format.
    """
    path = image_path(path)
    _show_as_it_is(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft:
        figure.savefig(draft, dpi=120)
    return path


def as_svg(figure: Figure) -> str:
    """Return the figure as SVG. Its text stays text, because a browser has letters that Matplotlib's font lacks."""
    _show_as_it_is(figure)
    image = io.StringIO()
    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(image, format="svg", metadata={"Date": None})
    return image.getvalue()


def _show_as_it_is(figure: Figure) -> None:
    """Turn off formulas in all text of a figure, except in the numbers that Matplotlib itself puts on an axis."""
    numbers = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        if not isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter)
        for label in axis.get_ticklabels(which="both")
    }
    for text in figure.findobj(Text):
        text.set_parse_math(text in numbers)


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Return the labels of runs in a figure: the folder's name, or as much of its path as makes the labels differ.

    The label of a checkpoint also contains its run: `latent/checkpoint-400`.

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
