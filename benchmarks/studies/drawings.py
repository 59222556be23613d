"""The figures of a study: curves and final losses of all runs, and gradient norms by layer where records have them."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from definition import Study
from matplotlib.axes import Axes
from records import GRADIENT_NORMS, PRUNED, Record
from selection import Rows, validation_loss

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.evaluation.seeds import standard_error

CLOSE = 0.3  # systems with a mean loss up to so many nats above the best one are drawn as points


def curve_of(record: Record) -> list[list[float]]:
    """The updates and validation losses of a run; [] if an older version made the run and did not keep them."""
    return record["train"].get("validation_curve", [])


def looks() -> Iterator[tuple[str, str]]:
    """Yield a line style and a colour for each system: ten colours in one style, then ten in the next style."""
    return itertools.product(["-", "--", ":", "-."], [f"C{number}" for number in range(10)])


def plot_curves(study: Study, rows: Rows, path: Path, lost: Sequence[Record] = ()) -> None:
    """Plot the validation loss against updates, one line for each run, and beside it the loss of the final models.

    Each system has a colour. Beyond ten systems, lines are dashed and points are hollow. The line of a run that starts
    from another run begins where the line of the other run ends. The line of a run that diverged ends in a cross. In
    the second panel a point is a run, and a cross is the mean of a system with its standard error over seeds. If the
    mean of a system is more than `CLOSE` above the best mean, the second panel shows the mean as a number.
    """
    figure, axes = new_figure(1, 2, (5.2, 4.5))
    curves, ends = axes[0]
    shown = [name for name in rows if not name.startswith(PRUNED)]
    for name, (style, colour) in zip(shown, looks(), strict=False):
        starts = rows.get(study.system(name).start or "", {})
        for seed, record in rows[name].items():
            if curve := curve_of(record):
                updates, losses = zip(*curve, strict=True)
                before = starts[seed]["train"]["steps"] if seed in starts else 0
                look = {"color": colour, "linestyle": style, "linewidth": 1}
                curves.plot([before + update for update in updates], losses, **look)
    told: set[str] = set()
    for record in lost:
        if curve := curve_of(record):
            title = f"{study.system(record['system']).title}: diverged"
            look = {"color": "0.5", "linewidth": 1, "marker": "x", "markevery": [-1]}
            curves.plot(*zip(*curve, strict=True), label=None if title in told else title, **look)
            told.add(title)
    if told:
        curves.legend(frameon=False, fontsize="x-small")
    if shown:
        plot_ends(study, {name: rows[name] for name in shown}, ends)
    ends.set_visible(bool(shown))
    curves.set_ylabel("validation loss, nats a token")
    curves.set_xlabel("updates")
    for axis in (curves, ends):
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.3)
    save(figure, path)


def plot_ends(study: Study, rows: Rows, axis: Axes) -> None:
    """Plot the final validation loss of each run and the mean of each system, a line a system; see `plot_curves`."""
    losses = {name: [validation_loss(run) for run in by_seed.values()] for name, by_seed in rows.items()}
    means = {name: statistics.mean(each) for name, each in losses.items()}
    far = min(means.values()) + CLOSE
    near = [loss for name, each in losses.items() for loss in each if means[name] <= far]
    margin = 0.08 * (max(near) - min(near)) or 0.01
    axis.set_xlim(min(near) - margin, max(near) + margin)
    for place, ((name, each), (style, colour)) in enumerate(zip(losses.items(), looks(), strict=False)):
        fill = "full" if style == "-" else "none"
        if means[name] <= far:
            axis.plot(each, [place] * len(each), "o", color=colour, fillstyle=fill, markersize=4, alpha=0.6)
            axis.errorbar(means[name], place, xerr=standard_error(each), fmt="x", color=colour, capsize=4)
        else:
            beyond = f"{means[name]:.2f} \N{RIGHTWARDS ARROW} "
            axis.text(max(near) + margin, place, beyond, color=colour, ha="right", va="center")
    axis.set_yticks(range(len(losses)), [study.system(name).title for name in losses], fontsize="x-small")
    axis.set_ylim(len(losses) - 0.5, -0.5)
    axis.yaxis.tick_right()
    axis.set_title("the final model of each run, and means \N{PLUS-MINUS SIGN} standard error", fontsize="small")
    axis.set_xlabel("validation loss, nats a token")


def plot_gradient_norms(study: Study, rows: Rows, path: Path, lost: Sequence[Record] = ()) -> None:
    """Plot the gradient norm of each encoder layer at the first and at the last logged update, a line a system.

    Each row is represented by its run with the smallest seed. A system without a row is represented by a run that
    diverged. Runs without logged norms are left out.
    """
    runs = {name: by_seed[min(by_seed)] for name, by_seed in rows.items() if not name.startswith(PRUNED)}
    for record in lost:
        runs.setdefault(record["system"], record)
    runs = {name: record for name, record in runs.items() if record.get(GRADIENT_NORMS)}
    if not runs:
        return
    figure, axes = new_figure(1, 2, (5.2, 4.5), sharey=True)
    for axis, moment in zip(axes[0], (0, -1), strict=True):
        steps = sorted({record[GRADIENT_NORMS][moment]["step"] for record in runs.values()})
        for (name, record), (style, colour) in zip(runs.items(), looks(), strict=False):
            norms = record[GRADIENT_NORMS][moment]["encoder"]
            label = study.system(name).title + (": diverged" if "diverged" in record else "")
            axis.plot(range(1, len(norms) + 1), norms, color=colour, linestyle=style, linewidth=1, label=label)
        axis.set_yscale("log")
        axis.set_title(
            f"update {' to '.join(f'{step:,}' for step in dict.fromkeys([steps[0], steps[-1]]))}", fontsize="small"
        )
        axis.set_xlabel("encoder layer")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("gradient norm")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="x-small", loc="outside right center")
    save(figure, path)
