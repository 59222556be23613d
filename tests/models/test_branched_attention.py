"""Heads with feed-forward networks of their own (Ahmed, Keskar and Socher 2017, the Weighted Transformer).

The tests of all models (`model_cases.CASES`) check logits, generation, saving and back-ends.
"""

from types import SimpleNamespace

import pytest
import torch
from model_cases import SIZES, build, new_vanilla, pair
from model_checks import check_refused

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.models.branched_attention import BranchedAttention, SimplexWeights, nearest_on_simplex
from hf_deepwide.models.training_callback import TrainingStep

BIG = {
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "vocab_size": 37000,
}


def simplex_weights(model):
    return [module.simplex_weight for module in model.modules() if isinstance(module, SimplexWeights)]


def count(**fields):
    with torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))
        return model.num_parameters(), sum(weight.numel() for weight in simplex_weights(model))


def test_the_nearest_point_of_the_simplex_has_no_nearer_one():
    generator = torch.Generator().manual_seed(0)
    others = torch.rand(2000, 5, generator=generator, dtype=torch.float64)
    others = torch.cat([others / others.sum(1, keepdim=True), torch.eye(5, dtype=torch.float64)])
    for spread in (0.05, 0.3, 2.0):
        x = 0.2 + spread * torch.randn(5, generator=generator, dtype=torch.float64)
        nearest = nearest_on_simplex(x)
        assert nearest.min() >= 0
        torch.testing.assert_close(nearest.sum().item(), 1.0)
        # the angle to every other point is at least 90 degrees
        assert ((others - nearest) @ (x - nearest)).max() <= 1e-12
    torch.testing.assert_close(nearest_on_simplex(torch.tensor([0.5, 2.0, -1.0])), torch.tensor([0.0, 1.0, 0.0]))


def test_new_weights_are_drawn_on_the_simplex_and_do_not_decay():
    model = new_vanilla(layer_form="weighted")
    weights = simplex_weights(model)
    assert [len(weight) for weight in weights] == 2 * 2 * [2] + 3 * 2 * [4]
    for weight in weights:
        assert weight.min() > 0
        torch.testing.assert_close(weight.sum().item(), 1.0)
    assert len({round(weight[0].item(), 5) for weight in weights}) == len(weights)
    assert "simplex_weight" in model.no_weight_decay


def test_each_step_of_training_begins_on_the_simplex():
    """Moving the weights to the simplex changes no logits."""
    model = build("vanilla-weighted")
    with torch.no_grad():
        before = model(**pair()).logits
        callback = TrainingStep()
        callback.on_train_begin(None, None, None, model=model)
        callback.on_step_begin(None, SimpleNamespace(global_step=3), None)
        after = model(**pair()).logits
    for weight in simplex_weights(model):
        assert weight.min() >= 0
        torch.testing.assert_close(weight.sum().item(), 1.0)
    torch.testing.assert_close(after, before)
    assert model.model.decoder.training_step == 3


def test_a_weight_of_zero_can_grow_again():
    weights = SimplexWeights(3)
    with torch.no_grad():
        weights.simplex_weight.copy_(torch.tensor([0.4, 0.6, 0.0]))
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    (weights() * torch.tensor([1.0, 1.0, -1.0])).sum().backward()
    optimizer.step()
    weights.project()
    torch.testing.assert_close(weights.simplex_weight.detach(), torch.tensor([0.4, 0.6, 0.2]) - 0.2 / 3)


def test_multiplying_the_matrices_first_changes_nothing():
    attention = build("vanilla-weighted").double().model.decoder.layers[0].encoder_attn
    heads = torch.randn(4, 6, 4, dtype=torch.float64)
    gradients = []
    for many in (True, False):
        attention.zero_grad()
        output = attention.activated(heads, many)
        output.square().sum().backward()
        gradients.append([output, *(p.grad for n, p in attention.named_parameters() if p.grad is not None)])
    assert len(gradients[0]) == 5  # the output, and the gradients of kappa, W_O, W1, b1
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_layer_has_the_parameters_of_a_transformers_layer_and_a_bias_for_each_branch():
    """(M - 4) D + 2 M more: M biases b2 instead of one, kappa and alpha, minus a bias of W_O and a norm."""
    assert count(**SIZES, layer_form="weighted")[0] - count(**SIZES)[0] == (
        2 * ((2 - 4) * 16 + 2 * 2) + 3 * ((4 - 4) * 16 + 2 * 4)
    )
    big, of_branches = count(**BIG, layer_form="weighted")
    assert big - count(**BIG)[0] == 12 * (12 * 1024 + 32)
    assert of_branches == 2 * 12 * 16
    assert big == pytest.approx(213e6, rel=0.01), "the paper's model has 213 M weights"


def test_eight_heads_in_twelve_layers_have_the_papers_192_weights():
    assert count(layer_form="weighted")[1] == 192


def test_logs_how_uneven_the_branches_are():
    model = build("vanilla-weighted")
    with torch.no_grad():
        for weight in simplex_weights(model.model.decoder):
            weight.copy_(torch.tensor([1.0, 3.0, -5.0, 0.0]))
        for weight in simplex_weights(model.model.encoder):
            weight.copy_(torch.tensor([0.25, 0.75]))
    logs = {f"largest_{name}/{stack}": 1.0 for name in ("kappa", "alpha") for stack in ("decoder",)}
    logs |= {"largest_kappa/encoder": 0.75, "largest_alpha/encoder": 0.75}
    assert model.training_logs() == pytest.approx(logs)
    assert build("vanilla").training_logs() == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_form": "branched"}, ["`layer_form`", "transformer, weighted", "'branched'"]),
        ({"encoder_ffn_dim": 25}, ["`encoder_ffn_dim`", "multiple", "`encoder_attention_heads`", "2", "25"]),
        ({"decoder_ffn_dim": 18}, ["`decoder_ffn_dim`", "multiple", "`decoder_attention_heads`", "4", "18"]),
        ({"ffn_drop_branch": 0.2}, ["weighted", "`ffn_drop_branch=None`"]),
        ({"drop_branch": 0.2}, ["`drop_branch=0`", "'weighted'"]),
        ({"residual": "rezero"}, ["`residual='add'`", "`layer_form='transformer'`"]),
        ({"attention_branches": 2}, ["`attention_branches=1`"]),
        ({"max_relative_position": 2}, ["`max_relative_position=None`"]),
    ],
)
def test_names_what_does_not_fit(fields, words):
    check_refused(VanillaTransformerConfig, {**SIZES, "layer_form": "weighted", **fields}, words)


def test_reports_attention_weights_of_every_head():
    model = build("vanilla-weighted", attn_implementation="eager")
    with torch.no_grad():
        outputs = model(**pair((4,), (3,)), output_attentions=True)
    assert [weights.shape for weights in outputs.encoder_attentions] == 2 * [(1, 2, 4, 4)]
    assert [weights.shape for weights in outputs.decoder_attentions] == 3 * [(1, 4, 3, 3)]
    assert [weights.shape for weights in outputs.cross_attentions] == 3 * [(1, 4, 3, 4)]
    branched = [module for module in model.modules() if isinstance(module, BranchedAttention)]
    assert len(branched) == 2 + 3
