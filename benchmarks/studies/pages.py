"""The tables and the figures of a study, made from its records alone."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from comparison import baseline_of, compare, load_comparison, paired_runs
from definition import Study
from drawings import curve_of, plot_curves, plot_gradient_norms
from records import (
    CHOSEN_LAYERS,
    GRADIENT_NORMS,
    PRUNED,
    Record,
    parts_of,
    read_records,
    scores_of,
)
from reports import filled_in, markdown
from selection import Rows, chosen_rows, has_pairs, key_of, leading_rows, lost_seeds, validation_loss

from hf_deepwide.durable import write_whole
from hf_deepwide.evaluation.seeds import equivalence, holm, paired_t, standard_error, welch
from hf_deepwide.evaluation.significance import p_value, signed
from hf_deepwide.runs.model_card import NAMES as TITLES

TABLE, SEARCH = "table.md", "search.md"


def write_pages(study: Study, results: Path, pages: Sequence[Path] = ()) -> str:
    """Compare the systems, draw the figures and write the tables; return the table of the study.

    The tables are also written to `pages`, between the study's markers.
    """
    records = read_records(results)
    rows = chosen_rows(study, records)
    if records:
        write_whole(results / SEARCH, search_table(study, records))
    if rows:
        compare(study, rows, results)
    texts = page_texts(study, rows, records, results)
    for page in pages:
        write_whole(page, with_tables(page.read_text(encoding="utf-8"), study, texts))
    lost = [record for record in records if "diverged" in record]
    if shown := leading_rows(study, records):
        if any(curve_of(record) for record in records):
            plot_curves(study, shown, results / "learning_curves.png", lost)
        if any(GRADIENT_NORMS in record for record in records):
            plot_gradient_norms(study, shown, results / "gradient_norms.png", lost)
    if not rows:
        return ""
    write_whole(results / TABLE, texts["study"])
    return texts["study"]


def page_texts(study: Study, rows: Rows, records: Sequence[Record], results: Path) -> dict[str, str]:
    """The texts for pages, by the first word of their markers, such as the table and the first stage of the search."""
    texts = {}
    if records:
        texts["search"] = search_grid(study, records, 0)
        texts["full"] = search_grid(study, records, -1)
    if rows:
        lost = [record for record in records if "diverged" in record]
        texts["study"] = table(study, rows, results) + diverged_runs(study, lost)
        if compared := comparisons(study, rows):
            texts["comparisons"] = compared
        texts["summary"] = summary(study, rows, results)
        if any(CHOSEN_LAYERS in run for by_seed in rows.values() for run in by_seed.values()):
            texts["layers"] = layers_table(study, rows)
    return texts


def diverged_runs(study: Study, lost: Sequence[Record]) -> str:
    """A line for each system with runs that diverged, in any stage."""
    lines = []
    for system in study.systems:
        runs = [
            f"{setting_in_words(record)}, seed {record['seed']}" + (f" ({record['stage']})" if record["stage"] else "")
            for record in lost
            if record["system"] == system.name
        ]
        if runs:
            lines.append(f"\nDiverged: {system.title}: {'; '.join(runs)}.\n")
    return "".join(lines)


def search_table(study: Study, records: Sequence[Record]) -> str:
    """The table of all runs of a study, including the runs of the search and the runs that diverged."""
    cells = [
        {
            "system": system.title,
            "stage": record["stage"] or "in full",
            "setting": setting_in_words(record),
            "seed": str(record["seed"]),
            "validation loss": "diverged" if "diverged" in record else f"{validation_loss(record):.3f}",
            "updates": "" if "diverged" in record else updates([record]),
        }
        for system in study.systems
        for record in records
        if record["system"] == system.name
    ]
    return (
        f"# All runs of {study.name}\n\nValidation loss in nats a token, smoothed as in training.\n\n{markdown(cells)}"
    )


def search_grid(study: Study, records: Sequence[Record], number: int) -> str:
    """The validation losses of a stage with the first seed: a row for each system, a column for each setting.

    If the runs of the stage have a score, it follows the loss.
    """
    stage = study.search[number].name
    found: dict[str, dict[tuple, str]] = {}
    parameters: dict[str, str] = {}
    for record in records:
        if "parameters" in record:
            parameters[record["system"]] = in_millions(record["parameters"])
        if record["stage"] == stage and record["seed"] == study.seeds[0]:
            loss = "diverged" if "diverged" in record else f"{validation_loss(record):.3f}"
            score = f"; {record['test'][study.metric]:.2f}" if study.metric in record.get("test", {}) else ""
            found.setdefault(record["system"], {})[key_of(record["setting"])] = loss + score
    settings = sorted({key for losses in found.values() for key in losses})
    return markdown(
        [
            {"system": system.title, "parameters": parameters[system.name]}
            | {setting_in_words({"setting": dict(key)}): found[system.name].get(key, "") for key in settings}
            for system in study.systems
            if system.name in found
        ]
    )


def layers_table(study: Study, rows: Rows) -> str:
    """The layers that each posterior of each run uses in evaluation, with a row for each stack."""
    return markdown(
        [
            {
                "system": study.system(name).title,
                "seed": str(seed),
                "posterior": posterior,
                "stack": stack,
                "layers": " ".join(str(layer + 1) for layer in layers),
                "of them": str(len(layers)),
            }
            for name, by_seed in rows.items()
            for seed, run in by_seed.items()
            for posterior, stacks in (run.get(CHOSEN_LAYERS, {}) if not name.startswith(PRUNED) else {}).items()
            for stack, layers in stacks.items()
        ]
    )


def with_tables(page: str, study: Study, texts: dict[str, str]) -> str:
    """The page with a study's tables between their markers; a table without markers on the page is left out."""
    for kind, generated in texts.items():
        begin, end = f"<!-- {kind}: {study.name} -->\n", f"<!-- /{kind}: {study.name} -->"
        if begin in page:
            page = filled_in(page, begin, generated, end)
    return page


