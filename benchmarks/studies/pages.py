"""The table, the paired tests and the figures of a study, made from its records alone."""

import hashlib
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from definition import Study, recipe_of
from records import PRUNED, Record, read_records, read_translations
from selection import Rows, chosen_rows, mean_and_error, validation_loss

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.seeds import equivalence, holm, welch
from hf_deepwide.evaluation.significance import compare_systems
from hf_deepwide.runs.compare import p_value

COMPARISON, TABLE = "comparison.json", "table.md"
CLOSE = 0.3  # nats above the best loss that the enlarged part of a figure shows
TITLES = {
    "bleu": "sacreBLEU",
    "multi_bleu": "tokenised BLEU",
    "chrf": "chrF",
    "sentence_bleu4": "sentence BLEU-4",
    "valid_python": "valid Python, %",
    "valid_python_line": "valid lines of Python, %",
}


def write_pages(study: Study, results: Path, pages: Sequence[Path] = ()) -> str:
    """Compare, draw and write; returns the table, which also goes between the study's markers on `pages`."""
    records = read_records(results)
    rows = chosen_rows(study, records)
    if not rows:
        return ""
    compare(study, rows, results)
    lost = diverged_in_full(records)
    text = table(study, rows, results) + diverged_runs(study, lost)
    write_whole(results / TABLE, text)
    for page in pages:
        short = summary(study, rows, results)
        write_whole(page, with_tables(page.read_text(encoding="utf-8"), study, text, short))
    if any(_curve(record) for record in records):
        plot_curves(study, rows, results / "learning_curves.png", lost)
    return text


def diverged_in_full(records: Sequence[Record]) -> list[Record]:
    """The runs of a search's last stage that diverged."""
    return [record for record in records if "diverged" in record and not record["stage"]]


def diverged_runs(study: Study, lost: Sequence[Record]) -> str:
    """A line for each run in full that is in no row, since it diverged."""
    return "".join(
        f"\nDiverged: {study.system(record['system']).title}, {setting_in_words(record)}, seed {record['seed']}.\n"
        for record in lost
    )


def with_tables(page: str, study: Study, text: str, short: str) -> str:
    """The page with the study's table, and its short form, between their markers, where it has them.

    Raises:
        UserError: a marker's end is missing.
    """
    for kind, generated in (("study", text), ("summary", short)):
        begin, end = f"<!-- {kind}: {study.name} -->\n", f"<!-- /{kind}: {study.name} -->"
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if found and not ended:
            raise UserError(f"the page has no {end}")
        if found:
            page = before + begin + generated + end + after
    return page


def compare(study: Study, rows: Rows, results: Path) -> None:
    """Test each system against the baseline, over the sentences, on the seeds that both have.

    A test whose translations have not changed is kept, and so is one whose translations are not here.
    """
    kept, translations = load_comparison(results), read_translations(results)
    comparison = {}
    for name in rows:
        pair = paired_runs(study, rows, name)
        if name == study.baseline or not pair["seeds"]:
            continue
        known = pair.items() <= kept.get(name, {}).items()
        if not all(run in translations for run in itertools.chain(*pair["runs"])):
            comparison |= {name: kept[name]} if known else {}
            continue
        pair["digest"] = digest_of(translations[run] for run in itertools.chain(*pair["runs"]))
        if known and kept[name].get("digest") == pair["digest"]:
            comparison[name] = kept[name]
        else:
            recipe = recipe_of(study, study.systems[0], study.search[-1], {}, study.seeds[0], Path("runs"))
            ours, theirs = ([line for run in runs for line in translations[run]] for runs in pair["runs"])
            tests = compare_systems(
                theirs,
                ours,
                load_parallel(recipe.data, "test")["target"][:],
                lowercase=recipe.evaluation.lowercase,
                metrics=[study.metric, study.beside],
                runs=len(pair["seeds"]),
            )
            comparison[name] = {**pair, **tests}
    if comparison:
        write_whole(results / COMPARISON, json.dumps(comparison, indent=1) + "\n")


def digest_of(texts: Iterable[list[str]]) -> str:
    """A short digest of texts, each a list of lines."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


def load_comparison(results: Path) -> dict[str, dict[str, Any]]:
    """The paired tests that were made so far."""
    file = results / COMPARISON
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def paired_runs(study: Study, rows: Rows, name: str) -> dict[str, Any]:
    """The seeds that a system and the baseline share, and the names of their runs, the system's first."""
    seeds = sorted(rows[name].keys() & rows.get(study.baseline, {}).keys())
    return {
        "seeds": seeds,
        "runs": [[rows[system][seed]["run"] for seed in seeds] for system in (name, study.baseline)],
    }


def about(study: Study) -> str:
    """What the columns of a table with validation losses mean."""
    equal = (
        f"p (equal) comes from two one-sided tests that the losses differ by less than {study.margin} nats, and is "
        "corrected likewise. "
        if study.margin
        else ""
    )
    return (
        "Validation loss is in nats a token, of the final model, smoothed as in training and without smoothing. ± is "
        "a standard error over seeds. p (seeds) comes from Welch's t-test over seeds on the smoothed loss. p (Holm) "
        f"corrects it for the number of systems. {equal}These p do not allow for two things: seed 1 also chose the "
        "setting, and a system close to the baseline gets more seeds. p (sentences) comes from approximate "
        "randomisation over sentences: it is about these trained models only."
    )


