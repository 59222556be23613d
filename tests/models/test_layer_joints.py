"""DenseFormer and the Runge-Kutta encoder: numbers computed without this package, and how training starts.

Logits, generation, saving and back-ends are tested together with all other models (`model_cases.CASES`).
"""

import copy

import pytest
import torch
from hand_made_layers import encode, hand_made, position
from model_cases import SIZES, build, leaves, new_vanilla, pair, sentences
from model_checks import check_checkpointing, check_equations, check_learning
from naive_transformer import logits as naive_logits
from transformers import MarianConfig, MarianMTModel

from hf_deepwide import (
    MATForConditionalGeneration,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.errors import UserError
from hf_deepwide.models.runge_kutta import RungeKuttaEncoderLayer, SolverGate
from hf_deepwide.warm_start import logit_difference, preserves_function

CASES = ["vanilla-denseformer", "vanilla-denseformer-sparse", "vanilla-rk2", "vanilla-rk2-prenorm"]
PRE = {"normalize_before": True}


# The equations


def test_rk2_without_dlcl_computes_its_equations():
    model = build("vanilla-rk2", attn_implementation="sdpa", layer_aggregation=None).double().train()
    batch = pair((4, 3), (3, 2))
    weights, got = leaves(model), model(**batch).logits
    expected = [naive_logits(weights, model.config, *each) for each in sentences(batch)]
    check_equations(model, got, weights, expected)


def test_denseformer_gives_the_numbers_found_elsewhere():
    model = hand_made(layer_aggregation="denseformer", **PRE)
    weights = model.encoder.combination.combination_weights
    weights.data[:] = torch.tensor([[7, 7, 7], [0.1, 0.9, 7], [0.2, -0.3, 1.1]])  # 7: never used
    inputs, outputs = [], []
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda _, args, output: inputs.append(args[0]))
        layer.register_forward_hook(lambda _, args, output: outputs.append(output))
    assert encode(model) == pytest.approx([0.839835, 1.580578, -2.362074], abs=1e-6)
    assert torch.equal(inputs[0], position()), "no average stands before the first layer"
    assert outputs[0].flatten().tolist() == pytest.approx([1.355855, 1.946168, -0.720957], abs=1e-6)
    assert inputs[1].flatten().tolist() == pytest.approx([1.320269, 1.951551, -0.698862], abs=1e-6)
    assert outputs[1].flatten().tolist() == pytest.approx([0.951447, 1.604026, -2.253056], abs=1e-6)


def test_rk2_gives_the_numbers_found_elsewhere():
    model = hand_made(encoder_solver="rk2", **PRE)
    model.encoder.solver.solver_weight.data[:] = torch.tensor([0.3, -0.1, 0.2, -0.2, 0.4, 0.1])
    model.encoder.solver.solver_bias.data[:] = 0.05
    seen = []
    model.encoder.solver.register_forward_hook(lambda _, args, gate: seen.append((*args, gate)))
    assert encode(model) == pytest.approx([0.998291, 1.578055, -2.150210], abs=1e-6)
    assert seen[0][0].flatten().tolist() == pytest.approx([0.355855, -0.053832, -0.220957], abs=1e-6)
    assert seen[0][1].flatten().tolist() == pytest.approx([0.364728, -0.012608, -0.035328], abs=1e-6)
    assert [gate.item() for *_, gate in seen] == pytest.approx([0.509106, 0.359953], abs=1e-6)


