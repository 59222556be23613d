"""Learning curves of several runs in one figure (Li et al. 2020, Figure 3)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps

from .figures import new_figure, save

PANELS = (
    ("loss", "training loss"),
    ("eval_loss", "validation loss"),
    ("eval_bleu", "validation BLEU"),
    ("eval_accuracy", "validation accuracy"),
)


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
    panels = [(key, name) for key, name in PANELS if any(of_run[key] for of_run in curves.values())]
    if not panels:
        raise ValueError("nothing was logged in any of the runs")
    figure, axes = new_figure(1, len(panels), (4.2, 3.2))
    colors = colormaps["tab10"].colors
    for axis, (key, name) in zip(axes[0], panels, strict=True):
        for index, (label, of_run) in enumerate(curves.items()):
            points = [(step, value if math.isfinite(value) else math.nan) for step, value in of_run[key]]
            if points:
                marker = "." if key.startswith("eval_") else None
                color = colors[index % len(colors)]
                axis.plot(*zip(*points, strict=True), label=label, color=color, marker=marker, linewidth=1.2)
        axis.set_xlabel("step")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, fontsize="small")
    return save(figure, path)
