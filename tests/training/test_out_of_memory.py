"""Memory runs out in a step: the update equals that of the whole batch. A resumed run computes the same parts."""

import json
import logging
import math
import sys
from pathlib import Path

import pytest
import scale_worker
import torch
from accelerate import PartialState
from latent_runs import constant_noise
from tiny_run import WITH_HELPERS, tiny_corpus, tiny_trainer

from hf_deepwide.device_memory import is_out_of_memory
from hf_deepwide.errors import UserError
from hf_deepwide.training import out_of_memory
from hf_deepwide.training.faults import FAULTS, NonFiniteError
from hf_deepwide.training.out_of_memory import LargestBatch, split
from hf_deepwide.training.replay import replay

CPU = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


def train(corpus, folder: Path, family: str = "mat", **training):
    """Make a trainer in float64 without dropout, for three steps of two batches by default. Do not train it yet."""
    training = {"max_steps": 3, "max_grad_norm": 0.5, "logging_steps": 1, "gradient_accumulation_steps": 2, **training}
    return scale_worker.make_trainer(corpus, folder, family, scale_worker.without_dropping(family), **training)


@pytest.mark.parametrize(
    ("family", "where"),
    [
        ("mat", "forward"),
        ("mat", "backward"),
        ("marian", "backward"),
        ("latent_depth", "forward"),
        ("mhc", "backward"),
    ],
)
def test_the_update_is_that_of_the_whole_batch(family, where, corpus, tmp_path, caplog, monkeypatch):
    """Test also with gradients already added: of some parameters, and of an earlier batch of the step."""
    constant_noise(monkeypatch)
    whole, parts = train(corpus, tmp_path / "whole", family), train(corpus, tmp_path / "parts", family)
    failures = scale_worker.limit_memory(parts, 512, where)
    whole.train()
    with caplog.at_level(logging.WARNING):
        parts.train()
    assert failures == [1], "once, and then the batches are split beforehand"
    assert parts.splitter.largest.tokens == 512
    told = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("step 1: memory ran out on a batch of ")
    assert "is now 512 tokens (training.max_tokens is 1024)" in told[0]
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], weight, rtol=0, atol=1e-10, msg=name)
    assert len(parts.state.log_history) == len(whole.state.log_history) > 2
    for ours, theirs in zip(parts.state.log_history[:-1], whole.state.log_history[:-1], strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6)
    assert parts.state.global_step == 3


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_is_halved_until_it_fits(where, corpus, tmp_path):
    """Test with the error of a CPU. In the backward pass, parts run out of memory again."""
    whole, parts = train(corpus, tmp_path / "whole"), train(corpus, tmp_path / "parts")
    failures = scale_worker.limit_memory(parts, 128, where, RuntimeError(CPU))
    whole.train()
    parts.train()
    assert failures == [1, 1, 1]
    assert parts.splitter.largest.tokens == 128
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], weight, rtol=0, atol=1e-10, msg=name)


