"""`compare`: systems against a baseline, over seeds and over sentences."""

import math
import random

import pytest

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation import significance
from hf_deepwide.evaluation.significance import compare_systems
from hf_deepwide.runs.compare import compare_runs, report

WORDS = ["the", "a", "dog", "cat", "runs", "sleeps", "fast", "in", "on", "park", "house", "big", "small"]


@pytest.fixture
def folder(tmp_path):
    draw = random.Random(0)
    references = [" ".join(draw.choices(WORDS, k=8)) for _ in range(60)]
    (tmp_path / "reference").write_text("".join(f"{line}\n" for line in references))
    for name, noise in (("bad-1", 0.5), ("bad-2", 0.45), ("good-1", 0.1), ("good-2", 0.12)):
        lines = [" ".join(w if draw.random() > noise else draw.choice(WORDS) for w in r.split()) for r in references]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def welch(a, b):
    """Welch's t and its degrees of freedom, as written in Welch 1947."""
    means = [sum(x) / len(x) for x in (a, b)]
    errors = [sum((v - m) ** 2 for v in x) / (len(x) - 1) / len(x) for x, m in zip((a, b), means, strict=True)]
    freedom = sum(errors) ** 2 / sum(e**2 / (len(x) - 1) for e, x in zip(errors, (a, b), strict=True))
    return (means[0] - means[1]) / math.sqrt(sum(errors)), freedom


def tail(t, freedom, steps=200_000):
    """P(|T| > t) of Student's distribution, by the midpoint rule over the density in the angle atan(x / sqrt(n))."""
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    start = math.atan(abs(t) / math.sqrt(freedom))
    width = (math.pi / 2 - start) / steps
    return 2 * constant * width * sum(math.cos(start + (i + 0.5) * width) ** (freedom - 1) for i in range(steps))


def test_the_seed_is_the_unit_of_welchs_test(folder):
    systems = [",".join(str(folder / f"{name}-{seed}") for seed in (1, 2)) for name in ("bad", "good")]
    baseline, system = compare_runs(systems, str(folder / "reference"), ["bleu"])
    assert baseline.difference is None
    t, freedom = welch(system.scores, baseline.scores)
    assert system.p_seeds == pytest.approx(tail(t, freedom), rel=1e-3)
    assert system.difference == pytest.approx(sum(system.scores) / 2 - sum(baseline.scores) / 2)
    assert system.p_sentences < 0.01
    assert "bleu" in report([baseline, system])


def test_one_run_has_no_test_over_seeds(folder):
    _, system = compare_runs([str(folder / "bad-1"), str(folder / "good-1")], str(folder / "reference"), ["bleu"])
    assert system.p_seeds is None
    assert system.p_sentences is not None


def test_the_test_over_sentences_needs_no_bootstrap_of_its_own(folder, monkeypatch):
    lines = [(folder / name).read_text().splitlines() for name in ("bad-1", "good-1", "reference")]
    expected = compare_systems(*lines, metrics=["bleu"], samples=2)["bleu"]["p_randomization"]
    monkeypatch.setattr(significance, "_bootstrap", lambda *_: pytest.fail("resamples"))
    _, system = compare_runs([str(folder / "bad-1"), str(folder / "good-1")], str(folder / "reference"), ["bleu"])
    assert system.p_sentences == expected


@pytest.mark.parametrize(
    ("systems", "word"),
    [(["good-1"], "two systems"), (["good-1", "none"], "none"), (["good-1", "good-1"], "twice")],
)
def test_refuses_what_cannot_be_compared(folder, systems, word):
    with pytest.raises(UserError, match=word):
        compare_runs([str(folder / name) for name in systems], str(folder / "reference"), ["bleu"])
