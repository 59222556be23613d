"""The cell of the Evolved Transformer (So et al. 2019).

The tests of all models (`model_cases.CASES`) check logits, generation, saving and back-ends.
"""

import pytest
import torch
from model_cases import SIZES, build, source, tokens
from model_checks import check_masks_are_needed, check_refused
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.exporting.onnx_folder import check_cache

EVOLVED = {"layer_form": "evolved", "normalize_before": True}
VOCABULARY = 33_280  # gives all sizes in the paper, also those of its Transformers


def sizes(d, encoder_layers, decoder_layers, heads=16):
    return {
        "d_model": d,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "encoder_ffn_dim": 4 * d,
        "decoder_ffn_dim": 4 * d,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "attention_bias": False,
        "normalize_before": True,
        "vocab_size": VOCABULARY,
    }


def new(**fields):
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**SIZES, **EVOLVED, **fields}))


def parameters(**fields):
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields)).num_parameters()


@pytest.mark.parametrize(
    ("shape", "printed"), [((512, 3, 4, 8), "64.1"), ((1024, 3, 4), "221.7"), ((640, 9, 10), "218.1")]
)
def test_models_have_the_printed_parameters(shape, printed):
    """The base, big and deep models of WMT'14 En-De. The vocabulary is that of the Transformers in the next test."""
    d, encoder_layers, decoder_layers, *_ = shape
    f, attention = 4 * d, 4 * d**2
    encoder = 2 * (d**2 + d) + (d * f + f) + (3 * d + 1) * d // 2 + 2 * f + 9 * f + (f + 1) * d // 2
    encoder += attention + (2 * d * f + f + d) + 4 * 2 * d
    decoder = 4 * attention + (2 * d * f + f + d) + 2 * f + 5 * 2 * d
    decoder += (11 * d + 2 * d**2 + 2 * d) + (7 * d + (d + 1) * d // 2) + 4 * d + (14 * d + 2 * d**2 + d)
    count = parameters(**EVOLVED | sizes(*shape))
    assert count == VOCABULARY * d + encoder_layers * encoder + decoder_layers * decoder + 4 * d
    assert f"{count / 1e6:.1f}" == printed


@pytest.mark.parametrize(("shape", "printed"), [((512, 6, 6, 8), "61.1"), ((1024, 6, 6), "210.4")])
def test_the_vocabulary_is_that_of_the_transformers_beside_them(shape, printed):
    assert f"{parameters(**sizes(*shape)) / 1e6:.1f}" == printed


@pytest.mark.parametrize(("heads", "wide"), [(2, 4), (8, 16), (16, 16), (32, 32)])
def test_the_first_attention_has_twice_as_many_heads_up_to_16(heads, wide):
    layer = new(d_model=64, encoder_ffn_dim=32, decoder_attention_heads=heads).model.decoder.layers[0]
    found = [getattr(layer, name).num_heads for name in ("wide_self_attn", "first_encoder_attn", "self_attn")]
    assert found == [wide, heads, heads]


@pytest.mark.parametrize("std", [None, 0.02])
def test_convolutions_start_as_in_tensor2tensor(std):
    model = new(d_model=64, encoder_ffn_dim=96, init_std=std).model
    cell, causal = model.encoder.layers[0].convolutions, model.decoder.layers[0].convolutions
    bounds = {
        cell.narrow: (6 / (3 * 64 + 3 * 32)) ** 0.5,
        cell.output.depthwise: (6 / (9 * 96 + 9)) ** 0.5,
        causal.wide.depthwise: (6 / (11 * 64 + 11)) ** 0.5,
        causal.wide.pointwise: (6 / (64 + 128)) ** 0.5,
    }
    for module, bound in bounds.items():
        if std is None:
            assert 0.97 * bound < module.weight.abs().max() <= bound
        assert module.weight.std().item() == pytest.approx(std or bound / 3**0.5, rel=0.08)
        assert module.bias is None or (module.bias == 0).all()


@pytest.mark.parametrize("kind", ["dynamic", "lazy", "static"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_decoding_in_chunks_is_teacher_forcing(kind, chunk):
    """The targets are longer than the reach of the filters, and are padded on the left."""
    model = build("vanilla-evolved").double()
    target, mask = tokens((19, 12, 16), seed=3)
    order = mask.argsort(dim=1, stable=True)
    target, mask = target.gather(1, order), mask.gather(1, order)
    config = model.config.get_text_config(decoder=True)
    own, cross = {
        "dynamic": lambda: (DynamicCache(config=config), DynamicCache(config=config)),
        "lazy": lambda: (DynamicCache(), DynamicCache()),
        "static": lambda: (StaticCache(config=config, max_cache_len=25), StaticCache(config=config, max_cache_len=7)),
    }[kind]()
    cache, parts = EncoderDecoderCache(own, cross), []
    with torch.no_grad():
        memory = {"encoder_outputs": model.get_encoder()(**source()), "attention_mask": source()["attention_mask"]}
        whole = model(**memory, decoder_input_ids=target, decoder_attention_mask=mask).logits
        for start in range(0, 19, chunk):
            part = {"decoder_input_ids": target[:, start : start + chunk], "past_key_values": cache}
            parts.append(model(**memory, **part, decoder_attention_mask=mask[:, : start + chunk]).logits)
    torch.testing.assert_close(torch.cat(parts, 1)[mask == 1], whole[mask == 1], atol=1e-9, rtol=1e-9)
    assert (len(own.layers), len(cross.layers)) == (4 * 3, 2 * 3)
    assert [layer.keys.shape[1:4:2] for layer in own.layers[::3]] == [(4, 4), (8, 2), (1, 16), (1, 32)]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
def test_long_translations_do_not_depend_on_the_cache(beams, cache):
    model = build("vanilla-evolved").double()
    fields = {"num_beams": beams, "max_new_tokens": 25, "no_repeat_ngram_size": 1}
    expected = model.generate(**source(), **fields, use_cache=False)
    assert torch.equal(model.generate(**source(), **fields, **cache), expected)


def test_padding_between_tokens_is_nothing():
    """Neither stack reads padding, or the values that a norm's bias would put in place of padding."""
    model = build("vanilla-evolved", position_embedding_type="learned")
    for stack in (model.model.encoder, model.model.decoder):
        stack.embeddings.positions.weight.data.zero_()
    ids, padded = torch.tensor([[5, 7, 9, 2]]), torch.tensor([[6, 6, 5, 7, 9, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        alone = model(input_ids=ids, decoder_input_ids=ids).logits
        both = {"input_ids": padded, "attention_mask": mask, "decoder_input_ids": padded}
        behind = model(**both, decoder_attention_mask=mask).logits
        unmasked = model(**both).logits
    torch.testing.assert_close(behind[:, 2:], alone)
    assert not torch.allclose(unmasked[:, 2:], alone, atol=1e-2)


def test_a_cache_that_begins_with_tokens_is_refused():
    """PEFT's prefixes have one cache slot per layer. A cell needs more slots."""
    model = build("vanilla-evolved")
    own = DynamicCache(config=model.config)
    for layer in range(3):
        own.update(torch.zeros(3, 4, 2, 4), torch.zeros(3, 4, 2, 4), layer)
    cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="begins with tokens in 3 slots"):
        model(**source(), decoder_input_ids=torch.full((3, 1), 2), past_key_values=cache)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_form": "evolved"}, ["`normalize_before=True`"]),
        ({**EVOLVED, "initialization": "lipschitz"}, ["`initialization='xavier'`", "'lipschitz'"]),
        ({**EVOLVED, "d_model": 30, "encoder_attention_heads": 5, "decoder_attention_heads": 6}, ["12 heads", "30"]),
        ({**EVOLVED, "d_model": 30, "encoder_attention_heads": 5, "decoder_attention_heads": 15}, ["16 heads", "30"]),
        ({**EVOLVED, "encoder_ffn_dim": 255}, ["`encoder_ffn_dim` >= 256", "255"]),
        ({**EVOLVED, "ffn_branches": 2}, ["`ffn_branches`", "'evolved'"]),
        ({**EVOLVED, "residual": "sdu"}, ["`residual`", "'evolved'"]),
    ],
)
def test_names_what_does_not_fit(fields, words):
    check_refused(VanillaTransformerConfig, fields, words)


def test_names_attention_without_masks():
    check_masks_are_needed("vanilla-evolved", "'evolved'` needs a mask of positions")


def test_the_exported_cache_refuses_cells():
    with pytest.raises(UserError, match="`layer_form` is 'evolved'"):
        check_cache(build("vanilla-evolved"))
