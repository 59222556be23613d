"""Comparison of systems with a baseline: losses, scores, differences, and statistical tests of the differences."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import UserError, quote
from ..evaluation.metrics import ALL_METRICS, build_metrics, check_parallel, score
from ..evaluation.seeds import clustered_bootstrap, equivalence, holm, standard_error, welch
from ..evaluation.significance import p_value, randomization, signed
from .comparable import (
    LOSSES,
    check_distinct,
    check_seeds,
    recipes_of,
    references_of,
    scoring_of,
    translations_of,
    validation_losses,
    warn_of_searches,
)


@dataclass(frozen=True)
class Comparison:
    """A system compared with the baseline by one metric.

    The baseline has an entry of its own, in which all fields from `difference` to `p_equivalence` are None.

    Args:
        system: name of the system.
        metric: `loss` or `nll` (smaller is better), or a name of `evaluation.metrics`.
        scores: the score of each run.
        difference: mean of the system's scores minus the mean of the baseline's scores.
        p_seeds: p of Welch's t-test over runs (two-sided); None where `welch` makes no test.
        p_sentences: p of approximate randomisation over sentences; None for losses, or if the numbers of runs differ.
        p_holm: `p_seeds` adjusted for the number of systems that are compared with the baseline (Holm).
        interval: 95 % of the differences in the clustered bootstrap over seeds and sentences; None for losses.
        margin: the largest difference that does not matter, if a margin was given.
        p_equivalence: p of two one-sided tests over runs that the difference is within the margin, adjusted as
            `p_holm` is.
        signature: how the metric was computed, in sacreBLEU's form; None for losses.
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
    signature: str | None = None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean over runs; None for a single run."""
        return standard_error(self.scores)


def compare_runs(
    systems: Sequence[str],
    reference: str | None = None,
    metrics: Sequence[str] | None = None,
    lowercase: bool | None = None,
    tokenize: str | None = None,
    margins: Mapping[str, float] | None = None,
    test_set: str | None = None,
    target_lang: str | None = None,
) -> list[Comparison]:
    """Score systems and test each against the first.

    Args:
        systems: folders of finished runs, or files of translations. Commas join the runs of one system.
        reference: a file of references; None: the test set that the runs' recipes name.
        metrics: names of `evaluation.metrics`; None: the metrics of the recipes, or bleu and chrf.
        lowercase: score without regard to case; None: as in the recipes, or False.
        tokenize: sacreBLEU's tokenizer; None: as in the recipes, or 13a.
        margins: metric, `loss` or `nll` to the margin of a test of equivalence, in the unit of the metric.
        test_set: the test set to compare, if the recipes name several; None: all test sets together.
        target_lang: the language of the translations, for metrics that need it; None: as in the recipes.

    Returns:
        The comparisons, metric by metric, in the order of the systems. Validation losses come first (see
        `validation_losses`).

    Raises:
        UserError: fewer than two systems; files that are missing or do not fit each other; runs that were tested on
            different sentences, or are scored in different ways; or a margin for a metric that is not compared.
    """
    runs = check_distinct(systems)
    recipes = recipes_of(runs)
    check_seeds(runs, recipes)
    warn_of_searches(recipes)
    scoring = scoring_of(recipes, metrics, lowercase, tokenize, target_lang)
    build_metrics(scoring.metrics, **scoring.settings)
    tested = references_of(recipes, reference, test_set)
    lines: dict[str, list[list[str]]] = {system: [] for system in runs}
    for system, paths in runs.items():
        for path in paths:
            translations, beside = translations_of(path), tested.of(path)
            check_parallel(translations, beside.lines, (str(path), reference or "the references"))
            lines[system].append(beside.part(translations))
    references = tested.usual.part(tested.usual.lines)
    losses, margins = validation_losses(runs, recipes), margins or {}
    if strange := [name for name in margins if name not in (*losses, *scoring.metrics)]:
        compared = ", ".join((*losses, *scoring.metrics))
        raise UserError(f"a margin for {quote(strange[0])}, which is not compared; compared: {compared}")
    found = [each for name, values in losses.items() for each in _tested(name, values, margins.get(name))]
    for metric in scoring.metrics:
        scored = {
            system: [score(each, references, metrics=[metric], **scoring.settings) for each in lines[system]]
            for system in systems
        }
        more = {
            system: _over_sentences(lines[systems[0]], lines[system], references, metric, scoring.settings)
            for system in systems[1:]
        }
        scores = {system: [each[metric] for each in by_run] for system, by_run in scored.items()}
        signature = scored[systems[0]][0]["signature"][metric]
        found += [replace(each, signature=signature) for each in _tested(metric, scores, margins.get(metric), more)]
    return found


def _over_sentences(
    baseline: list[list[str]],
    system: list[list[str]],
    references: list[str],
    metric: str,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the results over sentences: the bootstrap interval, and `p_sentences` if both have as many runs."""
    interval = clustered_bootstrap(system, baseline, references, metric=metric, **settings)
    found: dict[str, Any] = {"interval": (interval.low, interval.high)}
    if len(system) == len(baseline):
        joined = [[line for run in runs for line in run] for runs in (baseline, system)]
        built = build_metrics([metric], **settings)[metric]
        found["p_sentences"] = randomization(*joined, references, built, runs=len(system))
    return found


def _tested(
    metric: str,
    scores: Mapping[str, Sequence[float]],
    margin: float | None,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Comparison]:
    """Compare each system with the first one by one metric; `more` holds further results of each system."""
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
    """The comparisons as a table for a terminal: metric by metric, one line per system."""
    with_margin = any(each.margin is not None for each in comparisons)
    head = ["system", "runs", "mean", "s.e.", "difference", "95 % interval", "p (seeds)", "p (Holm)"]
    head += ["p (equal)"] * with_margin + ["p (sentences)"]
    rows = [[*_cells(each, with_margin)] for each in comparisons]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines, metric = [], None
    for each, cells in zip(comparisons, rows, strict=True):
        if each.metric != metric:
            metric = each.metric
            title = (
                f"{LOSSES[metric]}, nats a token (less is better)"
                if metric in LOSSES
                else f"{metric}, {each.signature}"
            )
            lines += [""] * bool(lines) + [title, _line(head, widths)]
        lines.append(_line(cells, widths))
    lines += [
        "",
        "s.e. is the standard error of the mean over runs. p (seeds) comes from Welch's t-test over runs. p (Holm)",
        "allows for the number of systems; p (sentences) does not. The interval resamples runs and sentences. p",
        "(sentences) holds for these runs alone: it tests a system's translations pooled as one text. The difference",
        "is of means over runs.",
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
    """Parse margins that are written as `bleu=0.5 loss=0.02`.

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
    interval = "" if each.interval is None else " to ".join(signed(bound, digits) for bound in each.interval)
    return [
        each.system,
        str(len(each.scores)),
        f"{statistics.mean(each.scores):.{digits}f}",
        "" if each.standard_error is None else f"{each.standard_error:.{digits}f}",
        "" if each.difference is None else signed(each.difference, digits),
        interval,
        p_value(each.p_seeds),
        p_value(each.p_holm),
        *([p_value(each.p_equivalence)] if with_margin else []),
        p_value(each.p_sentences),
    ]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
