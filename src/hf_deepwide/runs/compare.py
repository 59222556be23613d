"""Systems against a baseline: losses, scores, differences, and the tests that carry them."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..data.corpora import load_parallel, read_lines
from ..errors import UserError, quote
from ..evaluation.metrics import ALL_METRICS, build_metrics, check_parallel, score
from ..evaluation.seeds import clustered_bootstrap, equivalence, holm, standard_error, welch
from ..evaluation.significance import compare_systems
from .recipe import RECIPE, load_recipe
from .run_folder import RESULTS, TRANSLATIONS

LOSSES = {"loss": "validation loss", "nll": "without smoothing"}  # in nats a token; what each is called in the table
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Comparison:
    """A system beside the baseline, by one metric.

    Args:
        system: its name.
        metric: the metric: `loss` or `nll` (smaller is better), or a name of `evaluation.metrics`.
        scores: of each run.
        difference: mean of the system's scores minus that of the baseline's; None for the baseline.
        p_seeds: Welch's t-test over runs (two-sided); None with fewer than two runs on a side.
        p_sentences: approximate randomisation over sentences; None where the numbers of runs differ.
        p_holm: `p_seeds` adjusted for the number of systems that are compared with the baseline (Holm).
        interval: 95 % of the differences in the clustered bootstrap over seeds and sentences; None for losses.
        margin: the largest difference that does not matter, where it was given.
        p_equivalence: two one-sided tests over runs that the difference is within the margin, adjusted likewise.
    """

    system: str
    metric: str
    scores: list[float]
    difference: float | None = None
    p_seeds: float | None = None
    p_sentences: float | None = None
    p_holm: float | None = None
    interval: tuple[float, float] | None = None
    margin: float | None = None
    p_equivalence: float | None = None

    @property
    def standard_error(self) -> float | None:
        """Of the mean over runs; None of one run."""
        return standard_error(self.scores)


def compare_runs(
    systems: Sequence[str],
    reference: str | None = None,
    metrics: Sequence[str] = ("bleu",),
    lowercase: bool = False,
    margins: Mapping[str, float] | None = None,
) -> list[Comparison]:
    """Score systems and test each against the first.

    Args:
        systems: folders of finished runs, or files of translations; runs of a system joined by commas.
        reference: a file of references; None: the test set that the runs' recipes name.
        metrics: names of `evaluation.metrics`.
        lowercase: score without regard to case.
        margins: metric, `loss` or `nll` to the margin of a test of equivalence, in the unit of the metric.

    Returns:
        Metric by metric, in the order of the systems. Validation losses come first: see `validation_losses`.

    Raises:
        UserError: fewer than two systems, or files that are missing or do not fit each other.
    """
    if len(systems) < 2:
        raise UserError("name two systems or more; the first is the baseline")
    if twice := {name for name in systems if list(systems).count(name) > 1}:
        raise UserError(f"{', '.join(sorted(twice))} is named twice")
    build_metrics(metrics)
    runs = {system: [Path(name) for name in system.split(",")] for system in systems}
    references = _references(reference, [path for paths in runs.values() for path in paths])
    lines = {system: [_translations(path) for path in paths] for system, paths in runs.items()}
    for system, paths in runs.items():
        for path, translations in zip(paths, lines[system], strict=True):
            check_parallel(translations, references, (str(path), reference or "the references"))
    losses, margins = validation_losses(runs), margins or {}
    if strange := [name for name in margins if name not in (*losses, *metrics)]:
        raise UserError(
            f"a margin for {quote(strange[0])}, which is not compared; compared: {', '.join((*losses, *metrics))}"
        )
    found = [each for name, values in losses.items() for each in _tested(name, values, margins.get(name))]
    for metric in metrics:
        scores = {
            system: [score(each, references, lowercase=lowercase, metrics=[metric])[metric] for each in lines[system]]
            for system in systems
        }
        more = {
            system: _over_sentences(lines[systems[0]], lines[system], references, metric, lowercase)
            for system in systems[1:]
        }
        found += _tested(metric, scores, margins.get(metric), more)
    return found


def validation_losses(runs: Mapping[str, Sequence[Path]]) -> dict[str, dict[str, list[float]]]:
    """Losses that are comparable: `loss` and `nll` to system to the value of each run, in nats a token.

    `loss` is smoothed as in training, `nll` is not smoothed. A loss is left out unless all systems are folders of runs
    that hold it, with one tokenizer, and for `loss` with the same smoothing: nats a token of two tokenizers differ.
    """
    folders = [path for paths in runs.values() for path in paths]
    if not all((path / name).is_file() for path in folders for name in (RESULTS, TOKENIZER)):
        return {}
    if len({(path / TOKENIZER).read_bytes() for path in folders}) > 1:
        return {}
    results = {path: json.loads((path / RESULTS).read_text(encoding="utf-8")) for path in folders}
    losses = {path: _losses(results[path]) for path in folders}
    smoothing = {each["recipe"]["training"].get("label_smoothing_factor") for each in results.values()}
    known = [name for name in LOSSES if all(name in each for each in losses.values())]
    comparable = [name for name in known if name != "loss" or len(smoothing) == 1]
    return {
        name: {system: [losses[path][name] for path in paths] for system, paths in runs.items()} for name in comparable
    }


def _losses(results: Mapping[str, Any]) -> dict[str, float]:
    """The losses of the final model; of a run that measured none, the least of its validation curve."""
    if "validation" in results:
        return results["validation"]
    train = results.get("train", {})
    return {"loss": train["best_validation_loss"]} if "best_validation_loss" in train else {}


def _over_sentences(
    baseline: list[list[str]], system: list[list[str]], references: list[str], metric: str, lowercase: bool
) -> dict[str, Any]:
    """What the translations themselves say of a difference."""
    interval = clustered_bootstrap(system, baseline, references, metric=metric, lowercase=lowercase)
    found: dict[str, Any] = {"interval": (interval.low, interval.high)}
    if len(system) == len(baseline):
        joined = [[line for run in runs for line in run] for runs in (baseline, system)]
        tests = compare_systems(*joined, references, metrics=[metric], lowercase=lowercase, runs=len(system))
        found["p_sentences"] = tests[metric]["p_randomization"]
    return found


def _tested(
    metric: str,
    scores: Mapping[str, Sequence[float]],
    margin: float | None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Comparison]:
    """Each system beside the first one, by one metric, with the tests over runs and what else (`more`) is known."""
    (baseline, theirs), *others = scores.items()
    p_seeds = [welch(ours, theirs) for _, ours in others]
    p_equal = [equivalence(ours, theirs, margin) if margin is not None else None for _, ours in others]
    tests = zip(others, p_seeds, holm(p_seeds), holm(p_equal), strict=True)
    return [
        Comparison(baseline, metric, list(theirs)),
        *(
            Comparison(
                system,
                metric,
                list(ours),
                statistics.mean(ours) - statistics.mean(theirs),
                p_seeds=p,
                p_holm=adjusted,
                margin=margin,
                p_equivalence=equal,
                **(more or {}).get(system, {}),
            )
            for (system, ours), p, adjusted, equal in tests
        ),
    ]


def report(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a table for a terminal: metric by metric, one line a system."""
    with_margin = any(each.margin is not None for each in comparisons)
    head = ["system", "runs", "mean", "s.e.", "difference", "95 % interval", "p (seeds)", "p (Holm)"]
    head += ["p (equal)"] * with_margin + ["p (sentences)"]
    rows = [[*_cells(each, with_margin)] for each in comparisons]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines, metric = [], None
    for each, cells in zip(comparisons, rows, strict=True):
        if each.metric != metric:
            metric = each.metric
            title = f"{LOSSES[metric]}, nats a token (less is better)" if metric in LOSSES else metric
            lines += [""] * bool(lines) + [title, _line(head, widths)]
        lines.append(_line(cells, widths))
    lines += [
        "",
        "s.e. is the standard error of the mean over runs. p (seeds) is of Welch's t-test over runs. p (Holm) allows",
        "for the number of systems. The interval resamples runs and sentences. p (sentences) is of these runs alone.",
    ]
    if with_margin:
        margins = {each.metric: each.margin for each in comparisons if each.margin is not None}
        named = ", ".join(f"{value:g} ({metric})" for metric, value in margins.items())
        lines.append(f"A small p (equal) says that the difference is within {named}; it is adjusted likewise.")
    return "\n".join(lines)


