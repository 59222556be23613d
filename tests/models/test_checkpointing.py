"""Gradient checkpointing: layers of all families run once more in the backward pass."""

from collections import Counter

import pytest
import torch
from model_cases import CASES, build, pair, source


def calls_of_layers(model):
    """How often the parts of each layer run in a forward and a backward pass, in all."""
    calls, layers = Counter(), [*model.model.encoder.layers, *model.model.decoder.layers]
    for number, layer in enumerate(layers):
        for part in layer.children():
            part.register_forward_pre_hook(lambda part, args, number=number: calls.update([number]))
    model.train()(**pair()).loss.backward()
    return [calls[number] for number in range(len(layers))]


@pytest.mark.parametrize("case", CASES)
def test_checkpointing_runs_layers_again(case):
    """PyTorch stops the second run when it has all values that the gradients need."""
    plain, model = calls_of_layers(build(case)), build(case)
    model.gradient_checkpointing_enable()
    again = calls_of_layers(model)
    assert all(once < both <= 2 * once for once, both in zip(plain, again, strict=True)), (plain, again)


@pytest.mark.parametrize("case", ["vanilla", "mat-3", "lstm"])
def test_generation_in_training_mode_sees_all_tokens(case):
    """Layers with checkpointing take no cache, so each step gets all tokens."""
    model = build(case)
    expected = model.generate(**source(), max_new_tokens=6, num_beams=2)
    model.train().gradient_checkpointing_enable()
    assert model.generate(**source(), max_new_tokens=6, num_beams=2).tolist() == expected.tolist()
    assert model.eval().generate(**source(), max_new_tokens=6, num_beams=2).tolist() == expected.tolist()


def test_a_cache_that_begins_with_tokens_is_refused_in_training_mode():
    """Also without gradients: the layers would not see the cache, but the positions would count its tokens."""
    model, batch = build("vanilla"), source()
    tokens = torch.tensor([[2, 5, 6]] * len(batch["input_ids"]))
    with torch.no_grad():
        cache = model(**batch, decoder_input_ids=tokens).past_key_values
        model.train().gradient_checkpointing_enable()
        with pytest.raises(ValueError, match="turn gradient checkpointing off"):
            model(**batch, decoder_input_ids=tokens[:, :1], past_key_values=cache)
