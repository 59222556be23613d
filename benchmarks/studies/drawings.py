"""The figures of a study: learning curves of all runs, and gradient norms by layer where they are in the records."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from definition import Study
from records import GRADIENT_NORMS, PRUNED, Record
from selection import Rows

from hf_deepwide.analysis.figures import new_figure, save

LAST_THIRD = 100 * 2 / 3  # from this percentage of a run's updates on
CLOSE = 0.3  # nats above the best loss that the enlarged part of a figure shows


def curve_of(record: Record) -> list[list[float]]:
    """Updates and validation loss; [] for a run of a version that did not keep them."""
    return record["train"].get("validation_curve", [])


def looks() -> Iterator[tuple[str, str]]:
    """A style of line and a colour for each system: ten colours, then the next style."""
    return itertools.product(["-", "--", ":", "-."], [f"C{number}" for number in range(10)])


def plot_curves(study: Study, rows: Rows, path: Path, lost: Sequence[Record] = ()) -> None:
    """Validation loss against updates, a line a run; a system has a colour, and beyond ten of them a style of line.

    The line of a run that starts from another run begins where the other one ends. The second panel shows the last
    third of each run up to `CLOSE` above the best loss, where systems that end near each other can be told apart. The
    line of a run that diverged ends in a cross.
    """
    figure, axes = new_figure(1, 2, (5.2, 4.5))
    whole, end = axes[0]
    styles = looks()
    for name, by_seed in rows.items():
        if name.startswith(PRUNED):
            continue
        (style, colour), label = next(styles), study.system(name).title
        starts = rows.get(study.system(name).start or "", {})
        for seed, record in by_seed.items():
            if curve := curve_of(record):
                updates, losses = zip(*curve, strict=True)
                before = starts[seed]["train"]["steps"] if seed in starts else 0
                look = {"color": colour, "linestyle": style, "linewidth": 1}
                whole.plot([before + update for update in updates], losses, label=label, **look)
                end.plot([100 * update / updates[-1] for update in updates], losses, **look)
                label = None
    labels = set()
    for record in lost:
        if curve := curve_of(record):
            label = f"{study.system(record['system']).title}: diverged"
            shown = None if label in labels else label
            whole.plot(*zip(*curve, strict=True), color="0.5", linewidth=1, marker="x", markevery=[-1], label=shown)
            labels.add(label)
    points = [point for line in end.lines for point in line.get_xydata() if math.isfinite(point[1])]
    if points:
        best = min(loss for _, loss in points)
        shown = [loss for share, loss in points if share >= LAST_THIRD and loss <= best + CLOSE]
        end.set_xlim(LAST_THIRD, 100)
        end.set_ylim(best - 0.05 * CLOSE, max(shown, default=best) + 0.05 * CLOSE)
    end.set_visible(bool(points))
    whole.set_ylabel("validation loss, nats a token")
    end.set_title("the last third of each run, enlarged", fontsize="small")
    whole.set_xlabel("updates")
    end.set_xlabel("updates, % of the run's own")
    for axis in (whole, end):
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.3)
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="x-small", loc="outside right center")
    save(figure, path)


def plot_gradient_norms(study: Study, rows: Rows, path: Path, lost: Sequence[Record] = ()) -> None:
    """The gradient norm of each encoder layer at the first update and at the last, a line a system.

    A row's first seed stands for it; a system without a row has a run that diverged, as far as that was logged.
    """
    runs = {name: by_seed[min(by_seed)] for name, by_seed in rows.items() if not name.startswith(PRUNED)}
    for record in lost:
        runs.setdefault(record["system"], record)
    runs = {name: record for name, record in runs.items() if record.get(GRADIENT_NORMS)}
    if not runs:
        return
    figure, axes = new_figure(1, 2, (5.2, 4.5), sharey=True)
    for axis, moment, title in zip(axes[0], (0, -1), ("the first update", "the last update"), strict=True):
        for (name, record), (style, colour) in zip(runs.items(), looks(), strict=False):
            norms = record[GRADIENT_NORMS][moment]["encoder"]
            label = study.system(name).title + (": diverged" if "diverged" in record else "")
            axis.plot(range(1, len(norms) + 1), norms, color=colour, linestyle=style, linewidth=1, label=label)
        axis.set_yscale("log")
        axis.set_title(title, fontsize="small")
        axis.set_xlabel("encoder layer")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("gradient norm")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="x-small", loc="outside right center")
    save(figure, path)
