"""Tests over seeds, against textbook numbers and naive computations."""

import functools
import itertools
import math
import random
import statistics
from types import SimpleNamespace

import pytest

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.evaluation.seeds import clustered_bootstrap, equivalence, holm, paired_t, standard_error, welch


def upper_tail(t, freedom, steps=100_000):
    """P(T > t) of Student's distribution, by the midpoint rule over the angle atan(x / sqrt(n))."""
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    start = math.atan(t / math.sqrt(freedom))
    width = (math.pi / 2 - start) / steps
    return constant * width * sum(math.cos(start + (i + 0.5) * width) ** (freedom - 1) for i in range(steps))


def welch_parts(a, b):
    """The difference of the means, its standard error and degrees of freedom (Welch 1947, Satterthwaite)."""
    errors = [statistics.variance(x) / len(x) for x in (a, b)]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, (a, b), strict=True))
    return SimpleNamespace(
        difference=statistics.mean(a) - statistics.mean(b), error=math.sqrt(sum(errors)), freedom=freedom
    )


def test_welch_has_the_p_of_a_worked_example():
    """Two samples of Welch's t-test in Wikipedia, example 1: t = -2.46, 25 degrees of freedom, p = 0.021."""
    a = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
    b = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]
    parts = welch_parts(a, b)
    assert (parts.difference / parts.error, parts.freedom) == pytest.approx((-2.46, 25.0), abs=0.02)
    assert welch(a, b) == pytest.approx(0.021, abs=5e-4)
    assert welch(a, b) == pytest.approx(2 * upper_tail(-parts.difference / parts.error, parts.freedom), rel=1e-4)


@pytest.mark.parametrize("margin", [0.3, 0.8, 2.0])
def test_equivalence_is_the_weaker_of_two_one_sided_tests(margin):
    a, b = [32.4, 33.1, 32.8, 32.2], [32.9, 33.3, 32.7]
    parts = welch_parts(a, b)
    below = upper_tail((parts.difference + margin) / parts.error, parts.freedom)  # H0: difference <= -margin
    above = upper_tail((margin - parts.difference) / parts.error, parts.freedom)  # H0: difference >= margin
    assert equivalence(a, b, margin) == pytest.approx(max(below, above), rel=1e-4)


@pytest.mark.parametrize("margin", [0.01, 0.045])
def test_paired_equivalence_tests_differences(margin):
    """Two one-sided Student's tests with n - 1 degrees of freedom."""
    a, b = [2.763, 2.771, 2.752], [2.805, 2.816, 2.790]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(3)
    expected = max(upper_tail((mean + margin) / error, 2), upper_tail((margin - mean) / error, 2))
    assert equivalence(a, b, margin, paired=True) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="shorter"):
        equivalence(a, b[:2], margin, paired=True)
    assert equivalence([1.0, 2.0], [1.5, 2.5], margin, paired=True) is None


def test_holm_adjusts_a_worked_example_in_the_order_of_the_systems():
    """The p are 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.06 for 0.04, as no p may be smaller than the one before."""
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == [0.03, 0.06, None, 0.06, 0.02]
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_a_paired_test_is_that_of_the_mean_of_differences():
    """Student's t of the differences with n - 1 degrees of freedom: runs that start from one model vary together."""
    a, b = [2.763, 2.771, 2.752], [2.805, 2.816, 2.790]
    differences = [x - y for x, y in zip(a, b, strict=True)]
    t = statistics.mean(differences) / (statistics.stdev(differences) / math.sqrt(3))
    assert paired_t(a, b) == pytest.approx(2 * upper_tail(abs(t), 2), rel=1e-4)
    assert paired_t(a, b) < welch(a, b)
    with pytest.raises(ValueError, match="shorter"):
        paired_t(a, b[:2])


def test_there_is_no_test_of_what_is_no_number():
    for broken in (math.nan, math.inf):
        assert welch([1.0, broken], [2.0, 3.0]) is None
        assert equivalence([1.0, 2.0], [broken, 3.0], 0.5) is None
        assert paired_t([1.0, broken], [2.0, 3.0]) is None


def test_there_is_no_test_of_scores_that_do_not_vary():
    assert paired_t([1.0], [2.0]) is None
    assert paired_t([1.0, 2.0], [1.0, 2.0]) is None
    assert welch([1.0], [2.0, 3.0]) is None
    assert welch([1.0, 1.0], [1.0, 1.0]) is None
    assert equivalence([1.0], [1.0], 0.5) is None
    assert standard_error([1.0]) is None
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)  # stdev sqrt(2), over sqrt(2)