# A batch in the wide feed-forward networks needs over a gigabyte, but the limit leaves 400 MB.
SHORT = """
import resource, sys
from pathlib import Path
from tiny_run import tiny_corpus, tiny_trainer

model = {"d_model": 32, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192}
options = {"max_tokens": 8192, "max_steps": 1, "keep_memory": False}
trainer = tiny_trainer(tiny_corpus(), Path(sys.argv[1]), "vanilla_transformer", model, **options)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
trainer.train()
print("largest batch", trainer.splitter.largest.tokens)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process by setrlimit")
def test_memory_that_really_runs_out(run_code, tmp_path):
    """Run in a separate process, which holds no freed memory of other tests."""
    ended = run_code(SHORT, tmp_path / "run", environment=WITH_HELPERS)
    assert ended.returncode == 0, ended.stderr
    assert "memory ran out on a batch of" in ended.stderr
    assert int(ended.stdout.rpartition("largest batch ")[2]) in (512, 1024, 2048, 4096)


def test_a_resumed_run_computes_the_same_parts(corpus, tmp_path):
    """Resume with dropout from a checkpoint after the failure. Memory does not run out again."""
    options = {"model": {"dropout": 0.3}, "max_steps": 6, "save_steps": 3}
    once, again = (tiny_trainer(corpus, tmp_path / "run", **options) for _ in range(2))
    told = scale_worker.limit_memory(once, 512, "backward")
    once.train()
    assert told == [1]
    failures = scale_worker.limit_memory(again, 512, "backward")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert failures == []
    assert again.splitter.largest.tokens == once.splitter.largest.tokens == 512
    for name, weight in once.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name


def test_the_failure_leaves_no_trace_in_the_random_numbers(corpus, tmp_path):
    """A run that starts with the right largest batch draws the same numbers."""
    surprised, warned = (tiny_trainer(corpus, tmp_path / name, model={"dropout": 0.3}, max_steps=3) for name in "ab")
    failures = scale_worker.limit_memory(surprised, 512, "forward")
    warned.splitter.largest.tokens = 512
    surprised.train()
    warned.train()
    assert failures == [1]
    for name, weight in warned.model.state_dict().items():
        assert torch.equal(surprised.model.state_dict()[name], weight), name


def test_one_row_that_does_not_fit_ends_the_run(corpus, tmp_path):
    trainer = tiny_trainer(corpus, tmp_path / "run")
    scale_worker.limit_memory(trainer, 5, "forward")
    with pytest.raises(UserError, match=r"step 1: memory ran out on a batch of 1 × \d+ tokens, and one row") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert "data.max_length" in str(error.value)


def test_sharded_weights_cannot_be_computed_in_parts(corpus, tmp_path, monkeypatch):
    trainer = tiny_trainer(corpus, tmp_path / "run")
    scale_worker.limit_memory(trainer, 512, "forward")
    monkeypatch.setattr(trainer.sharding, "enabled", True)
    with pytest.raises(UserError, match=r"none can split its batch alone. Halve training.max_tokens \(1024\)"):
        trainer.train()


def test_a_pass_that_adds_parts_of_gradients_is_not_repeated(corpus, tmp_path):
    """Reentrant checkpointing adds the gradient of shared weights once for each checkpoint."""
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = tiny_trainer(corpus, tmp_path / "run", **checkpointing)
    scale_worker.limit_memory(trainer, 512, "forward")
    trainer.model.model.encoder.layers[0].feed_forward.fc1.weight.register_hook(fail_once())
    with pytest.raises(UserError, match="within a backward pass, which cannot be finished in parts because of use_re"):
        trainer.train()


def fail_once():
    """Return a hook that raises an out-of-memory error at the first gradient."""
    left = [1]

    def hook(gradient):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    return hook


def test_other_errors_are_not_taken_for_it(corpus, tmp_path):
    trainer = tiny_trainer(corpus, tmp_path / "run")
    scale_worker.limit_memory(trainer, 512, "backward", RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.train()
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    assert is_out_of_memory(RuntimeError(CPU))


def test_a_fault_is_replayed_in_the_same_parts(corpus, tmp_path):
    """Use dropout, because its random numbers depend on the parts."""
    trainer = tiny_trainer(corpus, tmp_path / "run", model={"dropout": 0.3}, gradient_accumulation_steps=2)
    scale_worker.limit_memory(trainer, 512, "forward")
    weight = trainer.model.model.encoder.layers[0].feed_forward.fc1.weight
    weight.register_hook(lambda gradient: gradient + math.inf if trainer.state.global_step == 2 else gradient)
    with pytest.raises(NonFiniteError):
        trainer.train()
    folder = tmp_path / "run" / FAULTS / "step-3"
    report = json.loads((folder / "fault.json").read_text(encoding="utf-8"))
    assert [batch["largest_batch"] for batch in report["batches"]] == [512, 512]
    expected = [float(batch["loss"]) for batch in report["batches"]]
    assert replay(folder).losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("tokens", "of_process"),
    [([None, 512], [None, 512]), ([512, 64, None], [64, 64]), (512, [512, 512]), (None, [None, None])],
)
def test_each_process_takes_up_its_own_largest_batch(tokens, of_process, monkeypatch):
    """If the number of processes has changed, each process takes the smallest value."""
    PartialState()
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    for rank, expected in enumerate(of_process):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        largest = LargestBatch(tokens)
        assert largest.tokens == expected
    monkeypatch.setattr(out_of_memory, "gather_object", lambda mine: [None, *mine])
    largest.gather()
    assert largest.state()["args"] == {"tokens": [None, of_process[1]]}


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "512", True, [512, 0], [[512]]])
def test_a_checkpoint_cannot_keep_anything_else(tokens):
    with pytest.raises(ValueError, match="the largest batch is"):
        LargestBatch(tokens)


@pytest.mark.parametrize(("largest", "rows"), [(None, [5]), (50, [5]), (49, [4, 1]), (20, [2, 2, 1]), (3, [1] * 5)])
def test_parts_hold_every_row_once(largest, rows):
    """Split five rows with ten tokens on the longer side."""
    ids = torch.arange(5)[:, None]
    inputs = {"input_ids": ids.expand(5, 7), "labels": ids.expand(5, 10), "posteriors": torch.arange(5)}
    parts = split(inputs, largest)
    assert [len(part["labels"]) for part in parts] == rows
    for name, value in inputs.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
