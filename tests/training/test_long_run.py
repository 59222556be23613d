"""Requirements of long training: no memory is left over after a step, and the time of waiting for data is counted."""

import gc
import time
import weakref
from functools import partial
from multiprocessing import active_children

import pytest
import torch
from tiny_run import tiny_corpus, tiny_trainer
from transformers import TrainerCallback


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture
def make(corpus, tmp_path):
    return partial(tiny_trainer, corpus, tmp_path / "run")


class Tensors(TrainerCallback):
    """Counts the tensors that Python holds at some steps."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps, self.counts = steps, []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            gc.collect()
            self.counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))


def test_no_tensor_stays_behind(make):
    """Test 100 steps with 10 evaluations. `benchmarks/long_run.py` measures the process's memory over 2,000 steps."""
    trainer = make(max_steps=100, eval_strategy="steps", eval_steps=10, logging_steps=10)
    counter = Tensors((35, 55, 75, 95))
    trainer.add_callback(counter)
    trainer.train()
    assert len(set(counter.counts)) == 1


def test_evaluations_leave_nothing_behind(make, corpus):
    """Neither the loader stays, nor its workers, even if the workers of the training persist."""
    trainer = make(dataloader_num_workers=1, dataloader_persistent_workers=True)
    trainer.evaluate()
    gc.collect()
    assert active_children() == []
    loader = trainer.get_eval_dataloader(corpus.encoded)
    kept = weakref.ref(loader)
    del loader
    gc.collect()
    assert kept() is None


def test_waiting_for_data_is_counted(make):
    """Compare a slow collator with the clock. The time of the model does not count as waiting."""
    trainer = make(max_steps=6, logging_steps=3, gradient_accumulation_steps=2)
    collate, calls = trainer.data_collator, []

    def slow(rows):
        calls.append(time.sleep(0.05))
        return collate(rows)

    slow.pad_to_multiple_of = collate.pad_to_multiple_of
    trainer.data_collator = slow
    trainer.model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    trainer.train()
    totals = trainer.throughput.state()["args"]
    assert 0.05 * len(calls) < totals["data_seconds"] < totals["seconds"] - 12 * 0.01
    shares = [entry["data_share"] for entry in trainer.state.log_history if "data_share" in entry]
    assert len(shares) == 2
    assert all(0 < share < 1 for share in shares)
    waited = totals["data_seconds"] / totals["seconds"]
    assert min(shares) - 1e-6 <= waited <= max(shares) + 1e-6
