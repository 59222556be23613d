"""Is one system better than another, or only luckier? Two paired tests on the same sentences, by sacreBLEU.

Paired bootstrap resampling (Koehn 2004) draws test sets from the test set; paired approximate randomisation
(Riezler and Maxwell 2005) swaps the two systems' outputs sentence by sentence. A small p says that a difference as
large as the observed one would seldom come by chance. SacreBLEU's bootstrap, like the Moses script it follows,
recentres absolute differences and is the more lenient test: in the cases it was tried on here, its p was a quarter to
a half of the other's. Where the two disagree, believe the randomisation.

Both ask whether *these* translations differ on such sentences. What another training would have given they do not
know: train both systems with several seeds, and ask the tests of `seeds.py`, to which a training is the unit.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

from ..errors import UserError
from .metrics import METRICS, build_metrics, check_parallel


class _Tested(NamedTuple):
    """What one run of sacreBLEU's paired test gives: a result per system, and how they were computed."""

    results: list[Result]
    signature: str


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

    Both tests are two-sided. SacreBLEU counts only differences *greater* than the observed one; what that
    loses to ties is mended here. Equal scores have p = 1, where sacreBLEU says 1 / (samples + 1) and so
    calls a system better than itself. Randomisation over k differing sentences has p >= 2^(1-k), because
    swapping all of them or none gives the observed difference again.

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
    for name, value in (("samples", samples), ("trials", trials), ("seed", seed), ("runs", runs)):
        if value < 1:  # sacreBLEU takes samples or trials 0 as "default", and seed 0 as "no seed"
            raise UserError(f"{name}: {value}; accepted: 1 or more")
    of_runs = f"references, {runs} times" if runs > 1 else "references"
    repeated = list(references) * runs
    check_parallel(baseline, repeated, ("the baseline's translations", of_runs))
    check_parallel(system, repeated, ("the system's translations", of_runs))
    count = len(references)
    by_sentence: Any = [[lines[index::count] for index in range(count)] for lines in (baseline, system)]
    named_systems = list(zip(("baseline", "system"), by_sentence, strict=True))
    differing = sum(a != b for a, b in zip(*by_sentence, strict=True))
    report = {}
    built = build_metrics(metrics, lowercase=lowercase, tokenize=tokenize, target_lang=target_lang)
    for name, metric in built.items():  # one test per metric: sacreBLEU tells metrics apart by names they share
        with _sacrebleu_seed(seed):
            bootstrap = _paired_test(named_systems, metric, references, "bs", samples)
            randomization = _paired_test(named_systems, metric, references, "ar", trials)
        first, second = bootstrap.results
        difference = second.score - first.score
        p_randomization = max(randomization.results[1].p_value, 2.0 ** (1 - differing))
        report[name] = {
            "baseline": _with_interval(first),
            "system": _with_interval(second),
            "difference": difference,
            "p_bootstrap": second.p_value if difference else 1.0,
            "p_randomization": p_randomization if difference else 1.0,
            "signature": {"bootstrap": bootstrap.signature, "randomization": randomization.signature},
        }
    return report


def compare_to_baseline(
    baseline: Sequence[str], systems: Mapping[str, Sequence[str]], references: Sequence[str], **settings: Any
) -> dict[str, dict]:
    """`compare_systems` of each of the named systems against one baseline; `settings` are its keywords."""
    return {name: compare_systems(baseline, system, references, **settings) for name, system in systems.items()}


def _with_interval(result: Result) -> dict[str, float]:
    """A score and its interval, which every result of the bootstrap has."""
    return {"score": result.score, "mean": float(cast(float, result.mean)), "ci": float(cast(float, result.ci))}


def _paired_test(
    named_systems: list[tuple[str, Any]],  # for sacreBLEU a sentence is text; here it is its translations
    metric: Metric,
    references: Sequence[str],
    kind: str,
    count: int,
) -> _Tested:
    metrics: dict[str, Any] = {"metric": _OverRuns(metric)}
    test = PairedTest(named_systems, metrics, [list(references)], test_type=kind, n_samples=count)
    signatures, columns = test()
    (title, signature), *_ = signatures.items()
    return _Tested(cast(list[Result], columns[title]), str(signature))


class _OverRuns:
    """A metric to which a sentence is its translations by several runs: what it counts in them is added up."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metric, name)

    def _extract_corpus_statistics(
        self, hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
    ) -> list[list[int]]:
        runs = [self._metric._extract_corpus_statistics(run, references) for run in zip(*hypotheses, strict=True)]
        return [[sum(counts) for counts in zip(*of_sentence, strict=True)] for of_sentence in zip(*runs, strict=True)]


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