@pytest.mark.parametrize(
    ("dilation", "period", "used"),
    [
        (1, 1, {1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4]}),
        (2, 1, {1: [1], 2: [0, 2], 3: [1, 3], 4: [0, 2, 4]}),
        (3, 1, {1: [1], 2: [2], 3: [0, 3], 4: [1, 4]}),
        (1, 3, {3: [0, 1, 2, 3]}),
        (2, 2, {2: [0, 2], 4: [0, 2, 4]}),
    ],
)
def test_dilation_and_period_choose_weights(dilation, period, used):
    """Weights that the paper's rule leaves out have no gradient, and change nothing."""
    fields = {"aggregation_dilation": dilation, "aggregation_period": period, "encoder_layers": 4, "decoder_layers": 4}
    model = new_vanilla(layer_aggregation="denseformer", **fields).train()
    model(**pair()).loss.backward()
    for stack in (model.model.encoder, model.model.decoder):
        gradient = stack.combination.combination_weights.grad
        found = {row: gradient[row].nonzero().flatten().tolist() for row in range(5)}
        assert {row: columns for row, columns in found.items() if columns} == used
    assert sum(map(len, used.values())) == sum(i // dilation + 1 for i in range(1, 5) if i % period == 0)


# Start and size


@pytest.mark.parametrize("fields", [{}, PRE], ids=["post-norm", "pre-norm"])
def test_denseformer_starts_as_the_plain_stack_bit_for_bit(fields):
    plain, model = new_vanilla(**fields), new_vanilla(layer_aggregation="denseformer", **fields)
    assert torch.equal(model(**pair()).logits, plain(**pair()).logits)
    for stack, layers in (("encoder", 2), ("decoder", 3)):
        weights = model.get_submodule(f"model.{stack}").combination.combination_weights
        assert torch.equal(weights, torch.eye(layers + 1))
    assert model.num_parameters() - plain.num_parameters() == 3 * 3 + 4 * 4


def test_rk2_starts_with_one_gate_for_the_encoder():
    plain, model = new_vanilla(d_model=64, **PRE), new_vanilla(d_model=64, encoder_solver="rk2", **PRE)
    (solver,) = (module for module in model.modules() if isinstance(module, SolverGate))
    assert model.num_parameters() - plain.num_parameters() == 2 * 64 + 1
    bound = (6 / (2 * 64 + 1)) ** 0.5
    assert solver.solver_weight.abs().max().item() == pytest.approx(bound, rel=0.1)
    assert solver.solver_weight.abs().max().item() <= bound
    assert solver.solver_bias.item() == 0


@pytest.mark.parametrize("bias", [30.0, -30.0])
def test_a_shut_gate_leaves_one_evaluation(bias):
    """g = 1: y = x + F(x), the plain layer. g = 0: y = x + F(x + F(x))."""
    plain = build("vanilla", **PRE)
    model = build("vanilla", encoder_solver="rk2", **PRE)
    model.load_state_dict(plain.state_dict(), strict=False)
    model.model.encoder.solver.solver_bias.data.fill_(bias)
    x, mask = torch.randn(2, 3, 16), None
    with torch.no_grad():
        for ours, layer in zip(model.model.encoder.layers, plain.model.encoder.layers, strict=True):
            once = layer(x, mask)
            expected = once if bias > 0 else x + layer(once, mask) - once
            torch.testing.assert_close(ours(x, mask, solver=model.model.encoder.solver), expected)


@pytest.mark.parametrize("case", CASES)
def test_every_new_parameter_has_a_gradient_and_training_lowers_the_loss(case):
    model = build(case)
    model.apply(model._init_weights)

    def check_gradients():
        gradients = [p.grad for name, p in model.named_parameters() if "k_proj" not in name]
        assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)

    check_learning(model, check_gradients)


# Checkpointing, LayerDrop, autocast and logs


@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("case", CASES)
def test_checkpointed_layers_have_the_same_gradients(case, options):
    check_checkpointing(lambda: build(case, dropout=0.3, layer_drop=0.3), options)


