"""Learning curves of one run, or of several runs in one figure (Li et al. 2020, Figure 3)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps

from .figures import FEW, new_figure, save

PANELS = (
    ("loss", "training loss"),
    ("eval_loss", "validation loss"),
    ("eval_bleu", "validation BLEU"),
    ("eval_accuracy", "validation accuracy"),
)
STYLES = ("-", "--", ":", "-.")  # the line style changes after every ten runs, because there are ten colours
PANELS_OF_ONE = (
    # title of the axis, (key in the log, label) of each line, logarithmic
    ("loss per token", (("loss", "training"), ("eval_loss", "validation")), False),
    ("BLEU", (("eval_bleu", "validation"),), False),
    ("gradient norm", (("grad_norm", None),), True),
    ("learning rate", (("learning_rate", None),), False),
)
DRAWN = {"reconstruction", *(key for key, _ in PANELS), *(key for _, lines, _ in PANELS_OF_ONE for key, _ in lines)}
BLEU_OF_PAIR = "eval_bleu_"  # the start of a log key; the language pair follows


def is_drawn(key: str) -> bool:
    """Return True if a figure shows the values of this log key. Such a value must be a number."""
    return key in DRAWN or key.startswith(BLEU_OF_PAIR)


def reconstruction(entry: dict) -> dict:
    """Return a log entry with the cross-entropy alone as its loss, if it is logged, so that models can be compared."""
    return entry | {"loss": entry["reconstruction"]} if "reconstruction" in entry else entry


def plot_runs(histories: Mapping[str, Sequence[dict]], path: Path) -> Path:
    """Plot training and validation loss, BLEU and accuracy of each run over steps. Panels without data are left out.

    A value that is infinite or NaN, as after a divergence, leaves a gap.

    Args:
        histories: maps the label of each run to its `TrainerState.log_history`.
        path: the image to write. Its folder is made if needed.

    Raises:
        ValueError: no run has logged any of these values.
    """
    curves = {
        label: {
            key: [(entry["step"], entry[key]) for entry in map(reconstruction, history) if key in entry]
            for key, _ in PANELS
        }
        for label, history in histories.items()
    }
    panels = [(key, name) for key, name in PANELS if any(curve[key] for curve in curves.values())]
    if not panels:
        raise ValueError("nothing was logged in any of the runs")
    figure, axes = new_figure(1, len(panels), (4.2, 3.2))
    colors = colormaps["tab10"].colors
    for axis, (key, name) in zip(axes[0], panels, strict=True):
        for index, (label, curve) in enumerate(curves.items()):
            points = [(step, value if math.isfinite(value) else math.nan) for step, value in curve[key]]
            if points:
                marker = "." if key.startswith("eval_") or len(points) < FEW else None
                look = {"color": colors[index % len(colors)], "linestyle": STYLES[index // len(colors) % len(STYLES)]}
                axis.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.2, **look)
        axis.set_xlabel("step")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}  # a panel may lack a run
    most = max(axes[0], key=lambda axis: len(axis.get_lines()))
    most.legend(lines.values(), lines.keys(), frameon=False, fontsize="small")
    return save(figure, path)


def plot_learning_curves(history: Sequence[dict], path: Path, title: str) -> Path:
    """Plot loss, BLEU, gradient norm and learning rate over steps. Panels without data are left out.

    If the training loss has further terms, only its cross-entropy is drawn, to compare with the validation loss.

    Args:
        history: `TrainerState.log_history`.
        path: the image to write. Its folder is made if needed.
        title: the title above the panels.
    """
    history = [*map(reconstruction, history)]
    panels = [panel for panel in PANELS_OF_ONE if any(_series(history, key)[0] for key, _ in panel[1])]
    panels = panels or PANELS_OF_ONE[-1:]  # a run that ended before its first log gets one empty panel
    figure, axes = new_figure(len(panels), 1, panel=(5.8, 2.2), sharex=True)
    axes = axes[:, 0]
    pairs = sorted({key for entry in history for key in entry if key.startswith(BLEU_OF_PAIR)})
    for axis, (name, lines, logarithmic) in zip(axes, panels, strict=True):
        if name == "BLEU" and pairs:
            lines = (("eval_bleu", "average"), *((key, key.removeprefix(BLEU_OF_PAIR)) for key in pairs))
        for key, label in lines:
            steps, values = _series(history, key)
            if steps:
                marker = "." if key.startswith("eval_") or len(steps) < FEW else None
                axis.plot(steps, values, label=label, marker=marker, linewidth=1.2)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        if logarithmic:
            axis.set_yscale("log")
        if len(lines) > 1:
            axis.legend(frameon=False)
    axes[0].set_title(title)
    axes[-1].set_xlabel("step")
    return save(figure, path)


def _series(history: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one logged quantity."""
    entries = [(entry["step"], entry[key]) for entry in history if key in entry]
    return [step for step, _ in entries], [value for _, value in entries]