@pytest.mark.parametrize("margin", [0.0, -1.0, math.nan, math.inf])
def test_a_margin_must_be_positive(margin):
    with pytest.raises(UserError, match="margin"):
        equivalence([1.0, 2.0], [1.0, 2.5], margin)


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    references = [" ".join(draw.choices("abcdefgh", k=draw.randint(6, 14))) for _ in range(40)]

    def translated(errors):
        return [" ".join(word if draw.random() > errors else "x" for word in line.split()) for line in references]

    return SimpleNamespace(
        references=references,
        ours=[translated(errors) for errors in (0.15, 0.25, 0.2)],
        theirs=[translated(errors) for errors in (0.2, 0.3)],
    )


def test_one_resample_has_no_standard_error(texts):
    with pytest.raises(UserError, match="samples: 1; accepted: 2 or more"):
        clustered_bootstrap([texts.ours[0]], [texts.theirs[0]], texts.references, samples=1)


@pytest.mark.parametrize("metric", ["multi_bleu", "chrf"])
def test_the_clustered_bootstrap_is_that_of_all_resamples(texts, metric):
    """With three sentences, and systems of three and two trainings, all 27 * 27 * 4 resamples are equally likely."""
    references = texts.references[:3]
    systems = [[run[:3] for run in runs] for runs in (texts.ours, texts.theirs)]

    @functools.cache
    def corpus(side, run, rows):
        pair = [[lines[row] for row in rows] for lines in (systems[side][run], references)]
        return score(*pair, metrics=[metric])[metric]

    def means(side, rows):
        runs = range(len(systems[side]))
        return [
            statistics.mean(corpus(side, run, rows) for run in drawn)
            for drawn in itertools.product(runs, repeat=len(runs))
        ]

    differences = []
    for rows in itertools.product(range(3), repeat=3):
        one, other = (means(side, tuple(sorted(rows))) for side in (0, 1))
        differences += [ours - theirs for ours in one for theirs in other]
    found = clustered_bootstrap(*systems, references, metric=metric, samples=20_000)
    observed = [statistics.mean(corpus(side, run, (0, 1, 2)) for run in range(len(systems[side]))) for side in (0, 1)]
    assert found.difference == pytest.approx(observed[0] - observed[1])
    assert found.standard_error == pytest.approx(statistics.pstdev(differences), rel=0.02)
    for bound, share in ((found.low, 0.025), (found.high, 0.975)):
        below = sum(each < bound - 1e-9 for each in differences) / len(differences)
        up_to = sum(each <= bound + 1e-9 for each in differences) / len(differences)
        assert below - 0.006 <= share <= up_to + 0.006  # 5 standard errors of a share of 20,000 samples


def test_sentences_are_the_same_for_both_sides(texts):
    found = clustered_bootstrap([texts.ours[0]], [list(texts.ours[0])], texts.references, samples=50)
    assert found == (0, 0, 0, 0)


def test_seeds_widen_the_interval(texts):
    worse = [" ".join("x" if word in "ab" else word for word in line.split()) for line in texts.ours[0]]
    alike = clustered_bootstrap([texts.ours[0]] * 3, [texts.theirs[0]] * 3, texts.references)
    unlike = clustered_bootstrap([texts.ours[0], worse], [texts.theirs[0]] * 3, texts.references)
    one = clustered_bootstrap([texts.ours[0]], [texts.theirs[0]], texts.references)
    assert alike.standard_error == pytest.approx(one.standard_error, rel=0.1)
    assert unlike.standard_error > 1.3 * alike.standard_error


def test_the_seed_alone_decides_the_interval(texts):
    first, again, other = (
        clustered_bootstrap(texts.ours, texts.theirs, texts.references, samples=20, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_sides_that_do_not_fit_are_refused(texts):
    with pytest.raises(UserError, match="training"):
        clustered_bootstrap([], texts.theirs, texts.references)
    with pytest.raises(UserError, match="39"):
        clustered_bootstrap([texts.ours[0][:-1]], texts.theirs, texts.references)
    with pytest.raises(UserError, match="samples"):
        clustered_bootstrap(texts.ours, texts.theirs, texts.references, samples=0)
