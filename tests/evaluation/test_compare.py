"""`compare`: systems against a baseline, over seeds and over sentences."""

import random

import pytest

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation import significance
from hf_deepwide.evaluation.seeds import welch
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


def test_the_seed_is_the_unit_of_welchs_test(folder):
    systems = [",".join(str(folder / f"{name}-{seed}") for seed in (1, 2)) for name in ("bad", "good")]
    baseline, system = compare_runs(systems, str(folder / "reference"), ["bleu"])
    assert baseline.difference is None
    assert system.p_seeds == welch(system.scores, baseline.scores)  # test_seeds.py compares it with its definition
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
