"""The cache by both of its names: Transformers calls it `cache` since 5.24, and `past_key_values` before."""

import pytest
import torch
from model_cases import build, pair
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_deepwide.families import FAMILIES
from hf_deepwide.models.cache_name import CACHE_NAME, CACHE_NAMES

CASES = ("vanilla", "mat-3", "multipath-2", "latent-both", "lstm")


def parts(model):
    """Return target tokens, and functions that call the model, its body and its decoder with a cache by any name."""
    batch = pair((7, 4), (6, 6))
    source = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    memory = model.model.encoder(**source).last_hidden_state
    inputs = {"encoder_hidden_states": memory, "encoder_attention_mask": source["attention_mask"]}
    decoder = model.model.decoder
    return batch["labels"].clamp(min=4), {
        "model": lambda ids, **cache: model(**source, decoder_input_ids=ids, **cache).logits,
        "body": lambda ids, **cache: model.model(**source, decoder_input_ids=ids, **cache).last_hidden_state,
        "decoder": lambda ids, **cache: (
            decoder(ids, **inputs, **model.model.decoder_inputs(), **cache).last_hidden_state
        ),
    }


@torch.no_grad()
@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("case", CASES)
def test_either_name_decodes_as_the_whole_target(case, name):
    target, calls = parts(build(case).double())
    for call in calls.values():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        steps = torch.cat([call(ids, use_cache=True, **{name: cache}) for ids in target.split(2, dim=1)], dim=1)
        torch.testing.assert_close(steps, call(target), rtol=0, atol=1e-12)


def test_the_cache_comes_back_under_the_name_of_the_version():
    output = build("vanilla")(**pair((3,), (2,)), use_cache=True)
    assert isinstance(output[CACHE_NAME], EncoderDecoderCache)
    assert [name for name in vars(output) if name in CACHE_NAMES] == [CACHE_NAME]


def test_both_names_at_once_are_refused():
    target, calls = parts(build("vanilla"))
    for call in calls.values():
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with pytest.raises(ValueError, match="two names of one argument"):
            call(target, past_key_values=cache, cache=cache)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_evaluation_gathers_no_cache(family):
    assert {*CACHE_NAMES} <= {*family.config.keys_to_ignore_at_inference}


def test_gradient_checkpointing_needs_no_cache():
    """Layers are computed twice, so the cache is removed. Transformers itself removes it only under its own name."""
    model = build("vanilla", dropout=0.0).train()
    batch = pair((5, 3), (4, 4))
    expected = model(**batch).loss
    begun = model(**batch, use_cache=True)[CACHE_NAME]
    model.gradient_checkpointing_enable()
    loss = model(**batch, past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache())).loss
    loss.backward()
    assert torch.equal(loss, expected)
    with pytest.raises(ValueError, match=r"cache begins with tokens.*gradient checkpointing off"):
        model(**batch, past_key_values=begun)
