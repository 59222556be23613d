"""Learning curves of a run."""

from collections.abc import Sequence
from pathlib import Path

from ..analysis.figures import new_figure, save

PANELS = (
    # title of the axis, (key of the log, label), logarithmic
    ("loss per token", (("loss", "training"), ("eval_loss", "validation")), False),
    ("BLEU", (("eval_bleu", "validation"),), False),
    ("gradient norm", (("grad_norm", None),), True),
    ("learning rate", (("learning_rate", None),), False),
)


def plot_learning_curves(history: Sequence[dict], path: Path, title: str) -> Path:
    """Draw loss, BLEU, gradient norm and learning rate over steps; panels without data are left out.

    Args:
        history: `TrainerState.log_history`.
        path: the image to write; its folder is made.
        title: above the panels.
    """
    panels = [panel for panel in PANELS if any(_series(history, key)[0] for key, _ in panel[1])]
    panels = panels or PANELS[-1:]  # of a run that ended before its first log, an empty one
    figure, axes = new_figure(len(panels), 1, panel=(5.8, 2.2), sharex=True)
    axes = axes[:, 0]
    pairs = sorted({key for entry in history for key in entry if key.startswith("eval_bleu_")})
    for axis, (name, lines, logarithmic) in zip(axes, panels, strict=True):
        if name == "BLEU" and pairs:
            lines = (("eval_bleu", "average"), *((key, key.removeprefix("eval_bleu_")) for key in pairs))
        for key, label in lines:
            steps, values = _series(history, key)
            if steps:
                axis.plot(steps, values, label=label, marker="." if key.startswith("eval_") else None, linewidth=1.2)
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
