"""Ways to join a sub-layer to its input: constants, initial weights and numbers computed without this package.

Logits and gradients, generation, saving and back-ends are tested together with all other models
(`model_cases.CASES`).
"""

import math

import pytest
import torch
from hand_made_layers import decode, encode, hand_made
from model_cases import build, new_vanilla
from model_checks import WAYS, check_checkpointing, check_learning

from hf_deepwide import VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.models.residuals import DeepNormDecoderLayer, DeepNormEncoderLayer

OWN = {
    "deepnorm": ("v_proj", "out_proj", "fc1", "fc2"),
    "b2t": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
}


@pytest.mark.parametrize(
    ("fields", "encoded", "decoded"),
    [
        ({}, [0.702171, 0.712018, -1.414189], None),
        ({"normalize_before": True}, [0.990766, 1.578243, -2.257838], None),
        ({"residual": "deepnorm"}, [0.696647, 0.717503, -1.414150], [0.686664, 0.727354, -1.414017]),
        ({"residual": "b2t"}, [0.395231, 0.978327, -1.373558], [0.658785, 0.754351, -1.413136]),
    ],
    ids=["post-norm", "pre-norm", "deepnorm", "b2t"],
)
def test_layers_of_fixed_matrices_give_the_numbers_found_elsewhere(fields, encoded, decoded):
    model = hand_made(**fields)
    assert encode(model) == pytest.approx(encoded, abs=1e-6)
    if decoded:
        assert decode(model) == pytest.approx(decoded, abs=1e-6)


@pytest.mark.parametrize(
    ("depths", "encoder", "decoder"),
    [
        ((2, 2), (1.005905, 0.700563), (1.565085, 0.451801)),
        ((6, 6), (1.417938, 0.496989), (2.059767, 0.343295)),
        ((12, 6), (1.686222, 0.417916), (2.059767, 0.343295)),
        ((18, 18), (1.998746, 0.352571), (2.710806, 0.260847)),
        ((60, 12), (2.633126, 0.267629), (2.449490, 0.288675)),
        ((100, 100), (3.415742, 0.206310), (4.161791, 0.169904)),
    ],
)
def test_constants_of_deepnorm_are_the_papers(depths, encoder, decoder):
    assert DeepNormEncoderLayer.constants(*depths) == pytest.approx(encoder, abs=1e-6)
    assert DeepNormDecoderLayer.constants(*depths) == pytest.approx(decoder, abs=1e-6)


@pytest.mark.parametrize("init_std", [None, 0.02])
@pytest.mark.parametrize("residual", ["deepnorm", "b2t"])
def test_initial_weights_are_those_of_the_plain_model_scaled(residual, init_std):
    """With equal random numbers each weight is a multiple of the plain model's; there are no new parameters."""
    fields = {"attention_branches": 2, "ffn_branches": 3, "init_std": init_std}
    plain, model = new_vanilla(**fields).state_dict(), new_vanilla(residual=residual, **fields).state_dict()
    assert plain.keys() == model.keys()
    gains = {
        "deepnorm": {"encoder": 0.87 / math.sqrt(math.sqrt(math.sqrt(math.sqrt(2**4 * 3)))), "decoder": 36**-0.25},
        "b2t": {"encoder": 1 / math.sqrt(2), "decoder": 1 / math.sqrt(3)},
    }[residual]
    for name, weight in model.items():
        scaled = ".layers." in name and name.endswith(".weight") and name.split(".")[-2] in OWN[residual]
        gain = gains[name.split(".")[1]] if scaled else 1.0
        torch.testing.assert_close(weight, gain * plain[name], rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("residual", ["deepnorm", "b2t"])
@pytest.mark.parametrize("fields", [{}, {"layer_drop": 0.3}, {"layer_aggregation": "dlcl"}], ids=["", "drop", "dlcl"])
def test_a_few_steps_of_training_lower_the_loss(residual, fields):
    check_learning(new_vanilla(residual=residual, **fields))


@pytest.mark.parametrize("residual", ["deepnorm", "b2t"])
def test_checkpointed_layers_have_the_same_gradients(residual):
    check_checkpointing(lambda: build(f"vanilla-{residual}", dropout=0.3), *WAYS)


@pytest.mark.parametrize("residual", ["deepnorm", "b2t"])
def test_from_base_refuses_deepnorm_and_b2t(residual):
    """The base's weights fit, but the model would compute another function."""
    base = build("vanilla")
    with pytest.raises(UserError, match=rf"`residual` cannot be '{residual}': .* it was trained for that one"):
        VanillaTransformerForConditionalGeneration.from_base(base, residual=residual)
    with pytest.raises(UserError, match=rf"cannot start from .*`residual` is '{residual}'"):
        VanillaTransformerForConditionalGeneration.from_base(build(f"vanilla-{residual}"))
