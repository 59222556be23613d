"""Luna's nested attentions (Ma et al. 2021).

Logits, generation, saving and back-ends are tested together with all other models (`model_cases.CASES`).
"""

import math

import pytest
import torch
from model_cases import build, new_vanilla, pair, source
from model_checks import check_masks_are_needed, check_refused
from transformers.cache_utils import EncoderDecoderCache, StaticCache

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.models.decoding import DecodingCache

CASES = ["vanilla-luna", "vanilla-luna-prenorm"]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
def test_parameters_are_as_many_as_the_sub_layers_have(ties, pre_norm):
    """An attention has 7 projections, causal attention 6; tied, each has 5. P and the norms of P are added."""
    d, encoder, decoder, length = 16, 2, 3, 5
    fields = {"layer_form": "luna", "luna_length": length, "luna_tie_kv": ties, "normalize_before": pre_norm}
    projection, norm = d * d + d, 2 * d
    attention, causal = (5, 5) if ties else (7, 6)
    layers = encoder * (attention * projection + 24 * (2 * d + 1) + d + 3 * norm)
    layers += decoder * ((attention + causal) * projection + 20 * (2 * d + 1) + d + 4 * norm)
    layers += 3 * norm if pre_norm else -norm  # pre-norm: final norms of the stacks; post-norm: no norm of the last P
    assert new_vanilla(**fields).num_parameters() == layers + (41 + length) * d


def test_the_printed_count_leaves_a_vocabulary_of_40_700():
    """Table 6 (Xu et al. 2024) prints 77.60 M: keys and values are untied. Their own models have 35,627 entries."""
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(
            VanillaTransformerConfig(layer_form="luna", luna_length=16, vocab_size=3)
        )
    assert (77.60e6 - model.num_parameters()) / 512 == pytest.approx(40_700, abs=30)


def test_the_packed_sequence_stands_behind_the_states_of_the_source():
    model = build("vanilla-luna")
    with torch.no_grad():
        memory = model.get_encoder()(**source(), output_hidden_states=True)
    assert memory.last_hidden_state.shape == (3, 7 + 3, 16)
    assert torch.equal(memory.hidden_states[-1], memory.last_hidden_state[:, :7])
    assert not torch.allclose(memory.last_hidden_state[0, 7:], memory.last_hidden_state[1, 7:], atol=1e-2)
    for states in (None, memory.last_hidden_state[:, :3]):
        with pytest.raises(ValueError, match="3 packed positions"):
            model.get_decoder()(input_ids=torch.tensor([[2]] * 3), encoder_hidden_states=states)


