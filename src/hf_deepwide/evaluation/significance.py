"""Two paired tests on the same sentences: is one system better than another, or only luckier?

Paired bootstrap resampling (Koehn 2004) draws new test sets from the test set. Paired approximate randomisation
(Riezler and Maxwell 2005) swaps the two systems' outputs sentence by sentence. A small p means that chance would
seldom produce a difference as large as the observed difference.

SacreBLEU's bootstrap, like the Moses script it follows, recentres absolute differences and is the more lenient test.
In the cases that were tried here, its p was a quarter to a half of the randomisation's p. If the two tests disagree,
trust the randomisation.

The randomisation is SciPy's. SacreBLEU's own randomisation counts only differences *greater* than the observed one.
With a metric of few values, such as the share of valid code, many trials tie with the observed difference. Then
sacreBLEU's p would be far too small.

Both tests ask whether *these* translations differ on sentences of this kind. They do not say what another training
would give. For that, train both systems with several seeds and use the tests of `seeds.py`, whose unit is a training.
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

TRIALS_AT_ONCE = 256  # a trial holds two numbers for each sentence
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

    With several runs of each system, the translations of a sentence by all runs are drawn together, and swapped
    together. Translations by runs of one system are alike. If they were treated as independent, p would be too small.

    Both tests are two-sided. Equal scores have p = 1. SacreBLEU's bootstrap gives 1 / (samples + 1) in this case, and
    so calls a system better than itself. The randomisation is exact if the trials suffice for all ways to swap.

    Args:
        baseline: translations of the first system, one run after the other if there are several `runs`.
        system: translations of the second system, as many as of the first.
        references: one reference for each sentence.
        samples: resamples of the bootstrap.
        trials: trials of the approximate randomisation.
        seed: a positive number. The same seed gives the same result.
        lowercase, tokenize, target_lang, metrics: as in `score`.
        runs: number of trainings of each system, by different seeds. A system's score is then that of all its
            translations as one corpus.

    Returns:
        For each metric `{"baseline": {"score", "mean", "ci"}, "system": {"score", "mean", "ci"},
        "difference", "p_bootstrap", "p_randomization", "signature": {"bootstrap", "randomization"}}`.
        `mean` and `ci` are the bootstrap's mean and the half width of its 95 % interval. The difference is
        system minus baseline.

    Raises:
        UserError: the translations and references do not fit each other, or a seed or count is out of range.
    """
    by_sentence = _by_sentence(baseline, system, references, runs, samples=samples, trials=trials, seed=seed)
    report = {}
    built = build_metrics(metrics, lowercase=lowercase, tokenize=tokenize, target_lang=target_lang)
    for name, metric in built.items():  # one test per metric: some metrics share their name in sacreBLEU
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
    """Return the `p_randomization` of `compare_systems` for one metric, without the bootstrap.

    Args:
        baseline, system, references, trials, seed, runs: as in `compare_systems`.
        metric: a metric object from `build_metrics`.
    """
    by_sentence = _by_sentence(baseline, system, references, runs, trials=trials, seed=seed)
    return _randomization(by_sentence, _OverRuns(metric), references, trials, seed)


def _by_sentence(
    baseline: Sequence[str], system: Sequence[str], references: Sequence[str], runs: int, **numbers: int
) -> Any:
    """Check the arguments, and return each sentence's translations by all runs, for both systems."""
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
    """Format a difference for a table, with its sign. A difference that is rounded to 0 is always +0."""
    return f"{round(difference, digits) + 0.0:+.{digits}f}"  # -0.0 + 0.0 is 0.0


def p_value(p: float | None) -> str:
    """Format a p for a table, with four digits and never as 0. None becomes an empty string."""
    if p is None:
        return ""
    return "< 0.0001" if p < 0.00005 else f"{p:.4f}"


def _with_interval(result: Result) -> dict[str, float]:
    """Return the score, mean and interval of a bootstrap result."""
    return {"score": result.score, "mean": float(cast(float, result.mean)), "ci": float(cast(float, result.ci))}


def _bootstrap(
    by_sentence: Any,  # sacreBLEU expects text for a sentence; here it is a list of translations
    metric: Any,
    references: Sequence[str],
    samples: int,
    seed: int,
) -> tuple[list[Result], str]:
    """Return sacreBLEU's bootstrap results of the baseline and of the system, and the signature."""
    named_systems = list(zip(("baseline", "system"), by_sentence, strict=True))
    with _sacrebleu_seed(seed):
        test = PairedTest(named_systems, {"metric": metric}, [list(references)], test_type="bs", n_samples=samples)
        signatures, columns = test()
    (title, signature), *_ = signatures.items()
    return cast(list[Result], columns[title]), str(signature)


def _randomization(by_sentence: Any, metric: Any, references: Sequence[str], trials: int, seed: int) -> float:
    """Return p of the paired randomisation: the share of swaps whose difference is as large as the observed one.

    Args:
        by_sentence: for the baseline and for the system, each sentence's translations by all runs.
        metric: the metric, which computes a score from the sum of the sentences' counts.
        references: one reference for each sentence.
        trials: number of random swaps. If there are no more ways to swap than that, each way is tried once.
        seed: seed of the draws.
    """
    ours, theirs = (np.array(metric._extract_corpus_statistics(lines, [references])) for lines in by_sentence)
    differ = (ours != theirs).any(axis=1)
    if differ.sum() < 2:  # swapping one sentence changes only which system is ahead, not by how much
        return 1.0
    same = ours[~differ].sum(axis=0)
    counts = np.concatenate([ours[differ], theirs[differ]])  # [2 * differing sentences, counts of the metric]

    def distance(first: np.ndarray, second: np.ndarray) -> float:
        """Return the absolute difference between two systems, each given by its row indices into `counts`."""
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
    """A metric over several runs. It adds the counts of a sentence's translations, one translation from each run."""

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
    """Set the seed of sacreBLEU's tests, which sacreBLEU reads only from the environment, for each test."""
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
