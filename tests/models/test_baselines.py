"""Baselines of the papers: transparent attention, self-dependency units, and Lipschitz-constrained first weights.

The tests of all models (`model_cases.CASES`) check logits, generation, saving and back-ends.
"""

import math

import pytest
import torch
from model_cases import build, new_vanilla, pair
from torch import nn

from hf_deepwide import VanillaTransformerForConditionalGeneration
from hf_deepwide.errors import UserError
from hf_deepwide.models.branches import BranchSum

# Transparent attention


def test_transparent_attention_to_the_top_layer_is_plain_attention():
    plain = build("vanilla", normalize_before=True)
    model = build("vanilla", normalize_before=True, layer_aggregation="transparent")
    model.load_state_dict(plain.state_dict(), strict=False)
    logits = torch.zeros(3, 3)
    logits[2] = 60.0
    model.model.encoder.combination.mixture_logits.data[:] = logits
    with torch.no_grad():
        torch.testing.assert_close(model(**pair()).logits, plain(**pair()).logits)


def test_each_decoder_layer_reads_its_own_mean_of_the_encoder():
    """Decoder layer j reads only y_j: here the embeddings, the first and the second encoder layer."""
    model = build("vanilla", layer_aggregation="transparent")
    model.model.encoder.combination.mixture_logits.data[:] = 60 * torch.eye(3)
    outputs, memories = [], []
    layers = model.model.encoder.layers
    layers[0].register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: outputs.append(output))
    for layer in model.model.decoder.layers:
        layer.encoder_attn.k_proj.register_forward_pre_hook(lambda _, args: memories.append(args[0]))
    with torch.no_grad():
        encoded = model(**pair(), output_hidden_states=True)
    assert encoded.encoder_last_hidden_state.shape == (3, 7, 3 * 16)
    assert [state.shape for state in encoded.encoder_hidden_states] == [(3, 7, 16)] * 3
    for memory, output in zip(memories, outputs, strict=True):
        torch.testing.assert_close(memory, output)


@pytest.mark.parametrize("norm", [False, True])
def test_transparent_attention_has_one_weight_for_each_pair_of_layers(norm):
    plain, model = (new_vanilla(normalize_before=norm, layer_aggregation=how) for how in (None, "transparent"))
    assert model.num_parameters() - plain.num_parameters() == (2 + 1) * 3
    weights = model.model.encoder.combination.mixture_logits
    assert weights.abs().max() <= math.sqrt(2 / (3 + 3))
    assert weights.std() > 0.1
    assert model.model.decoder.combination is None
    tops = model.training_logs()
    expected = {f"top_weight/decoder.{j + 1}": weights.softmax(0)[2, j].item() for j in range(3)}
    assert tops == pytest.approx(expected)


# Self-dependency units


@pytest.mark.parametrize("norm", [False, True])
def test_each_sub_layer_has_a_unit(norm):
    """A unit has 2 (D^2 + D) parameters. A row of table 6 (Xu et al. 2024) has 30 units with 15.76 M."""
    plain, model = new_vanilla(normalize_before=norm), new_vanilla(normalize_before=norm, residual="sdu")
    assert model.num_parameters() - plain.num_parameters() == (2 * 2 + 3 * 3) * 2 * (16 * 16 + 16)


def test_a_unit_that_is_zero_leaves_the_plain_layer():
    plain, model = build("vanilla"), build("vanilla", residual="sdu")
    model.load_state_dict(plain.state_dict(), strict=False)
    for name, parameter in model.named_parameters():
        if ".units." in name:
            nn.init.zeros_(parameter)
    with torch.no_grad():
        torch.testing.assert_close(model(**pair()).logits, plain(**pair()).logits)


# First weights


@pytest.mark.parametrize("branches", [1, 2])
def test_first_weights_are_uniform_within_their_bounds(branches):
    """The bound of each branch depends on the branch's own inputs. All else is as with `"xavier"`."""
    fields = {"d_model": 64, "attention_branches": branches, "ffn_branches": branches}
    model, plain = new_vanilla(initialization="lipschitz", **fields), new_vanilla(**fields)
    assert model.num_parameters() == plain.num_parameters()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            bound = math.sqrt(2 / (41 + 64))
            assert (module.weight[1] == 0).all(), "the padding's row"
        elif isinstance(module, nn.Linear) and name != "lm_head":
            inputs = module.in_features // (branches if isinstance(module, BranchSum) else 1)
            bound = math.sqrt(1 / inputs)
            assert (module.bias == 0).all()
        else:
            continue
        assert 0.97 * bound < module.weight.abs().max() <= bound, name
        used = module.weight[2:] if isinstance(module, nn.Embedding) else module.weight
        assert used.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.06), name


def test_first_weights_concern_new_models_alone(tmp_path):
    model = build("vanilla", initialization="lipschitz")
    model.save_pretrained(tmp_path)
    again = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert again.config.initialization == "lipschitz"
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("fields", [{"residual": "sdu"}, {"layer_aggregation": "transparent"}], ids=str)
def test_from_base_refuses_what_changes_the_function(fields):
    (name,) = fields
    with pytest.raises(UserError, match=f"`{name}` cannot be"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla"), **fields)
    with pytest.raises(UserError, match=f"cannot start from .*`{name}` is"):
        VanillaTransformerForConditionalGeneration.from_base(build("vanilla", **fields))