def test_first_weights_of_the_packed_sequence():
    """N(0, 1/D) like embeddings; scaled and with positions, as tokens are."""
    packed = new_vanilla(d_model=64, layer_form="luna", luna_length=40).model.encoder.packed
    assert packed.packed_embeddings.std().item() == pytest.approx(1 / 8, rel=0.05)
    expected = 8 * packed.packed_embeddings[39, 0] + math.sin(41)
    assert packed(torch.zeros(2, 1, 64))[1, 39, 0].item() == pytest.approx(expected.item(), abs=1e-5)
    assert new_vanilla(layer_form="luna", init_std=0.5).model.encoder.packed.packed_embeddings.std() > 0.4
    bound = math.sqrt(2 / (32 + 16))
    largest = (
        new_vanilla(layer_form="luna", initialization="lipschitz").model.encoder.packed.packed_embeddings.abs().max()
    )
    assert 0.95 * bound < largest <= bound


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_padding_on_the_left_changes_nothing(case, attention):
    """Neither in the source nor in the target: means are over tokens that are not padding."""
    model = build(case, attn_implementation=attention, position_embedding_type="sinusoidal")
    ids, target = torch.tensor([[9, 8, 7, 2]]), torch.tensor([[2, 7, 9]])
    padded, padded_target = torch.tensor([[1, 1, 9, 8, 7, 2]]), torch.tensor([[1, 1, 2, 7, 9]])
    masks = {"attention_mask": (padded != 1).long(), "decoder_attention_mask": (padded_target != 1).long()}
    with torch.no_grad():
        alone = model(input_ids=ids, decoder_input_ids=target).logits
        behind = model(input_ids=padded, decoder_input_ids=padded_target, **masks).logits
        unmasked = model(input_ids=ids, decoder_input_ids=padded_target).logits
    torch.testing.assert_close(behind[:, 2:], alone, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(unmasked[:, 2:], alone, atol=1e-2)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_cache_decodes_the_same_tokens(case, options):
    """Also with sources that are shorter than P. The cache is Transformers': the fast twin does not support Luna."""
    model = build(case).double()
    for inputs in (source((7, 4, 5)), source((1, 2))):
        fields = {**inputs, "max_new_tokens": 7, "no_repeat_ngram_size": 1, "return_dict_in_generate": True}
        got = model.generate(**fields, **options)
        plain = {name: value for name, value in options.items() if name == "num_beams"}
        assert torch.equal(got.sequences, model.generate(**fields, **plain, use_cache=False).sequences)
        assert isinstance(got.past_key_values, EncoderDecoderCache)
        assert not isinstance(got.past_key_values, DecodingCache)


@pytest.mark.parametrize("case", CASES)
def test_a_static_cache_takes_the_target_in_chunks(case):
    """The cache has more slots than there are tokens, and the first chunk has no mask."""
    model, target = build(case, attn_implementation="sdpa"), torch.randint(4, 37, (3, 5))
    config = model.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in (8, 20)))
    with torch.no_grad():
        whole = model(**source(), decoder_input_ids=target).logits
        chunks = [model(**source(), decoder_input_ids=ids, past_key_values=cache).logits for ids in target.split(3, 1)]
    torch.testing.assert_close(torch.cat(chunks, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_source_is_packed_once(case, monkeypatch):
    """Once for each sentence, however many tokens are decoded."""
    model, calls = build(case), []
    attentions = [layer.encoder_attn for layer in model.model.decoder.layers]
    for attention in attentions:
        pack = attention.pack_source
        monkeypatch.setattr(attention, "pack_source", lambda *x, pack=pack, **y: calls.append(1) or pack(*x, **y))
    model.generate(**source(), max_new_tokens=5)
    assert len(calls) == len(attentions)


@pytest.mark.parametrize("case", CASES)
def test_weights_in_generation_are_those_of_the_whole_target(case):
    """The attention weights that each step reports while a cache is used."""
    model = build(case, attn_implementation="eager")
    out = model.generate(**source(), max_new_tokens=4, output_attentions=True, return_dict_in_generate=True)
    with torch.no_grad():
        whole = model(**source(), decoder_input_ids=out.sequences[:, :-1], output_attentions=True)
    for step in range(4):
        for got, expected in zip(out.cross_attentions[step], whole.cross_attentions, strict=True):
            torch.testing.assert_close(got[:, :, 0], expected[:, :, step])
        for got, expected in zip(out.decoder_attentions[step], whole.decoder_attentions, strict=True):
            torch.testing.assert_close(got[:, :, 0], expected[:, :, step, : step + 1])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_form": "moon"}, ["`layer_form`", "luna", "'moon'"]),
        ({"layer_form": "luna", "luna_length": 0}, ["`luna_length`", "at least 1", "0"]),
        ({"luna_tie_kv": True}, ["`luna_tie_kv`", "`layer_form='luna'`"]),
        ({"luna_activation": "elu"}, ["`luna_activation`", "`layer_form='luna'`"]),
        ({"layer_form": "luna", "luna_activation": "relu"}, ["`luna_activation`", "softplus, elu", "'relu'"]),
        ({"layer_form": "luna", "layer_aggregation": "transparent"}, ["transparent", "'luna'", "choose one"]),
        ({"layer_form": "luna", "residual": "sdu"}, ["`residual`", "'luna'", "`residual='add'`"]),
        ({"layer_form": "luna", "attention_branches": 3}, ["`attention_branches`", "'luna'"]),
    ],
)
def test_names_what_does_not_fit(fields, words):
    check_refused(VanillaTransformerConfig, fields, words)


def test_names_attention_without_masks():
    check_masks_are_needed("vanilla-luna", "accepted: eager, sdpa")


@pytest.mark.parametrize("how", ["dlcl", "hierarchical"])
def test_layers_can_be_combined(how):
    """Only the states are combined. P is passed from layer to layer."""
    model = new_vanilla(layer_form="luna", layer_aggregation=how).train()
    loss = model(**pair()).loss
    loss.backward()
    assert loss.isfinite()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
