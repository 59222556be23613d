"""Paired tests on constructed cases, and against naive resampling."""

import itertools
import math
import os
import random

import pytest
from naive_metrics import naive_bleu

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.significance import compare_systems

QUICK = {"samples": 300, "trials": 500}


def noisy(references, errors, seed):
    """The references with a share of their words replaced."""
    rng = random.Random(seed)
    return [" ".join("x" if rng.random() < errors else word for word in line.split()) for line in references]


@pytest.fixture(scope="module")
def references():
    rng = random.Random(0)
    return [" ".join(rng.choices("abcdefghijklmnop", k=rng.randint(5, 15))) for _ in range(80)]


def test_a_system_does_not_differ_from_itself(references):
    system = noisy(references, 0.3, 1)
    for result in compare_systems(system, list(system), references, **QUICK).values():
        assert result["difference"] == 0
        assert result["p_bootstrap"] == result["p_randomization"] == 1


def test_clearly_better_is_significant_in_either_order(references):
    bad, good = noisy(references, 0.4, 1), noisy(references, 0.1, 2)
    for baseline, system, sign in ((bad, good, 1), (good, bad, -1)):
        for name, result in compare_systems(baseline, system, references, **QUICK).items():
            assert sign * result["difference"] > 5
            assert result["p_bootstrap"] < 0.01
            assert result["p_randomization"] < 0.01
            assert result["baseline"]["score"] == pytest.approx(score(baseline, references)[name])
            assert result["system"]["score"] == pytest.approx(score(system, references)[name])


def test_equally_good_systems_do_not_differ_significantly(references):
    errors = noisy(references, 0.3, 1)
    even = [wrong if i % 2 else right for i, (wrong, right) in enumerate(zip(errors, references, strict=True))]
    odd = [right if i % 2 else wrong for i, (wrong, right) in enumerate(zip(errors, references, strict=True))]
    result = compare_systems(even, odd, references, metrics=["bleu"], **QUICK)["bleu"]
    assert result["p_bootstrap"] > 0.1
    assert result["p_randomization"] > 0.1


def test_one_differing_sentence_is_not_significant(references):
    system = [*references[:-1], "x x x"]
    result = compare_systems(references, system, references, metrics=["bleu"], **QUICK)["bleu"]
    assert result["difference"] < 0
    assert result["p_randomization"] == 1


@pytest.mark.parametrize(("better", "worse"), [(1, 0), (8, 2), (5, 5), (40, 12)])
def test_ties_with_the_observed_difference_count(better, worse):
    """For a metric with two values, randomisation is the sign test of the sentences in which the systems differ."""
    valid, invalid = "x = 1", "x = ("
    baseline = [invalid] * better + [valid] * worse + [valid] * 30
    system = [valid] * better + [invalid] * worse + ["x = 2"] * 30
    result = compare_systems(baseline, system, baseline, metrics=["valid_python"])["valid_python"]
    differ, least = better + worse, min(better, worse)
    p = min(1, 2 * sum(math.comb(differ, k) for k in range(least + 1)) / 2**differ)
    # exact if the trials cover all swaps; otherwise within four standard errors of 10,000 trials
    allowed = 1e-12 if differ <= 10 else 4 * math.sqrt(p / 10_000) + 1e-4
    assert result["p_randomization"] == pytest.approx(p, abs=allowed)


def test_sentences_that_differ_only_in_what_is_not_scored_do_not_count(references):
    system = [*map(str.upper, references[:-1]), "x x x"]
    result = compare_systems(references, system, references, metrics=["bleu"], lowercase=True, **QUICK)["bleu"]
    assert result["difference"] < 0
    assert result["p_randomization"] == 1


def test_the_bootstrap_agrees_with_naive_resampling(references):
    references = references[:40]  # naive resampling is slow
    baseline, system = noisy(references, 0.25, 1), noisy(references, 0.2, 4)
    result = compare_systems(baseline, system, references, metrics=["multi_bleu"], samples=2000, trials=2)
    result = result["multi_bleu"]
    observed = abs(naive_bleu(system, references) - naive_bleu(baseline, references))
    rng = random.Random(5)
    rows = list(zip(baseline, system, references, strict=True))
    count = 250

    means, differences = [], []
    for _ in range(count):  # Koehn 2004, two-sided: how often a recentred difference exceeds the observed one
        a, b, truth = zip(*rng.choices(rows, k=len(rows)), strict=True)
        means.append(naive_bleu(b, truth))
        differences.append(abs(means[-1] - naive_bleu(a, truth)))
    centre = sum(differences) / count
    p_bootstrap = sum(d - centre > observed for d in differences) / count
    means.sort()
    assert 0.02 < result["p_bootstrap"] < 0.9  # a case where p is neither 0 nor 1
    assert result["p_bootstrap"] == pytest.approx(p_bootstrap, abs=0.09)  # 3 standard errors of the naive p
    assert result["system"]["mean"] == pytest.approx(sum(means) / count, abs=0.4)
    half_width = (means[int(0.975 * count)] - means[int(0.025 * count)]) / 2
    assert result["system"]["ci"] == pytest.approx(half_width, rel=0.12)


