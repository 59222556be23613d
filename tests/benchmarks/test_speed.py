"""The speed harness: turns, ratios and tables, with a simulated clock."""

import json
import time
from pathlib import Path

import exported
import harness
import pytest
import questions
import speed
from questions import QUESTIONS, Question
from reports import begun, measured_on, write_report
from tasks import Decoding, Training

from hf_deepwide import VanillaTransformerConfig
from hf_deepwide.errors import UserError


def test_ratios_compare_the_same_round(monkeypatch):
    """The machine becomes slower: every time grows, and the ratio stays."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def step(seconds):
        def take():
            clock[0] += seconds * (1 + clock[0])

        return take

    turns = harness.take_turns({"fast": step(0.001), "slow": step(0.002)}, rounds=5, warm_up=1)
    assert [len(own) for own in turns.values()] == [5, 5]
    measured = harness.against(turns, "fast")
    assert measured["fast"].ratio == 1
    assert measured["slow"].ratio == pytest.approx(2, rel=0.01)
    assert harness.against({"a": [1.0, 9.0, 2.0], "b": [2.0, 2.0, 4.0]}, "a")["b"] == (2.0, 2.0)


def test_a_benchmark_has_threads_memory_and_kernels_as_training_has(monkeypatch):
    found = []
    monkeypatch.setattr("sys.argv", ["speed.py", "--threads", "1"])
    for name in ("keep_memory", "bound_kernel_caches"):
        monkeypatch.setattr(harness, name, lambda name=name: found.append(name))
    monkeypatch.setattr(harness.torch, "set_num_threads", found.append)
    args = harness.parsed(harness.options("It is fast.", rounds=3))
    assert (args.rounds, args.output, found) == (3, None, [1, "keep_memory", "bound_kernel_caches"])


def test_reports_the_answer_to_a_question(tmp_path):
    """The question is measured in two slices. The second report keeps the numbers of the first."""
    tiny = questions.size(1, 16, 2, 32)
    systems = {
        "one": VanillaTransformerConfig(**tiny),
        "wider": VanillaTransformerConfig(**tiny | {"encoder_ffn_dim": 64}),
    }
    question = Question("Which?", systems, "one", (Training(sentences=2, length=4), Decoding(1, 1)))
    first, second = (speed.chosen(question, [word]) for word in ("training", "decoding"))
    write_report(tmp_path / "which", speed.answer(first, 1, "cpu"))
    report = speed.answer(second, 1, "cpu", tmp_path / "which")
    assert list(report["tasks"]) == ["training, float32", "decoding, 1 sentence, greedy"]
    assert report["systems"]["wider"]["operations"] > report["systems"]["one"]["operations"] == 1
    assert report["systems"]["wider"]["memory"] > report["systems"]["one"]["memory"] == 1
    text = speed.table(report)
    assert "| wider |" in text
    assert "decoding, 1 sentence, greedy" in text
    assert "GiB" not in text
    for row in report["tasks"]["training, float32"].values():  # as on a GPU
        row["peak_memory_bytes"] = 3 * 2**29
    head, _, *rows = speed.table(report).splitlines()[4:]
    assert head.endswith("| GiB, training, float32 |")
    assert [row.split("|")[-2].strip() for row in rows] == ["1.50", "1.50"]


def test_a_slice_has_the_tasks_with_a_word_in_their_titles():
    question = QUESTIONS["joints"]
    assert [len(speed.chosen(question, [word]).tasks) for word in ("training", "greedy")] == [1, 2]
    with pytest.raises(UserError, match="in no title"):
        speed.chosen(question, ["sorting"])


def test_numbers_are_added_to_those_of_the_same_machine_alone(tmp_path):
    about, output = measured_on(), tmp_path / "report.json"
    assert begun(None, about, tasks={}) == begun(output, about, tasks={}) == {**about, "tasks": {}}
    write_report(output, {"machine": about["machine"], "tasks": {"decoding": 1}})  # a report of an older version
    assert begun(output, about, tasks={}) == {**about, "tasks": {"decoding": 1}}
    write_report(output, about | {"machine": "loom", "torch": "0"})
    with pytest.raises(UserError, match="another machine and another torch"):
        begun(output, about, tasks={})


@pytest.mark.parametrize("name", QUESTIONS)
def test_systems_of_a_question_share_a_vocabulary(name):
    question = QUESTIONS[name]
    assert question.yardstick in question.systems
    assert len({config.vocab_size for config in question.systems.values()}) == 1


def test_the_table_has_the_bleu_of_exports_that_was_measured():
    results = Path(exported.__file__).parents[1] / "results"
    report = json.loads((results / "exported_bleu.json").read_text(encoding="utf-8"))
    assert (results / "exported_bleu.md").read_text(encoding="utf-8").strip() == exported.bleu_table(report).strip()