def to_json(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a JSON list of objects with the fields of `Comparison`, and `standard_error`."""
    entries = [asdict(each) | {"standard_error": each.standard_error} for each in comparisons]
    return json.dumps(entries, indent=2, ensure_ascii=False) + "\n"


def parse_margins(words: Sequence[str]) -> dict[str, float]:
    """Margins written as `bleu=0.5 loss=0.02`.

    Raises:
        UserError: a word is not METRIC=NUMBER with a number above 0.
    """
    margins = {}
    for word in words:
        metric, _, number = word.partition("=")
        try:
            margins[metric] = float(number)
        except ValueError:
            margins[metric] = 0.0
        if metric not in (*LOSSES, *ALL_METRICS) or not 0 < margins[metric] < float("inf"):
            raise UserError(
                f"--equivalence: {quote(word)}; write METRIC=MARGIN with a margin above 0, as bleu=0.5 or loss=0.02; "
                f"metrics: {', '.join((*LOSSES, *ALL_METRICS))}"
            )
    return margins


def _cells(each: Comparison, with_margin: bool) -> list[str]:
    digits = 4 if each.metric in LOSSES else 2
    interval = "" if each.interval is None else " to ".join(f"{bound:+.{digits}f}" for bound in each.interval)
    return [
        each.system,
        str(len(each.scores)),
        f"{statistics.mean(each.scores):.{digits}f}",
        _cell(each.standard_error, f".{digits}f"),
        _cell(each.difference, f"+.{digits}f"),
        interval,
        _cell(each.p_seeds, ".4f"),
        _cell(each.p_holm, ".4f"),
        *([_cell(each.p_equivalence, ".4f")] if with_margin else []),
        _cell(each.p_sentences, ".4f"),
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _references(reference: str | None, runs: Sequence[Path]) -> list[str]:
    """The lines of the file of references, or the test set of the recipe of the first run."""
    if reference is not None:
        return list(read_lines(Path(reference)))
    folder = next((path for path in runs if (path / RECIPE).is_file()), None)
    if folder is None:
        raise UserError("none of the systems is the folder of a run, so name the file of references: --reference FILE")
    data = load_recipe(folder / RECIPE).data
    if data.pairs is not None:
        raise UserError(f"{folder} translates several language pairs; compare its files translations.PAIR.txt")
    return load_parallel(data, "test")["target"][:]


def _translations(path: Path) -> list[str]:
    """The translations in a file, or in the folder of a finished run."""
    file = path / TRANSLATIONS if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"there is no file {file}; give a file of translations, or the folder of a finished run")
    return list(read_lines(file))
