"""Tests over training runs: would two systems also differ after training with other seeds?

`significance.py` tests whether the translations of given trained models differ on sentences of this kind. Here the
unit is a training run with its seed, and the question is whether the next training of each system would differ, too:

    welch           do the mean scores differ? Welch's t-test (1947), unequal variances
    paired_t        the same where runs with one seed start from one trained model: Student's t-test of differences
    holm            the same for several systems against one baseline: p that allow for their number (Holm 1979)
    equivalence     do the mean scores differ by less than a margin? Two one-sided tests (Schuirmann 1987), Welch's or
                    Student's of differences
    clustered_bootstrap  an interval for a difference of corpus scores, over seeds and sentences at once

If no test finds a difference, the systems are not thereby equal: only `equivalence` can show that.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics.base import Metric
from scipy.stats import ttest_1samp, ttest_ind
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import ttost_ind, ttost_paired

from ..errors import UserError
from .metrics import build_metrics, check_parallel

SHARE = 0.95  # the share of the resamples that lie in an interval


class Interval(NamedTuple):
    """A difference, and the interval in which 95 % of the resampled differences lie.

    Attributes:
        difference: the observed difference, in points of the metric.
        low, high: the 2.5 % and 97.5 % quantiles of the resampled differences.
        standard_error: standard deviation of the resampled differences.
    """

    difference: float
    low: float
    high: float
    standard_error: float


def standard_error(scores: Sequence[float]) -> float | None:
    """Return the standard error of the mean, stdev / sqrt(n); None for fewer than two scores."""
    return statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None


def welch(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Test whether the means of two systems' scores differ (Welch 1947).

    Args:
        ours, theirs: one score for each training; the numbers of trainings may differ.

    Returns:
        The two-sided p. None if there is no test: a side has fewer than two scores, a score is not finite, or no
        side's scores vary.
    """
    return float(ttest_ind(ours, theirs, equal_var=False).pvalue) if _varies(ours, theirs) else None