def about_losses(study: Study, rows: Rows) -> list[str]:
    """The explanations of the columns in the table of losses."""
    lines = [
        "**validation loss**: nats a token, of the final model, with label smoothing as in training. ± is a standard "
        "error over seeds. **not smoothed**: the same without label smoothing.",
        "**p (seeds)**: Welch's t-test over seeds, on the smoothed loss. **p (Holm)** corrects it for the number of "
        "systems in the study.",
    ]
    if any(
        study.are_paired(system.name, baseline)
        for system in study.systems
        if system.name in rows and (baseline := study.baseline_of(system)) in rows
    ):
        lines.append(
            "If runs of a system start from the same trained models as runs of the baseline, the difference and the "
            "tests pair runs of one seed: p comes from a paired t-test."
        )
    if study.margin:
        lines.append(
            "**p (equal)**: two one-sided tests (TOST), with Holm's correction. A small value is evidence that the "
            f"losses differ by less than {study.margin} nats."
        )
    more_seeds = " And a system close to the baseline gets more seeds." * bool(study.close_seeds)
    lines.append(f"The p-values ignore that seed 1 also chose the setting.{more_seeds}")
    return lines


def about_scores(study: Study, rows: Rows) -> list[str]:
    """The explanations of the columns in the table of scores."""
    if has_pairs(rows):
        return ["A score that names no language pair is the mean over the pairs."]
    run = next(iter(next(iter(rows.values())).values()))
    lines = []
    if "sets" in run["test"]:
        lines.append(
            f"**all sets**: computed on their {run['test']['sentences']:,} sentences together. It is not the mean of "
            "the sets' scores."
        )
    if study.metric == "multi_bleu" and study.beside == "chrf":
        lines.append("**chrF** is of the tokenised text, too, so it is not comparable with chrF of plain text.")
    lines.append(
        "**p (sentences)**: approximate randomisation over sentences, on the seeds that both systems have. It is "
        "about these trained models only."
    )
    return lines


def beside_published(study: Study, rows: Rows) -> str:
    """For each test set, the published score, and our mean and standard deviation over seeds."""
    cells = []
    for by_seed in rows.values():
        for name, published in study.published["scores"].items():
            scores = {seed: parts_of(run)[name][study.metric] for seed, run in sorted(by_seed.items())}
            deviation = f"{statistics.stdev(scores.values()):.2f}" if len(scores) > 1 else ""
            mean = statistics.mean(scores.values())
            cells.append(
                {
                    "test set": name,
                    "published": f"{published:.2f}",
                    "mean": f"{mean:.2f}",
                    "standard deviation": deviation,
                    "difference": f"{mean - published:+.2f}",
                    "BLEU of each seed": ", ".join(f"{score:.2f}" for score in scores.values()),
                }
            )
    return f"{markdown(cells)}\n{TITLES[study.metric]}. Published: {study.published['title']}.\n" if cells else ""


def table(study: Study, rows: Rows, results: Path) -> str:
    """Two tables with a row for each system: losses with the tests over seeds, then scores and settings.

    A study with published scores has the table of `beside_published` instead.
    """
    if study.published:
        return beside_published(study, rows)
    losses, scores = [], []
    for cells in table_cells(study, rows, results).values():
        names = [*cells]
        split = names.index(score_title(rows, study.metric))
        if cells["validation loss"]:  # a pruned model has none
            losses.append({name: cells[name] for name in names[:split]})
        scores.append({name: cells[name] for name in ("system", *names[split:])})
    parts = [markdown(losses), listed(about_losses(study, rows)), markdown(scores), listed(about_scores(study, rows))]
    return "\n".join(parts)


