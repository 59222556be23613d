"""Progress bars on a terminal. In a file, progress is plain lines, one per `logging_steps`."""

import logging
import os
import re
import sys
from pathlib import Path

import pytest
from forked_commands import call
from tiny_run import ENVIRONMENT, tiny_corpus, tiny_trainer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.training import callbacks


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture(autouse=True)
def no_bars_of_saving():
    """Turn off Transformers' bars for loading and saving weights, as the scripts do; both take almost no time."""
    disable_progress_bar()
    yield
    enable_progress_bar()


def train(corpus, folder):
    settings = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "disable_tqdm": False}
    trainer = tiny_trainer(corpus, folder, **settings)
    trainer.train()
    return trainer


def test_training_prints_a_line_per_logging_steps_into_a_file(corpus, tmp_path, capsys):
    train(corpus, tmp_path)
    out, err = capsys.readouterr()
    assert "\r" not in out + err
    lines = [line for line in err.splitlines() if line.startswith("step ")]
    assert [re.match(r"step \d+ of 4|step \d+", line)[0] for line in lines] == ["step 2 of 4", "step 4 of 4", "step 4"]
    assert all(re.search(r"loss \d+\.\d+", line) for line in lines)
    assert " target tokens/s, 0:00:00 left" in lines[1]
    assert "validation loss" in lines[2]


def test_training_goes_on_when_nobody_reads_the_log_any_more(forks, tmp_path):
    """As after `2>&1 | head`. If the run ended there, a scheduler would take it for finished."""
    program = (
        "from pathlib import Path; from test_progress import train; from tiny_run import tiny_corpus; "
        f"train(tiny_corpus(), Path({str(tmp_path)!r})).save_model()"
    )
    read, write = os.pipe()
    os.close(read)
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with open(os.devnull, "r+") as null:
        status = call(forks, ["-c", program], str(tmp_path), environment, (null.fileno(), null.fileno(), write))
    os.close(write)
    assert status == 0
    assert (tmp_path / "model.safetensors").is_file()


def test_training_draws_a_bar_on_a_terminal(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(corpus, tmp_path)
    out, err = capsys.readouterr()
    assert "\r" in err
    assert "4/4" in err
    assert "step 4, epoch" in out


def test_encoding_and_translating_draw_no_bar_into_a_file(corpus, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, "hf_deepwide")
    data = DataArguments(format="phrases", source_lang="de", target_lang="en", train_size=30)
    encode(load_parallel(data, "train"), corpus.tokenizer, data, filter=True)
    trainer = tiny_trainer(corpus, tmp_path)
    caplog.clear()
    trainer.translate(["Ja.", "Nein."], EvaluationArguments(num_beams=1, max_length_factor=0, max_length_offset=2))
    assert capsys.readouterr().err == ""
    assert [record.message for record in caplog.records if "translated 2 sentences" in record.message]
    trainer.translate(["Ja."], EvaluationArguments(num_beams=1, max_length_factor=0, max_length_offset=2))
    assert [record.message for record in caplog.records if "translated 1 sentence in" in record.message]


def test_only_steps_count_and_totals_survive_an_interruption(monkeypatch):
    """`seconds` counts the time of steps only; `minutes` counts all time."""
    now = 0.0
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now)
    counter = callbacks.Throughput()
    counter.on_train_begin(None, None, None)
    for event, seconds in (("step_end", 5), ("evaluate", 20), ("step_end", 3), ("save", 12), ("step_end", 1)):
        now += seconds
        getattr(counter, f"on_{event}")(None, None, None)
    counter.count(90)
    totals = counter.state()["args"]
    assert (totals["seconds"], totals["target_tokens"], totals["minutes"]) == (9, 90, pytest.approx(41 / 60))
    resumed = callbacks.Throughput(**totals)
    resumed.on_train_begin(None, None, None)
    now += 60
    resumed.on_step_end(None, None, None)
    resumed.count(10)
    totals = resumed.state()["args"]
    assert (totals["seconds"], totals["target_tokens"], totals["minutes"]) == (69, 100, pytest.approx(101 / 60))
