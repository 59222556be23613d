"""Dynamic convolutions in the place of self-attention (Wu et al. 2019).

The tests of all models (`model_cases.CASES`) check logits, generation, saving and back-ends.
"""

import pytest
import torch
from model_cases import SIZES, build, source
from model_checks import check_masks_are_needed, check_padding_before_targets, check_refused

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.models import modeling_base

DYNAMIC = {"layer_form": "dynamic_convolution"}
BIG = {
    "d_model": 1024,
    "encoder_layers": 7,
    "decoder_layers": 6,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "vocab_size": 32768,
}


def new(**fields):
    torch.manual_seed(0)
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**SIZES, **DYNAMIC, **fields}))


def test_a_big_model_has_the_printed_parameters():
    """213 M for WMT'14 En-De (table 1), with seven layers in the encoder and a joint vocabulary of 32k."""
    with torch.device("meta"):
        model = new(**BIG)
    d, f, heads = 1024, 4096, 16
    convolution, attention, network = 3 * d**2 + 3 * d, 4 * d**2 + 4 * d, 2 * d * f + f + d
    encoder = 7 * (convolution + network + 2 * 2 * d) + heads * d * (3 + 7 + 15 + 4 * 31)
    decoder = 6 * (convolution + attention + network + 3 * 2 * d) + heads * d * (3 + 7 + 15 + 3 * 31)
    assert model.num_parameters() == 32768 * d + encoder + decoder
    assert f"{model.num_parameters() / 1e6:.0f}" == "213"


def test_the_last_width_is_that_of_all_further_layers():
    model = new(encoder_kernel_sizes=[5], decoder_kernel_sizes=[2, 9])
    widths = [
        [layer.self_attn.width for layer in stack.layers] for stack in (model.model.encoder, model.model.decoder)
    ]
    assert widths == [[5, 5], [2, 9, 9]]
    paper = VanillaTransformerConfig(**DYNAMIC, encoder_layers=7)
    assert paper.kernel_sizes(is_decoder=False) == [3, 7, 15, 31, 31, 31, 31]
    assert paper.kernel_sizes(is_decoder=True) == [3, 7, 15, 31, 31, 31]


def test_kernels_reach_as_far_as_they_are_wide():
    """Windows of 3 and 7 places reach 1 + 3 places to each side; windows of 2, 3 and 3 places reach 1 + 2 + 2 back."""
    model = new(encoder_kernel_sizes=[3, 7], decoder_kernel_sizes=[2, 3]).double().eval()
    x = torch.randn(1, 15, 16, dtype=torch.float64)
    for stack, reached in ((model.model.encoder, range(3, 12)), (model.model.decoder, range(7, 13))):
        other = x.clone()
        other[0, 7] += 1
        with torch.no_grad():
            one, two = (stack(inputs_embeds=each).last_hidden_state[0] for each in (x, other))
        assert (one != two).any(-1).nonzero().flatten().tolist() == list(reached)


def test_kernels_are_dropped_behind_their_softmax():
    """In a stack without attention, nothing else has the rate `attention_dropout`. Kept weights are twice as large."""
    convolution = new(attention_dropout=0.5, decoder_kernel_sizes=[4]).model.decoder.layers[0].self_attn
    x = torch.randn(2, 9, 16)
    torch.manual_seed(1)
    _, dropped = convolution.train()(x)
    _, weights = convolution.eval()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * weights[kept])
    assert 0.35 < kept.sum() / (weights != 0).sum() < 0.65


@pytest.mark.parametrize("std", [None, 0.02])
def test_first_weights_are_those_of_the_code(std):
    """W_I and W_O by Xavier, and W_Q uniform within 1/sqrt(D)."""
    layer = new(d_model=64, decoder_kernel_sizes=[31], init_std=std).model.decoder.layers[0].self_attn
    bounds = {"in_proj": (6 / (3 * 64)) ** 0.5, "kernel_proj": 1 / 8, "out_proj": (6 / (2 * 64)) ** 0.5}
    for name, bound in bounds.items():
        weight = getattr(layer, name).weight
        if std is None:
            assert 0.98 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(std or bound / 3**0.5, rel=0.05)


def test_windows_do_not_reach_into_padding():
    check_padding_before_targets("vanilla-dynamic")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_form": "convolution"}, ["`layer_form`", "dynamic_convolution", "'convolution'"]),
        ({"encoder_kernel_sizes": [3]}, ["`encoder_kernel_sizes`", "`layer_form='dynamic_convolution'`"]),
        ({**DYNAMIC, "encoder_kernel_sizes": []}, ["`encoder_kernel_sizes`", "1 to 6"]),
        ({**DYNAMIC, "decoder_kernel_sizes": [3] * 7}, ["`decoder_kernel_sizes`", "1 to 6"]),
        ({**DYNAMIC, "decoder_kernel_sizes": [0]}, ["`decoder_kernel_sizes`", "from 1", "[0]"]),
        ({**DYNAMIC, "decoder_kernel_sizes": [20_000]}, ["`decoder_kernel_sizes`", "to 10,000"]),
        ({**DYNAMIC, "attention_branches": 2}, ["`attention_branches`", "'dynamic_convolution'"]),
        ({**DYNAMIC, "max_relative_position": 2}, ["`max_relative_position`", "'dynamic_convolution'"]),
        ({**DYNAMIC, "residual": "sdu"}, ["`residual`", "'dynamic_convolution'"]),
    ],
)
def test_names_what_does_not_fit(fields, words):
    check_refused(VanillaTransformerConfig, fields, words)


def test_names_attention_without_masks():
    check_masks_are_needed("vanilla-dynamic", "accepted: eager, sdpa")


@pytest.mark.parametrize("beams", [1, 3])
def test_the_fast_decoder_is_used_and_leaves_out_what_has_ended(beams, monkeypatch):
    """There are more tokens than the twin's block holds: windows slide, and finished sentences leave the batch."""
    model = build("vanilla-dynamic", max_position_embeddings=60).double()
    fields = {"num_beams": beams, "max_new_tokens": 50, "eos_token_id": 5, "do_sample": False}
    got = model.generate(**source(), **fields)
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    assert torch.equal(got, model.generate(**source(), **fields))