def listed(lines: Sequence[str]) -> str:
    """A list in Markdown."""
    return "".join(f"- {line}\n" for line in lines)


def summary(study: Study, rows: Rows, results: Path) -> str:
    """The rows that `summary` in the study's file names, without the columns that need an explanation.

    A study with published scores has the table of `beside_published`, which is short.
    """
    if study.published:
        return beside_published(study, rows)
    columns = ["system", "parameters", score_title(rows, study.metric), "validation loss", "updates", "seeds"]
    cells = table_cells(study, rows, results)
    return markdown([{column: cells[name][column] for column in columns} for name in study.summary if name in cells])


def score_title(rows: Rows, metric: str) -> str:
    """A score's title in a table. If runs have several test sets, the score is of all their sentences together."""
    several = any("sets" in run.get("test", {}) for by_seed in rows.values() for run in by_seed.values())
    return TITLES[metric] + ", all sets" * several


def table_cells(study: Study, rows: Rows, results: Path) -> dict[str, dict[str, str]]:
    """The cells of each system by column: first the validation losses and the tests over seeds, then the scores."""
    comparison, records = load_comparison(results), read_records(results)
    cells: dict[str, dict[str, str]] = {}
    p_columns = ["p (seeds)", "p (Holm)", *(["p (equal)"] if study.margin else [])]
    losses = {name: [validation_loss(run) for run in by_seed.values()] for name, by_seed in rows.items()}
    against = {name: baseline_of(study, name) for name in rows if not name.startswith(PRUNED)}
    sides = {
        name: Sides(study, rows, name, baseline) for name, baseline in against.items() if baseline and baseline in rows
    }
    sides = {name: each for name, each in sides.items() if each.ours}
    planned = sum(study.baseline_of(system) is not None for system in study.systems)
    p_seeds = [each.p(validation_loss) for each in sides.values()]
    p_equal = [each.p_equal(validation_loss, study.margin) if study.margin else None for each in sides.values()]
    adjusted = (p_seeds, holm_of_planned(p_seeds, planned), holm_of_planned(p_equal, planned))
    tests = {name: p for name, *p in zip(sides, *adjusted, strict=True)}
    for name, by_seed in rows.items():
        runs, test = list(by_seed.values()), comparison.get(name, {})
        p = tests.get(name, [None] * 3)
        pruned = name.startswith(PRUNED)
        lost = lost_seeds(study, study.system(name.removeprefix(PRUNED)), records)
        known = paired_runs(study, rows, name).items() <= test.items()
        p_sentences = f"{test[study.metric]['p_randomization']:.4f}" if known else ""
        difference = signed(sides[name].difference(validation_loss), 3) if name in sides else ""
        cells[name] = {
            "system": study.system(name.removeprefix(PRUNED)).title + ", pruned" * pruned,
            "parameters": in_millions(statistics.mean(run["parameters"] for run in runs)),
            "seeds": f"{len(runs)} of {len(runs) + lost}, the others diverged" if lost else str(len(runs)),
            "updates": "" if pruned else updates_since_start(study, rows, name),
            "validation loss": "" if pruned else with_error(losses[name], digits=3),
            "not smoothed": "" if pruned else with_error([run["validation"]["nll"] for run in runs], digits=3),
            **({"compared with": title_of_baseline(study, name)} if has_baselines(study) else {}),
            "difference in loss": difference,
            **{column: p_value(value) for column, value in zip(p_columns, p, strict=False)},
            score_title(rows, study.metric): with_error([scores_of(run)[study.metric] for run in runs]),
            **{each: with_error([parts_of(run)[each][study.metric] for run in runs]) for each in parts_of(runs[0])},
            score_title(rows, study.beside): with_error([scores_of(run)[study.beside] for run in runs]),
            **({} if has_pairs(rows) else {"p (sentences)": p_sentences}),
            "setting": layers_left(runs) if pruned else setting_in_words(runs[0]),
            **(costs(runs, pruned) if study.costs else {}),
        }
    return cells


def comparisons(study: Study, rows: Rows) -> str:
    """The table of a study's further comparisons, with tests over seeds, for pairs of systems that both have rows.

    A comparison whose runs are not made yet counts in Holm's correction. Its runs therefore cannot make an earlier
    result insignificant.
    """
    pairs = [(one, other) for one, other in study.comparisons if one in rows and other in rows]
    found = {pair: sides for pair in pairs if (sides := Sides(study, rows, *pair)).ours}
    if not found:
        return ""

    def score(run: Record) -> float:
        return scores_of(run)[study.metric]

    p_losses, p_scores = (
        holm_of_planned([sides.p(value) for sides in found.values()], len(study.comparisons))
        for value in (validation_loss, score)
    )
    return markdown(
        [
            {
                "system": study.system(one).title,
                "compared with": study.system(other).title,
                "test": "paired t" if sides.paired else "Welch",
                "seeds": " and ".join(str(count) for count in dict.fromkeys((len(sides.ours), len(sides.theirs)))),
                "validation loss": signed(sides.difference(validation_loss), 3),
                "p (Holm)": p_value(p_loss),
                score_title(rows, study.metric): signed(sides.difference(score), 2),
                "p (Holm), scores": p_value(p_score),
            }
            for ((one, other), sides), p_loss, p_score in zip(found.items(), p_losses, p_scores, strict=True)
        ]
    )


