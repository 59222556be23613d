"""Learning curves: of one run, and of several runs in one figure (Li et al. 2020, Figure 3)."""

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
STYLES = ("-", "--", ":", "-.")  # of each ten runs another one, as there are ten colours
PANELS_OF_ONE = (
    # title of the axis, (key of the log, label), logarithmic
    ("loss per token", (("loss", "training"), ("eval_loss", "validation")), False),
    ("BLEU", (("eval_bleu", "validation"),), False),
    ("gradient norm", (("grad_norm", None),), True),
    ("learning rate", (("learning_rate", None),), False),
)
DRAWN = {"reconstruction", *(key for key, _ in PANELS), *(key for _, lines, _ in PANELS_OF_ONE for key, _ in lines)}
BLEU_OF_PAIR = "eval_bleu_"  # in an entry of the log, before the pair


def is_drawn(key: str) -> bool:
    """True of what a figure shows of an entry of the log: it has to be a number."""
    return key in DRAWN or key.startswith(BLEU_OF_PAIR)


def reconstruction(entry: dict) -> dict:
    """An entry whose loss is the cross-entropy alone, where the log tells it apart, so that models compare."""
    return entry | {"loss": entry["reconstruction"]} if "reconstruction" in entry else entry


def plot_runs(histories: Mapping[str, Sequence[dict]], path: Path) -> Path:
    """Training and validation loss, BLEU and accuracy of each run over steps; panels without data are left out.

    What is infinite or not a number, as after a divergence, leaves a gap.

    Args:
        histories: label of each run, to its `TrainerState.log_history`.
        path: the image to write; its folder is made.

    Raises:
        ValueError: no run has logged any of it.
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
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}  # not each is in each panel
    most = max(axes[0], key=lambda axis: len(axis.get_lines()))
    most.legend(lines.values(), lines.keys(), frameon=False, fontsize="small")
    return save(figure, path)


def plot_learning_curves(history: Sequence[dict], path: Path, title: str) -> Path:
    """Draw loss, BLEU, gradient norm and learning rate over steps; panels without data are left out.

    If a loss has further terms, the cross-entropy alone is drawn, as validation has it alone.

    Args:
        history: `TrainerState.log_history`.
        path: the image to write; its folder is made.
        title: above the panels.
    """
    history = [*map(reconstruction, history)]
    panels = [panel for panel in PANELS_OF_ONE if any(_series(history, key)[0] for key, _ in panel[1])]
    panels = panels or PANELS_OF_ONE[-1:]  # of a run that ended before its first log, an empty one
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
    """Steps and values of one logged quantity."""
    entries = [(entry["step"], entry[key]) for entry in history if key in entry]
    return [step for step, _ in entries], [value for _, value in entries]
