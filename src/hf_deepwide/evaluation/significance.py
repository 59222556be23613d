"""Is one system better than another, or only luckier? Two paired tests on the same sentences.

Paired bootstrap resampling (Koehn 2004) draws test sets from the test set; paired approximate randomisation
(Riezler and Maxwell 2005) swaps the two systems' outputs sentence by sentence. A small p says that a difference as
large as the observed one would seldom come by chance. SacreBLEU's bootstrap, like the Moses script it follows,
recentres absolute differences and is the more lenient test: in the cases it was tried on here, its p was a quarter to
a half of the other's. Where the two disagree, believe the randomisation.

The randomisation is SciPy's. SacreBLEU's own counts only differences *greater* than the observed one. A metric with
few values, such as the share of valid code, ties with it in many trials, and its p would be far too small.

Both ask whether *these* translations differ on such sentences. What another training would have given they do not
know: train both systems with several seeds, and ask the tests of `seeds.py`, to which a training is the unit.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, cast

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result
from scipy.stats import permutation_test

from ..errors import UserError
from .metrics import METRICS, build_metrics, check_parallel

TRIALS_AT_ONCE = 256  # each holds two numbers for a sentence
DECIMALS = 9  # differences that are equal to so many decimals are ties: sums of fractions depend on their order


def compare_systems(
    baseline: Sequence[str],
    system: Sequence[str],
    references: Sequence[str],
    *,
    samples: int = 1000,
    trials: int = 10_000,
    seed: int = 12345,
    lowercase: bool = False,
    tokenize: str = "13a",
    target_lang: str | None = None,
    metrics: Sequence[str] = METRICS,
    runs: int = 1,
) -> dict:
    """Compare two systems' translations of the same sentences, with each metric.

    Of several runs of each system, a sentence's translations by all of them are drawn, and swapped, together: by
    runs of one system they are alike, so that taken for independent they would make p too small.

    Both tests are two-sided. Equal scores have p = 1, where sacreBLEU's bootstrap says 1 / (samples + 1) and so
    calls a system better than itself. The randomisation is exact where the trials suffice for all ways to swap.

    Args:
        baseline: translations of the first system, those of its `runs` runs one after the other.
        system: translations of the second, as many.
        references: one reference each.
        samples: resamples of the bootstrap.
        trials: trials of the approximate randomisation.
        seed: a positive number; same seed, same result.
        lowercase: as in `score`, like `tokenize`, `target_lang` and `metrics`.
        runs: trainings of each system, by different seeds. Scores are then of all their translations as one corpus.

    Returns:
        For each metric `{"baseline": {"score", "mean", "ci"}, "system": {"score", "mean", "ci"},
        "difference", "p_bootstrap", "p_randomization", "signature": {"bootstrap", "randomization"}}`.
        `mean` and `ci` are the bootstrap's mean and the half width of its 95 % interval; the difference is
        system minus baseline.

    Raises:
        UserError: sides that do not fit each other, or a seed or count out of range.
    """
    by_sentence = _by_sentence(baseline, system, references, runs, samples=samples, trials=trials, seed=seed)
    report = {}
    built = build_metrics(metrics, lowercase=lowercase, tokenize=tokenize, target_lang=target_lang)
    for name, metric in built.items():  # one test per metric: sacreBLEU tells metrics apart by names they share
        over_runs = _OverRuns(metric)
        (first, second), signature = _bootstrap(by_sentence, over_runs, references, samples, seed)
        difference = second.score - first.score
        report[name] = {
            "baseline": _with_interval(first),
            "system": _with_interval(second),
            "difference": difference,
            "p_bootstrap": second.p_value if difference else 1.0,
            "p_randomization": _randomization(by_sentence, over_runs, references, trials, seed),
            "signature": {
                "bootstrap": signature,
                "randomization": f"ar:{trials}|seed:{seed}|scipy:{version('scipy')}",
            },
        }
    return report


def randomization(
    baseline: Sequence[str],
    system: Sequence[str],
    references: Sequence[str],
    metric: Metric,
    *,
    trials: int = 10_000,
    seed: int = 12345,
    runs: int = 1,
) -> float:
    """The `p_randomization` of `compare_systems` by one metric, without its bootstrap.

    Args:
        baseline, system, references, trials, seed, runs: as in `compare_systems`.
        metric: one of `build_metrics`.
    """
    by_sentence = _by_sentence(baseline, system, references, runs, trials=trials, seed=seed)
    return _randomization(by_sentence, _OverRuns(metric), references, trials, seed)


def _by_sentence(
    baseline: Sequence[str], system: Sequence[str], references: Sequence[str], runs: int, **numbers: int
) -> Any:
    """The translations of each sentence by all runs, of both systems, once these fit each other and the numbers do."""
    for name, value in {**numbers, "runs": runs}.items():
        if value < 1:  # sacreBLEU takes samples or trials 0 as "default", and seed 0 as "no seed"
            raise UserError(f"{name}: {value}; accepted: 1 or more")
    references_label = f"references, {runs} times" if runs > 1 else "references"
    repeated = list(references) * runs
    check_parallel(baseline, repeated, ("the baseline's translations", references_label))
    check_parallel(system, repeated, ("the system's translations", references_label))
    count = len(references)
    return [[lines[index::count] for index in range(count)] for lines in (baseline, system)]


def signed(difference: float, digits: int) -> str:
    """A difference as tables show it, with its sign; one that is rounded to 0 is +0, whatever is left of it."""
    return f"{round(difference, digits) + 0.0:+.{digits}f}"  # -0.0 + 0.0 is 0.0


def p_value(p: float | None) -> str:
    """A p as tables show it: with four digits, and never as 0; nothing where there is none."""
    if p is None:
        return ""
    return "< 0.0001" if p < 0.00005 else f"{p:.4f}"


def _with_interval(result: Result) -> dict[str, float]:
    """A score and its interval, which every result of the bootstrap has."""
    return {"score": result.score, "mean": float(cast(float, result.mean)), "ci": float(cast(float, result.ci))}


def _bootstrap(
    by_sentence: Any,  # for sacreBLEU a sentence is text; here it is its translations
    metric: Any,
    references: Sequence[str],
    samples: int,
    seed: int,
) -> tuple[list[Result], str]:
    """Results of the baseline and of the system by sacreBLEU, and how they were computed."""
    named_systems = list(zip(("baseline", "system"), by_sentence, strict=True))
    with _sacrebleu_seed(seed):
        test = PairedTest(named_systems, {"metric": metric}, [list(references)], test_type="bs", n_samples=samples)
        signatures, columns = test()
    (title, signature), *_ = signatures.items()
    return cast(list[Result], columns[title]), str(signature)


def _randomization(by_sentence: Any, metric: Any, references: Sequence[str], trials: int, seed: int) -> float:
    """p of the paired randomisation: how often swaps make a difference as large as the observed one.

    Args:
        by_sentence: the baseline's and the system's sentences, each the translations by all runs.
        metric: what scores them, from counts a sentence that are added up.
        references: one for each sentence.
        trials: swaps drawn at random; all ways to swap where they are not more.
        seed: of the draws.
    """
    ours, theirs = (np.array(metric._extract_corpus_statistics(lines, [references])) for lines in by_sentence)
    differ = (ours != theirs).any(axis=1)
    if differ.sum() < 2:  # to swap one sentence changes which system is ahead, and not by how much
        return 1.0
    same = ours[~differ].sum(axis=0)
    counts = np.concatenate([ours[differ], theirs[differ]])  # [2 * differing sentences, counts of the metric]

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        """The absolute difference of two systems, given by their rows of `counts`."""
        scores = [
            metric._compute_score_from_stats(list(same + counts[rows].sum(axis=0))).score for rows in (first, second)
        ]
        return round(abs(scores[0] - scores[1]), DECIMALS)

    rows = np.arange(len(counts)).reshape(2, -1)
    return float(
        permutation_test(
            tuple(rows),
            distance,
            permutation_type="samples",
            alternative="greater",
            vectorized=False,
            n_resamples=trials,
            batch=TRIALS_AT_ONCE,
            random_state=seed,
        ).pvalue
    )


class _OverRuns:
    """A metric over several runs: the counts of a sentence's translations, one of each run, are added."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metric, name)

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
    ) -> list[list[int]]:
        runs = [self._metric._extract_corpus_statistics(run, references) for run in zip(*hypotheses, strict=True)]
        return [
            [sum(counts) for counts in zip(*sentence_counts, strict=True)]
            for sentence_counts in zip(*runs, strict=True)
        ]


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """Set the seed of sacreBLEU's tests, which it reads from the environment each time, and nowhere else."""
    variable = "SACREBLEU_SEED"
    before = os.environ.get(variable)
    os.environ[variable] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
