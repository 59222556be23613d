"""Timing: the median, of the work itself, leaving nothing behind."""

import copy
import time

import pytest
import torch
from test_evaluation_translate import QUICK, tiny_model, tiny_tokenizer

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.speed import median_seconds, training_step_seconds, translation_speed
from hf_deepwide.evaluation.translate import generate_ids


def test_median_after_warm_up(monkeypatch):
    clock = [0.0]
    durations = iter([100.0, 3.0, 1.0, 50.0, 2.0, 4.0])  # the first is the warm-up

    def run():
        clock[0] += next(durations)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert median_seconds(run, repeats=5, warmup=1) == 3.0
    with pytest.raises(UserError, match="repeats: 0"):
        median_seconds(run, repeats=0)


def test_translation_speed_counts_sentences_and_generated_tokens():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    sources = ["w1 w2 w3", "w4", "w5 w6"]
    speed = translation_speed(model, tokenizer, sources, QUICK, repeats=1, warmup=0)
    assert speed["sentences_per_second"] * speed["seconds"] == pytest.approx(3)
    tokens = sum(len(row) for row in generate_ids(model, tokenizer, sources, QUICK))
    assert speed["tokens_per_second"] * speed["seconds"] == pytest.approx(tokens)
    with pytest.raises(UserError, match="no sentences"):
        translation_speed(model, tokenizer, [], QUICK)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_training_step_leaves_the_model_alone(autocast):
    model = tiny_model()
    weights = copy.deepcopy(model.state_dict())
    steps = []
    model.lm_head.register_full_backward_hook(lambda module, *_: steps.append(module.training))
    batch = {"input_ids": torch.tensor([[4, 5, 2]]), "labels": torch.tensor([[6, 7, 8, 2]])}
    assert training_step_seconds(model, batch, repeats=2, warmup=1, autocast=autocast) > 0
    assert steps == [True] * 3
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
