"""Systems against a baseline: scores, differences, and the tests that carry them."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scipy.stats import ttest_ind

from ..data.corpora import load_parallel, read_lines
from ..errors import UserError
from ..evaluation.metrics import build_metrics, check_parallel, score
from ..evaluation.significance import compare_systems
from .recipe import RECIPE, load_recipe

TRANSLATIONS = "translations.txt"


@dataclass(frozen=True)
class Comparison:
    """A system beside the baseline, by one metric.

    Args:
        system: its name.
        metric: the metric.
        scores: of each run.
        difference: mean of the system's scores minus that of the baseline's; None for the baseline.
        p_seeds: Welch's t-test over runs (two-sided); None with fewer than two runs on a side.
        p_sentences: approximate randomisation over sentences; None where the numbers of runs differ.
    """

    system: str
    metric: str
    scores: list[float]
    difference: float | None = None
    p_seeds: float | None = None
    p_sentences: float | None = None


def compare_runs(
    systems: Sequence[str], reference: str | None = None, metrics: Sequence[str] = ("bleu",), lowercase: bool = False
) -> list[Comparison]:
    """Score systems and test each against the first.

    Args:
        systems: folders of finished runs, or files of translations; runs of a system joined by commas.
        reference: a file of references; None: the test set that the runs' recipes name.
        metrics: names of `evaluation.metrics`.
        lowercase: score without regard to case.

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
    baseline = systems[0]
    found = []
    for metric in metrics:
        scores = {
            system: [score(each, references, lowercase=lowercase, metrics=[metric])[metric] for each in lines[system]]
            for system in systems
        }
        for system in systems:
            ours, theirs = scores[system], scores[baseline]
            if system == baseline:
                found.append(Comparison(system, metric, ours))
                continue
            p_seeds = p_sentences = None
            if min(len(ours), len(theirs)) > 1:
                p_seeds = float(ttest_ind(ours, theirs, equal_var=False).pvalue)
            if len(ours) == len(theirs):
                joined = [[line for run in lines[name] for line in run] for name in (baseline, system)]
                tests = compare_systems(*joined, references, metrics=[metric], lowercase=lowercase, runs=len(ours))
                p_sentences = tests[metric]["p_randomization"]
            difference = statistics.mean(ours) - statistics.mean(theirs)
            found.append(Comparison(system, metric, ours, difference, p_seeds, p_sentences))
    return found


def report(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as a table for a terminal."""
    width = max(len(each.system) for each in comparisons)
    lines = [f"{'system':<{width}}  metric      runs   score    ±       difference  p (seeds)  p (sentences)"]
    for each in comparisons:
        error = statistics.stdev(each.scores) / len(each.scores) ** 0.5 if len(each.scores) > 1 else None
        lines.append(
            f"{each.system:<{width}}  {each.metric:<10}  {len(each.scores):<5}  {statistics.mean(each.scores):<7.2f}  "
            f"{_cell(error, '.2f'):<6}  {_cell(each.difference, '+.2f'):<10}  {_cell(each.p_seeds, '.4f'):<9}  "
            f"{_cell(each.p_sentences, '.4f')}".rstrip()
        )
    lines.append("± is the standard error over runs.")
    return "\n".join(lines)


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