def beside_published(study: Study, rows: Rows) -> str:
    """Test set by test set, the published score, and mean and standard deviation over seeds."""
    cells = []
    for by_seed in rows.values():
        for name, published in study.published["scores"].items():
            scores = {seed: run["test"]["sets"][name][study.metric] for seed, run in sorted(by_seed.items())}
            deviation = f"{statistics.stdev(scores.values()):.2f}" if len(scores) > 1 else ""
            mean = statistics.mean(scores.values())
            cells.append(
                {
                    "test set": name,
                    "published": f"{published:.2f}",
                    "mean": f"{mean:.2f}",
                    "standard deviation": deviation,
                    "difference": f"{mean - published:+.2f}",
                    "seeds": ", ".join(f"{score:.2f}" for score in scores.values()),
                }
            )
    return f"{markdown(cells)}\n{TITLES[study.metric]}. Published: {study.published['title']}.\n" if cells else ""


def table(study: Study, rows: Rows, results: Path) -> str:
    """One row a system: scores with standard errors over seeds, difference, p, setting and validation loss."""
    if study.published:
        return beside_published(study, rows)
    cells = list(table_cells(study, rows, results).values())
    if is_measured(rows):
        return f"{markdown(cells)}\n{about(study)}\n"
    of_older_runs = (
        "± is a standard error over seeds. The difference is the mean over the seeds that a system and the baseline "
        "share. p comes from approximate randomisation over sentences: it is about these trained models only, not "
        "about other seeds. Validation loss is in nats a token, smoothed as in training."
    )
    return f"{markdown(cells)}\n{of_older_runs}\n"


def summary(study: Study, rows: Rows, results: Path) -> str:
    """The rows that `summary` in the study's file names, without the columns that need an explanation.

    A comparison with published scores is short as it is.
    """
    if study.published:
        return beside_published(study, rows)
    columns = ["system", "parameters", TITLES[study.metric], "validation loss", "updates", "seeds"]
    cells = table_cells(study, rows, results)
    return markdown([{column: cells[name][column] for column in columns} for name in study.summary if name in cells])


def markdown(rows: list[dict[str, str]]) -> str:
    """A table in Markdown, of rows with the same columns."""
    head = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *(row.values() for row in rows))]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def table_cells(study: Study, rows: Rows, results: Path) -> dict[str, dict[str, str]]:
    """System to column to cell: all cells of the study's table."""
    return (_measured_cells if is_measured(rows) else _cells)(study, rows, results)


def _cells(study: Study, rows: Rows, results: Path) -> dict[str, dict[str, str]]:
    """System to column to cell, of older runs."""
    comparison, cells = load_comparison(results), {}
    for name, by_seed in rows.items():
        runs = list(by_seed.values())
        pair, test = paired_runs(study, rows, name), comparison.get(name, {})
        difference = p = ""
        if name != study.baseline and pair["seeds"]:
            scores = [
                [rows[system][seed]["test"][study.metric] for seed in pair["seeds"]]
                for system in (name, study.baseline)
            ]
            difference = with_error([ours - theirs for ours, theirs in zip(*scores, strict=True)], sign="+")
            p = f"{test[study.metric]['p_randomization']:.4f}" if pair.items() <= test.items() else ""
        pruned = name.startswith(PRUNED)
        cells[name] = {
            "system": study.system(name.removeprefix(PRUNED)).title + ", pruned" * pruned,
            "parameters": f"{sum(run['parameters'] for run in runs) / len(runs) / 1e6:.2f} M",
            TITLES[study.metric]: with_error([run["test"][study.metric] for run in runs]),
            TITLES[study.beside]: with_error([run["test"][study.beside] for run in runs]),
            "difference": difference,
            "p (sentences)": p,
            "seeds": str(len(runs)),
            "setting": layers_left(runs) if pruned else setting_in_words(runs[0]),
            "validation loss": "" if pruned else with_error([validation_loss(run) for run in runs], digits=3),
            "updates": "" if pruned else updates(runs),
        }
    return cells


def is_measured(rows: Rows) -> bool:
    """True if the validation loss of each run's final model is known; older runs have only their curves."""
    return bool(rows) and all("validation" in run for by_seed in rows.values() for run in by_seed.values())