@pytest.mark.parametrize("runs", [1, 2])
def test_the_randomisation_is_that_of_all_swaps(references, runs):
    """Riezler & Maxwell 2005: the outputs for a sentence are swapped in all runs together, here in 512 ways."""
    references = references[:9]
    baseline = [noisy(references, 0.3, seed) for seed in (1, 2)][:runs]
    system = [noisy(references, 0.2, seed) for seed in (3, 4)][:runs]
    joined = [[line for lines in of for line in lines] for of in (baseline, system)]
    options = {"metrics": ["multi_bleu"], "samples": 2, "trials": 2**9, "runs": runs}
    result = compare_systems(*joined, references, **options)["multi_bleu"]
    assert result["system"]["score"] == pytest.approx(naive_bleu(joined[1], references * runs))
    observed, exceeding = abs(naive_bleu(joined[1], references * runs) - naive_bleu(joined[0], references * runs)), 0
    for swap in itertools.product((False, True), repeat=9):
        a, b = [], []
        for ours, theirs, swapped in zip(*joined, swap * runs, strict=True):
            a.append(theirs if swapped else ours)
            b.append(ours if swapped else theirs)
        exceeding += abs(naive_bleu(a, references * runs) - naive_bleu(b, references * runs)) >= observed - 1e-9
    assert 0.02 < result["p_randomization"] < 0.9
    assert result["p_randomization"] == pytest.approx(exceeding / 2**9, abs=1e-12)


@pytest.mark.parametrize("metric", ["multi_bleu", "chrf"])
def test_equal_runs_give_the_p_of_one_run(references, metric):
    baseline, system = noisy(references, 0.25, 1), noisy(references, 0.2, 4)
    one = compare_systems(baseline, system, references, metrics=[metric], **QUICK)[metric]
    three = compare_systems(baseline * 3, system * 3, references, metrics=[metric], runs=3, **QUICK)[metric]
    assert 0.02 < one["p_randomization"] < 0.9
    for key in ("p_randomization", "p_bootstrap", "difference"):
        assert three[key] == pytest.approx(one[key])


def test_the_seed_alone_decides(references, monkeypatch):
    baseline, system = noisy(references, 0.25, 1), noisy(references, 0.2, 4)

    def run(seed):
        return compare_systems(baseline, system, references, seed=seed, metrics=["bleu"], **QUICK)

    monkeypatch.delenv("SACREBLEU_SEED", raising=False)
    first = run(7)
    assert "SACREBLEU_SEED" not in os.environ
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    assert run(7) == first
    assert os.environ["SACREBLEU_SEED"] == "99"
    assert run(8)["bleu"]["system"]["mean"] != first["bleu"]["system"]["mean"]
    assert run(8)["bleu"]["p_randomization"] != first["bleu"]["p_randomization"]
    assert "seed:7" in first["bleu"]["signature"]["bootstrap"]
    assert "bs:300" in first["bleu"]["signature"]["bootstrap"]
    assert first["bleu"]["signature"]["randomization"].startswith("ar:500|seed:7|scipy:")


@pytest.mark.parametrize("field", ["samples", "trials", "seed", "runs"])
def test_numbers_sacrebleu_would_take_otherwise_are_refused(field):
    with pytest.raises(UserError, match=f"{field}: 0; accepted: 1 or more"):
        compare_systems(["a"], ["a"], ["a"], **{field: 0})


def test_names_the_system_with_a_wrong_length(references):
    with pytest.raises(UserError, match="the system's translations: 79 lines; references: 80 lines"):
        compare_systems(references, references[:-1], references)
    with pytest.raises(UserError, match="the baseline's translations: 80 lines; references, 2 times: 160 lines"):
        compare_systems(references, references * 2, references, runs=2)