def paired_t(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Test whether the mean difference of paired trainings is 0 (Student 1908).

    Args:
        ours, theirs: one score for each training. Scores at the same place form a pair.

    Returns:
        The two-sided p. None if there is no test: fewer than two pairs, a score that is not finite, or differences
        that do not vary.

    Raises:
        ValueError: the numbers of trainings differ.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return float(ttest_1samp(differences, 0.0).pvalue) if _varies(differences) else None


def equivalence(
    ours: Sequence[float], theirs: Sequence[float], margin: float, *, paired: bool = False
) -> float | None:
    """Test whether the means of two systems' scores differ by less than a margin (TOST, Schuirmann 1987).

    The two one-sided tests are of the kind of `welch` or of `paired_t`. A small p means that the difference lies
    between -margin and margin.

    Args:
        ours, theirs: one score for each training.
        margin: the largest difference that does not matter, in the scores' unit. Choose it before you see the scores.
        paired: whether scores at the same place form a pair.

    Returns:
        The larger p of the two tests. None if there is no test, as in `welch` and `paired_t`.

    Raises:
        UserError: the margin is not a positive number.
        ValueError: the numbers of trainings differ, and `paired` is true.
    """
    if not (math.isfinite(margin) and margin > 0):
        raise UserError(f"a margin of {margin} makes no test of equivalence; accepted: numbers above 0")
    if paired:
        differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        varies = _varies(differences)
        return float(ttost_paired(np.array(ours), np.array(theirs), -margin, margin)[0]) if varies else None
    return float(ttost_ind(ours, theirs, -margin, margin, usevar="unequal")[0]) if _varies(ours, theirs) else None


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust the p of several comparisons for the number of comparisons (Holm 1979).

    If each adjusted p below 0.05 is called significant, the chance that any of these results is false is below 5 %.

    Args:
        p_values: the p of each comparison. None: there was no test, and the comparison does not count.
    """
    tested = [p for p in p_values if p is not None]
    adjusted = iter(multipletests(tested, method="holm")[1] if tested else ())
    return [None if p is None else float(next(adjusted)) for p in p_values]


def clustered_bootstrap(
    ours: Sequence[Sequence[str]],
    theirs: Sequence[Sequence[str]],
    references: Sequence[str],
    *,
    metric: str = "bleu",
    samples: int = 1000,
    seed: int = 12345,
    lowercase: bool = False,
    tokenize: str = "13a",
    target_lang: str | None = None,
) -> Interval:
    """Resample seeds and sentences together, for an interval of the difference between two systems' scores.

    Each resample draws trainings of each system with replacement, and also sentences. The drawn sentences are the same
    for both systems and for all trainings (Owen 2007, the pigeonhole bootstrap). On them, each drawn training has a
    corpus score, and the system's score is the mean of these. Scores are computed from sums of sacreBLEU's counts for
    each sentence, so that no text is scored twice.

    With n trainings, the variance of the drawn means is only (n - 1) / n of the right variance. For two or three
    trainings the interval is therefore too narrow: trust `welch`. With one training on each side, only sentences are
    resampled.

    Args:
        ours: the translations by each training of the system, `[trainings, sentences]`.
        theirs: the translations by each training of the baseline. The numbers of trainings may differ.
        references: one reference for each sentence, `[sentences]`.
        metric: the name of a metric in `evaluation.metrics`.
        samples: number of resamples.
        seed: seed of the draws.
        lowercase, tokenize, target_lang: as in `metrics.score`.

    Returns:
        The difference (system minus baseline) and its interval.

    Raises:
        UserError: the translations and references do not fit each other, or a number is out of range.
    """
    for name, value, least in (("samples", samples, 2), ("seed", seed, 1)):  # one sample has no standard error
        if value < least:
            raise UserError(f"{name}: {value}; accepted: {least} or more")
    for name, runs in (("the system", ours), ("the baseline", theirs)):
        if not runs:
            raise UserError(f"{name} has no training; at least one is needed")
        for translations in runs:
            check_parallel(translations, references, (f"a training of {name}", "the references"))
    built = build_metrics([metric], lowercase=lowercase, tokenize=tokenize, target_lang=target_lang)[metric]
    draw = np.random.default_rng(seed)
    sides = [_counts(built, runs, references) for runs in (ours, theirs)]
    once = np.ones((1, len(references)))
    observed = [_scores(built, counts, once).mean() for counts in sides]
    drawn = draw.multinomial(len(references), [1 / len(references)] * len(references), size=samples).astype(float)
    means = []
    for counts in sides:
        trainings = len(counts)
        weights = draw.multinomial(trainings, [1 / trainings] * trainings, size=samples) / trainings
        means.append((_scores(built, counts, drawn) * weights).sum(1))
    differences = means[0] - means[1]
    low, high = np.quantile(differences, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Interval(float(observed[0] - observed[1]), float(low), float(high), float(differences.std(ddof=1)))


def _counts(metric: Metric, runs: Sequence[Sequence[str]], references: Sequence[str]) -> np.ndarray:
    """Return the metric's counts for each sentence, `[trainings, sentences, counts]`."""
    return np.array([metric._extract_corpus_statistics(list(run), [list(references)]) for run in runs], dtype=float)


def _scores(metric: Metric, counts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return corpus scores `[samples, trainings]`. `weights` `[samples, sentences]` are the counts of sentences."""
    sums = np.einsum("sn,tnc->stc", weights, counts, optimize=True)
    return np.array([[metric._compute_score_from_stats(row.tolist()).score for row in sample] for sample in sums])


def _varies(*sides: Sequence[float]) -> bool:
    """Return True if each side has two or more scores, all finite, and the scores of at least one side vary."""
    if min(map(len, sides)) < 2 or not all(map(math.isfinite, chain(*sides))):
        return False
    return any(len(set(scores)) > 1 for scores in sides)