def _measured_cells(study: Study, rows: Rows, results: Path) -> dict[str, dict[str, str]]:
    """System to column to cell: validation loss first, with the tests in which a seed is the unit."""
    comparison, scores, cells = load_comparison(results), TITLES[study.metric], {}
    p_columns = ["p (seeds)", "p (Holm)", *(["p (equal)"] if study.margin else [])]
    losses = {name: [validation_loss(run) for run in by_seed.values()] for name, by_seed in rows.items()}
    others = [name for name in rows if name != study.baseline and not name.startswith(PRUNED)]
    theirs = losses.get(study.baseline, [])
    p_seeds = [welch(losses[name], theirs) for name in others]
    p_equal = [equivalence(losses[name], theirs, study.margin) if study.margin else None for name in others]
    tests = {name: p for name, *p in zip(others, p_seeds, holm(p_seeds), holm(p_equal), strict=True)}
    for name, by_seed in rows.items():
        runs, test = list(by_seed.values()), comparison.get(name, {})
        p = tests.get(name, [None] * 3)
        pruned = name.startswith(PRUNED)
        known = paired_runs(study, rows, name).items() <= test.items() if name != study.baseline else False
        difference = ""
        if name in others and theirs:
            difference = f"{statistics.mean(losses[name]) - statistics.mean(theirs):+.3f}"
        cells[name] = {
            "system": study.system(name.removeprefix(PRUNED)).title + ", pruned" * pruned,
            "parameters": f"{statistics.mean(run['parameters'] for run in runs) / 1e6:.2f} M",
            "validation loss": "" if pruned else with_error(losses[name], digits=3),
            "not smoothed": "" if pruned else with_error([run["validation"]["nll"] for run in runs], digits=3),
            "difference": difference,
            **{column: p_value(value) for column, value in zip(p_columns, p, strict=False)},
            scores: with_error([run["test"][study.metric] for run in runs]),
            **{
                each: with_error([run["test"]["sets"][each][study.metric] for run in runs])
                for each in runs[0]["test"].get("sets", {})
            },
            TITLES[study.beside]: with_error([run["test"][study.beside] for run in runs]),
            "p (sentences)": f"{test[study.metric]['p_randomization']:.4f}" if known else "",
            "seeds": str(len(runs)),
            "setting": layers_left(runs) if pruned else setting_in_words(runs[0]),
            "updates": "" if pruned else updates(runs),
        }
    return cells


def setting_in_words(record: Record) -> str:
    """`learning_rate 0.004, dropout 0.1`."""
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in record["setting"].items())


def updates(runs: list[Record]) -> str:
    """`1,075 to 1,118`: of all seeds; runs that stop early differ."""
    steps = sorted({run["train"]["steps"] for run in runs})
    return " to ".join(f"{count:,}" for count in dict.fromkeys([steps[0], steps[-1]]))


def layers_left(runs: list[Record]) -> str:
    """`6 + 3 layers, 5 + 3 layers`: encoder and decoder, run by run."""
    return ", ".join(f"{run['layers']['encoder']} + {run['layers']['decoder']} layers" for run in runs)


def with_error(values: list[float], sign: str = "-", digits: int = 2) -> str:
    """Mean and standard error; `sign` is that of format specifications."""
    value = mean_and_error(values)
    error = "" if value["standard_error"] is None else f" ± {value['standard_error']:.{digits}f}"
    return f"{value['mean']:{sign}.{digits}f}{error}"


def plot_curves(study: Study, rows: Rows, path: Path, lost: Sequence[Record] = ()) -> None:
    """Validation loss against updates, a line a run; a system has a colour, and beyond ten of them a style of line.

    The second panel shows the last third of the updates up to `CLOSE` above the best loss, where systems that end near
    each other can be told apart. The line of a run that diverged ends in a cross.
    """
    figure, axes = new_figure(1, 2, (5.2, 4.5))
    whole, end = axes[0]
    looks = itertools.product(["-", "--", ":"], [f"C{number}" for number in range(10)])
    for name, by_seed in rows.items():
        if name.startswith(PRUNED):
            continue
        (style, colour), label = next(looks), study.system(name).title
        for record in by_seed.values():
            if curve := _curve(record):
                for axis in (whole, end):
                    axis.plot(*zip(*curve, strict=True), color=colour, linestyle=style, linewidth=1, label=label)
                label = None
    for record in lost:
        if curve := _curve(record):
            label = f"{study.system(record['system']).title}: diverged"
            whole.plot(*zip(*curve, strict=True), color="0.5", linewidth=1, marker="x", markevery=[-1], label=label)
    points = [point for line in end.lines for point in line.get_xydata() if math.isfinite(point[1])]
    if points:
        last, best = (choose(point[place] for point in points) for place, choose in enumerate((max, min)))
        shown = [loss for update, loss in points if update >= last * 2 / 3 and loss <= best + CLOSE]
        end.set_xlim(last * 2 / 3, last)
        end.set_ylim(best - 0.05 * CLOSE, max(shown, default=best) + 0.05 * CLOSE)
    end.set_visible(bool(points))
    whole.set_ylabel("validation loss, nats a token")
    end.set_title("the last third, enlarged", fontsize="small")
    for axis in (whole, end):
        axis.set_xlabel("updates")
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.3)
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize="x-small", loc="outside right center")
    save(figure, path)


def _curve(record: Record) -> list[list[float]]:
    """Updates and validation loss; [] for a run of a version that did not keep them."""
    return record["train"].get("validation_curve", [])