def test_a_pass_that_skips_all_layers_gives_the_gate_a_gradient(monkeypatch):
    """DistributedDataParallel waits for this gradient."""
    model = build("vanilla-rk2", layer_drop=0.5).train()
    monkeypatch.setattr(torch, "rand", lambda n, device: torch.zeros(n))
    model(**pair()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.model.encoder.solver.solver_weight.grad.abs().max() == 0


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_layer_that_is_evaluated_twice_is_recorded_once(return_dict):
    """Its attention weights are those of the second evaluation."""
    model = build("vanilla-rk2", attn_implementation="eager")
    layer, kept = model.model.encoder.layers[0], []
    layer.self_attn.register_forward_hook(lambda _, args, output: kept.append(output[1]))
    ids = pair()["input_ids"]
    options = {"output_attentions": True, "output_hidden_states": True}
    output = model.model.encoder(ids, **options, return_dict=return_dict)
    _, states, attentions = (*output,) if not return_dict else (None, output.hidden_states, output.attentions)
    assert (len(states), len(attentions), len(kept)) == (3, 2, 2)
    assert torch.equal(attentions[0], kept[1])
    assert not torch.equal(attentions[0], kept[0])


def test_the_gate_is_computed_in_float32_under_autocast():
    gate = SolverGate(16)
    gate.solver_weight.data.normal_()
    x, y = torch.randn(2, 2, 3, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = gate(x, y)
    both = torch.cat([x, y], -1).double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double()[..., 0], (both @ gate.solver_weight.double()).sigmoid(), atol=1e-6, rtol=0)


def test_what_was_learned_is_logged():
    model = build("vanilla-denseformer")
    weights = model.model.decoder.combination.combination_weights
    logs = model.training_logs()
    assert logs["newest_weight/decoder.2"] == pytest.approx(weights[2, 2].item())
    assert logs["earlier_weights/decoder.2"] == pytest.approx(weights[2, :2].abs().sum().item())
    assert len(logs) == 2 * (2 + 3)
    sparse = build("vanilla-denseformer-sparse").training_logs()
    assert (sparse["newest_weight/decoder.1"], sparse["earlier_weights/decoder.1"]) == (1, 0), "no average is taken"
    model = build("vanilla-rk2", layer_aggregation=None)
    assert not model.training_logs()
    gates = []
    model.model.encoder.solver.register_forward_hook(lambda _, args, gate: gates.append(gate.mean().item()))
    model.train()(**pair())
    assert model.training_logs() == {f"solver_gate/{i}": pytest.approx(g) for i, g in enumerate(gates, start=1)}
    assert isinstance(copy.deepcopy(model).model.encoder.layers[0], RungeKuttaEncoderLayer)


# Warm start


def marian():
    sizes = {name: value for name, value in SIZES.items() if name not in ("drop_branch", "dropout")}
    config = MarianConfig(
        **sizes, dropout=0.0, pad_token_id=40, decoder_start_token_id=40, eos_token_id=0, forced_eos_token_id=0
    )
    torch.manual_seed(0)
    return MarianMTModel(config).eval()


@pytest.mark.parametrize("fields", [{}, {"aggregation_dilation": 2}, {"attention_branches": 4}], ids=str)
@pytest.mark.parametrize("base", ["vanilla", "vanilla-prenorm", "mat-2-prenorm", "marian"])
def test_denseformer_starts_as_any_base(base, fields, caplog):
    trained = marian() if base == "marian" else build(base)
    model = VanillaTransformerForConditionalGeneration.from_base(trained, layer_aggregation="denseformer", **fields)
    assert model.config.layer_aggregation == "denseformer"
    assert preserves_function(model.config)
    assert "does not compute" not in caplog.text
    difference, largest = logit_difference(trained, model)
    assert difference < 1e-5 * max(1, largest)
    assert model.model.encoder.combination is not None


def test_rk2_starts_from_a_base_with_a_warning(caplog):
    base = build("vanilla-prenorm")
    model = VanillaTransformerForConditionalGeneration.from_base(base, encoder_solver="rk2")
    assert "does not compute the function" in caplog.text
    assert "evaluates each encoder layer twice" in caplog.text
    assert not preserves_function(model.config)
    copied, weight = (each.model.encoder.layers[0].feed_forward.fc1.weight for each in (model, base))
    assert torch.equal(copied, weight)


@pytest.mark.parametrize("case", CASES)
def test_refuses_a_joined_model_as_base(case):
    """A plain Transformer with the weights of this model would compute another function."""
    with pytest.raises(UserError, match=r"cannot start from .*`(layer_aggregation|encoder_solver)` is "):
        MATForConditionalGeneration.from_base(build(case))