class Sides:
    """The runs of two systems, and tests over seeds that show whether the systems differ.

    If runs with one seed start from the same trained model, they form a pair. Then the tests are over the differences
    of the pairs, on the seeds that both systems have.

    Attributes:
        ours, theirs: the runs of each system; empty if runs form pairs, and the systems have no seed in common.
        paired: whether runs at the same place form a pair.
    """

    def __init__(self, study: Study, rows: Rows, one: str, other: str) -> None:
        self.paired = study.are_paired(one, other)
        common = sorted(rows[one].keys() & rows[other].keys())
        self.ours, self.theirs = (
            [rows[name][seed] for seed in (common if self.paired else rows[name])] for name in (one, other)
        )

    def values(self, value: Callable[[Record], float]) -> tuple[list[float], list[float]]:
        """The `value` of each run, for both systems."""
        return [value(run) for run in self.ours], [value(run) for run in self.theirs]

    def difference(self, value: Callable[[Record], float]) -> float:
        """The difference between the means, ours minus theirs."""
        ours, theirs = map(statistics.mean, self.values(value))
        return ours - theirs

    def p(self, value: Callable[[Record], float]) -> float | None:
        """The p of the test whether the means differ."""
        return (paired_t if self.paired else welch)(*self.values(value))

    def p_equal(self, value: Callable[[Record], float], margin: float) -> float | None:
        """The p of the test whether the difference is below the margin."""
        return equivalence(*self.values(value), margin, paired=self.paired)


def holm_of_planned(p_values: Sequence[float | None], planned: int) -> list[float | None]:
    """Apply Holm's correction for all planned tests; a test that cannot be made yet counts with a p of 1."""
    counted = [1.0 if p is None else p for p in p_values] + [1.0] * (planned - len(p_values))
    return [None if p is None else adjusted for p, adjusted in zip(p_values, holm(counted), strict=False)]


def in_millions(parameters: float) -> str:
    """A number of parameters in millions, such as `3.00 M`."""
    return f"{parameters / 1e6:.2f} M"


def has_baselines(study: Study) -> bool:
    """True if some system has a baseline of its own."""
    return any(system.baseline for system in study.systems)


def title_of_baseline(study: Study, name: str) -> str:
    """The title of the system that a row is compared with."""
    baseline = baseline_of(study, name)
    return study.system(baseline).title if baseline else ""


def costs(runs: list[Record], pruned: bool) -> dict[str, str]:
    """The columns of costs: processor time of an update, with its share of validation and saving, and peak memory.

    Other processes on the machine do not change the processor time. It does not include the time of a GPU.
    """
    train = [run["train"] for run in runs]
    seconds = statistics.mean(60 * each["processor_minutes"] / each["steps"] for each in train)
    peak = max(each["peak_memory_bytes"] for each in train) / 2**30
    return {
        "processor seconds an update, in all": "" if pruned else f"{seconds:.2f}",
        "peak memory, GiB": "" if pruned else f"{peak:.1f}",
    }


def setting_in_words(record: Record) -> str:
    """A record's setting, such as `learning_rate 0.004, dropout 0.1`."""
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in record["setting"].items())


def updates(runs: list[Record]) -> str:
    """The updates of the runs of all seeds, such as `1,075 to 1,118`: runs that stop early differ."""
    steps = sorted({run["train"]["steps"] for run in runs})
    return " to ".join(f"{count:,}" for count in dict.fromkeys([steps[0], steps[-1]]))


def updates_since_start(study: Study, rows: Rows, name: str) -> str:
    """The updates of the runs that a system starts from, if any, and of its own runs, such as `13,980 + 9,320`."""
    runs, starts = rows[name], rows.get(study.system(name).start or "", {})
    before = [starts[seed] for seed in runs if seed in starts]
    return " + ".join(updates(part) for part in (before, [*runs.values()]) if part)


def layers_left(runs: list[Record]) -> str:
    """The layers of encoder and decoder after pruning, run by run, such as `6 + 3 layers, 5 + 3 layers`."""
    return ", ".join(f"{run['layers']['encoder']} + {run['layers']['decoder']} layers" for run in runs)


def with_error(values: list[float], digits: int = 2) -> str:
    """The mean and, for two values or more, the standard error, such as `36.10 ± 0.20`."""
    error = standard_error(values)
    return f"{statistics.mean(values):.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
