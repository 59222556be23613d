"""Merged attention and depth-scaled first weights (Zhang, Titov and Sennrich 2019).

Logits, generation, saving and back-ends are tested together with all other models (`model_cases.CASES`).
"""

import math

import pytest
import torch
from model_cases import build, new_vanilla, pair
from model_checks import check_padding_before_targets, check_refused

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.exporting.ctranslate2_spec import check_expressible
from hf_deepwide.exporting.stock import check_fit

DEEP = {"encoder_layers": 20, "decoder_layers": 20, "d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}


def test_a_layer_has_one_attention_and_one_norm_less():
    """The paper shares W_V and W_O: each of the three layers has 4 (D^2 + D) and 2 D parameters less."""
    plain, model = new_vanilla(), new_vanilla(decoder_attention="merged")
    assert plain.num_parameters() - model.num_parameters() == 3 * (4 * (16 * 16 + 16) + 2 * 16)


def test_twenty_layers_have_480_d_squared_parameters_beside_embeddings():
    """Table 6 (Xu et al. 2024) prints 149.54 M, which leaves 23.4 M for the vocabularies of Zhang et al."""
    with torch.device("meta"):
        model = new_vanilla(**DEEP, decoder_attention="merged", vocab_size=3)
    d, layers = 512, 40
    biases = layers * (4 * d + 2048 + d + 4 * d)
    assert model.num_parameters() == layers * 12 * d**2 + biases + 3 * d
    assert (149.54e6 - model.num_parameters()) / d == pytest.approx(45_800, abs=100)


def test_the_mean_is_of_tokens_that_are_no_padding():
    check_padding_before_targets("vanilla-merged")


def test_attention_weights_of_the_target_are_equal():
    model = build("vanilla-merged-prenorm", attn_implementation="eager")
    with torch.no_grad():
        reported = model(**pair((4,), (3,)), output_attentions=True).decoder_attentions
    expected = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    assert len(reported) == 3
    for weights in reported:
        torch.testing.assert_close(weights, expected.expand(1, 4, 3, 3))


@pytest.mark.parametrize(("std", "residual"), [(None, "add"), (0.02, "add"), (None, "sdu")])
def test_first_weights_shrink_with_the_number_of_their_layer(std, residual):
    """All other parameters start as in the plain model."""
    fields = {"d_model": 64, "encoder_layers": 3, "init_std": std, "residual": residual}
    plain, model = new_vanilla(**fields), new_vanilla(**fields, initialization="depth_scaled")
    gains = {"1": 1, "2": 2**-0.5, "3": 3**-0.5}
    for (name, weight), (_, other) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        _, in_layers, rest = name.partition(".layers.")
        gain = gains[str(int(rest.partition(".")[0]) + 1)] if in_layers and weight.dim() == 2 else 1
        torch.testing.assert_close(other, gain * weight, msg=lambda m, n=name: f"{n}: {m}")
    if std is None:
        bound = math.sqrt(6 / (4 * 64)) / math.sqrt(3)
        assert 0.97 * bound < model.model.encoder.layers[2].self_attn.q_proj.weight.abs().max() <= bound


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decoder_attention": "average"}, ["`decoder_attention`", "separate, merged", "'average'"]),
        ({"decoder_attention": "merged", "residual": "sdu"}, ["merged", "'sdu'", "`residual='add'`"]),
        ({"decoder_attention": "merged", "max_relative_position": 2}, ["merged", "`max_relative_position=None`"]),
        ({"initialization": "depth_scaled", "residual": "b2t"}, ["depth_scaled", "b2t", "choose one"]),
    ],
)
def test_names_what_does_not_fit(fields, words):
    check_refused(VanillaTransformerConfig, fields, words)


def test_doors_to_other_models_refuse_merged_attention():
    model = build("vanilla-merged")
    with pytest.raises(UserError, match="`decoder_attention` cannot be"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla"), decoder_attention="merged")
    with pytest.raises(UserError, match=r"cannot start from .*`decoder_attention` is"):
        VanillaTransformerForConditionalGeneration.from_base(model)
    with pytest.raises(UserError, match="one attention"):
        check_expressible(model)
    with pytest.raises(UserError, match="`decoder_attention` is 'merged'"):
        check_fit(model.config, "marian")
