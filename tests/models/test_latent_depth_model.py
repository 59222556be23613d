"""Latent depth in training: the equations for a given z, and every term of the loss with its scale."""

import copy

import pytest
import torch
from model_cases import CASES, SIZES, build, config_of, leaves, pair, scramble, sentences, source
from model_checks import WAYS, check_checkpointing, check_equations
from naive_transformer import logits as naive_logits
from torch.nn import functional as F

from hf_deepwide import (
    LatentDepthConfig,
    LatentDepthForConditionalGeneration,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.families import FAMILIES
from hf_deepwide.models import modeling_latent_depth
from hf_deepwide.warm_start import preserves_function

LL = {
    "both": {},
    "decoder": {"latent_encoder": False},
    "encoder": {"latent_decoder": False},
    "hard": {"soft_selection_steps": 0},
    "multi-branch": {"attention_branches": 2, "ffn_branches": 2},
    "without norms": {"layer_norms": False},
}
EVERY = pytest.mark.parametrize("fields", LL.values(), ids=LL)


def latent(seed=0, **fields):
    """A scrambled model in float64, in training mode at step 1."""
    torch.manual_seed(seed)
    model = scramble(LatentDepthForConditionalGeneration(LatentDepthConfig(**{**SIZES, **fields})), seed)
    model.training_step = 1
    return model.double().train()


def naive_z(model, weights, posterior):
    """z of Eq. 5 as `{layer}.z`, from the noise that the model drew, soft or straight-through."""
    config, z = model.config, {}
    for stack, selection in model.layer_selections.items():
        a = weights[f"{stack}.layer_selection.layer_logits"][posterior]
        for layer in range(len(a)):
            s = a[layer] + selection.noise[posterior, layer].item()
            soft = torch.exp(s / config.gumbel_temperature)
            soft = soft / (1 + soft)
            z[f"{stack}.layers.{layer}.z"] = soft
            if config.soft_selection_steps is not None:
                z[f"{stack}.layers.{layer}.z"] = (s > 0).double() + soft - soft.detach()
    return z


@EVERY
def test_training_is_the_equations_and_so_are_its_gradients(fields):
    """Eq. 2 and 5 for three sentences of two posteriors, with every parameter's gradient, also of the layer logits."""
    model = latent(**fields, encoder_layers=2, decoder_layers=2, num_posteriors=2)
    batch, posteriors = pair((4, 3, 2), (3, 2, 3)), torch.tensor([1, 0, 1])
    got = model(**batch, posteriors=posteriors).logits
    weights = leaves(model)
    expected = [
        naive_logits(weights | naive_z(model, weights, posterior), model.config, *each)
        for each, posterior in zip(sentences(batch), posteriors, strict=True)
    ]
    check_equations(model, got, weights, expected)


@EVERY
def test_selecting_everything_is_the_vanilla_transformer(fields):
    """With z = 1 everywhere, in evaluation, and in training (hard samples, certain posterior)."""
    model = latent(**{**fields, "soft_selection_steps": 0})
    for selection in model.layer_selections.values():
        torch.nn.init.constant_(selection.layer_logits, 60.0)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer_selection" not in name}
    joined = {"normalize_before": True}
    if not model.config.layer_norms:  # x + a F(x) with a = 1
        joined = {"residual": "rezero"}
        layers = {name.partition(".self_attn")[0] for name in state if ".self_attn" in name}
        state |= {f"{layer}.residual_weight": torch.ones(1) for layer in layers}
    config = FAMILIES["vanilla_transformer"].config(
        **SIZES, **joined, **{k: v for k, v in fields.items() if "branches" in k}
    )
    vanilla = VanillaTransformerForConditionalGeneration(config).double()
    vanilla.load_state_dict(state)
    batch = pair()
    expected = vanilla(**batch).logits
    torch.testing.assert_close(model(**batch).logits, expected, atol=1e-12, rtol=1e-12)
    assert torch.equal(model.eval()(**batch).logits, vanilla.eval()(**batch).logits)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_skipping_a_layer_is_the_model_without_it(stack, training):
    """With z = 0 for one layer."""
    layers = {"encoder": SIZES["encoder_layers"], "decoder": SIZES["decoder_layers"]}
    for removed in range(layers[stack]):
        model = latent(soft_selection_steps=0)
        shallower = latent(soft_selection_steps=0, **{f"{stack}_layers": layers[stack] - 1})
        state = {}
        for selection in model.layer_selections.values():
            torch.nn.init.constant_(selection.layer_logits, 60.0)
        with torch.no_grad():
            model.layer_selections[stack].layer_logits[0, removed] = -60.0
        for name, tensor in model.state_dict().items():
            parts = name.split(".")
            if parts[1:3] == [stack, "layers"]:
                if int(parts[3]) == removed:
                    continue
                parts[3] = str(int(parts[3]) - (int(parts[3]) > removed))
            keep = [layer for layer in range(layers[stack]) if layer != removed]
            own = name.endswith("layer_logits") and f".{stack}." in name
            state[".".join(parts)] = tensor[:, keep] if own else tensor
        shallower.load_state_dict(state)
        for one in (model, shallower):
            one.train(training)
        with torch.no_grad():
            batch = pair()
            torch.testing.assert_close(model(**batch).logits, shallower(**batch).logits, atol=1e-12, rtol=1e-12)


# The loss


def naive_terms(model):
    """KL and target depth of Eq. 8 from the logits and the noise, stack by stack, layer by layer, in plain numbers."""
    config, kl, depth = model.config, 0.0, 0.0
    for stack, selection in model.layer_selections.items():
        a, noise = selection.layer_logits.tolist(), selection.noise.tolist()
        used = 0.0
        for a_row, noise_row in zip(a, noise, strict=True):
            q = [torch.tensor(x).double().sigmoid().item() for x in a_row]
            kl += sum(p * torch.tensor(2 * p).log() + (1 - p) * torch.tensor(2 * (1 - p)).log() for p in q) / len(a)
            used += sum(
                torch.sigmoid(torch.tensor((x + e) / 5.0)).item() for x, e in zip(a_row, noise_row, strict=True)
            )
        target = getattr(config, f"target_{stack}_layers")
        if target is not None:
            depth += (used / len(a) - target) ** 2
    return float(kl), depth


def test_the_loss_is_reconstruction_and_annealed_penalties():
    """Eq. 8 in numbers at several steps; the penalties are 0 at step 0, and absent in evaluation."""
    model = latent(
        num_posteriors=2,
        kl_weight=0.3,
        kl_anneal_steps=10,
        target_encoder_layers=1.5,
        target_decoder_layers=2,
        target_depth_weight=0.7,
        target_depth_anneal_steps=20,
    )
    batch, posteriors = pair(), torch.tensor([0, 1, 1])
    for step, beta, weight in ((0, 0.0, 0.0), (4, 0.12, 0.0), (10, 0.3, 0.0), (20, 0.3, 0.35), (99, 0.3, 0.7)):
        model.training_step = step
        assert model.training_step == step
        output = model(**batch, posteriors=posteriors)
        cross_entropy = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
        kl, depth = naive_terms(model)
        expected = cross_entropy.item() + beta * kl + weight * depth
        assert output.loss.item() == pytest.approx(expected, rel=1e-6)
        logs = model.training_logs()
        assert logs["reconstruction"] == pytest.approx(cross_entropy.item(), rel=1e-5)
        assert logs["kl"] == pytest.approx(kl, rel=1e-5)
        assert logs["target_depth"] == pytest.approx(depth, rel=1e-5)
        chosen = [selection.chosen.sum().item() / 2 for selection in model.layer_selections.values()]
        assert [logs["effective_depth_encoder"], logs["effective_depth_decoder"]] == chosen
        assert logs.keys() == {
            "reconstruction",
            "kl",
            "target_depth",
            "effective_depth_encoder",
            "effective_depth_decoder",
        }
    model.eval()
    output = model(**batch, posteriors=posteriors)
    assert output.loss.item() == pytest.approx(
        F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten()).item(), rel=1e-9
    )


def test_the_sharing_term_is_added_with_its_weight():
    fields = {"target_decoder_layers": 2, "kl_anneal_steps": 0, "target_depth_anneal_steps": 0, "kl_weight": 0.0}
    losses = []
    for weight in (0.0, 0.5):
        model = latent(**fields, latent_encoder=False, layer_sharing_weight=weight)
        torch.manual_seed(0)
        losses.append(model(**pair()).loss.item())
    u = model.layer_selections["decoder"].sample()[0].tolist()
    assert losses[1] - losses[0] == pytest.approx(-0.5 * sum(x * torch.tensor(x).double().log().item() for x in u))


@pytest.mark.parametrize("lean", [False, True], ids=["logits", "no logits"])
def test_parts_of_a_step_add_up_to_it(lean, monkeypatch):
    """Three micro-batches, or processes, of unequal size with the same z: loss, gradients, and what is logged."""
    monkeypatch.setattr(
        "hf_deepwide.models.layer_selection.gumbel_difference",
        lambda a: torch.full_like(a, 0.4) * torch.arange(a.numel()).view(a.shape).cos(),
    )
    model = latent(target_decoder_layers=2, kl_weight=0.5, kl_anneal_steps=0, target_depth_anneal_steps=0)
    batch = pair()
    items = (batch["labels"] != -100).sum()
    options = {"label_smoothing": 0.1, "skip_logits": lean, "num_items_in_batch": items}

    def gradients():
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    whole = model(**batch, **options).loss
    whole.backward()
    expected, logs = gradients(), model.training_logs()
    parts = 0.0
    for row in range(3):
        part = model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}, **options).loss
        part.backward()
        parts += part.item()
    assert parts == pytest.approx(whole.item(), abs=1e-10)
    torch.testing.assert_close(gradients(), expected, atol=1e-10, rtol=1e-10)
    assert model.training_logs() == pytest.approx(logs, rel=1e-6)
    mean = model(**batch, **{**options, "num_items_in_batch": None}).loss
    assert mean.item() == pytest.approx(whole.item(), abs=1e-10)
    assert items.item() != 3


def test_logs_are_means_since_the_last_call():
    model = latent(kl_anneal_steps=0)
    first, second = pair(seed=1), pair((4, 2), (2, 5), seed=9)
    losses, tokens = [], []
    for batch in (first, second):
        logits = model(**batch).logits
        losses.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item())
        tokens.append((batch["labels"] != -100).sum().item())
    assert model.training_logs()["reconstruction"] == pytest.approx(sum(losses) / sum(tokens), rel=1e-5)
    assert model.training_logs().keys() == {"effective_depth_encoder", "effective_depth_decoder"}
    assert model.training_logs() == {
        f"effective_depth_{stack}": selection.chosen.sum().item()
        for stack, selection in model.layer_selections.items()
    }


def test_training_in_half_precision_keeps_the_penalties():
    """z and KL are computed in float32, under autocast and with bfloat16 weights."""
    model = latent(kl_anneal_steps=0, kl_weight=1.0).float()
    torch.manual_seed(0)
    plain = model(**pair()).loss
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**pair()).loss
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    model.bfloat16()
    torch.manual_seed(0)
    loss = model(**pair()).loss
    loss.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=0.05)
    assert model.layer_selections["decoder"].sample().dtype == torch.float32


def test_gradient_checkpointing_changes_nothing():
    check_checkpointing(lambda: latent(dropout=0.1), *WAYS)


def test_posteriors_have_no_weight_decay_and_start_where_the_config_says(tmp_path):
    model = LatentDepthForConditionalGeneration(
        LatentDepthConfig(**SIZES, layer_selection_init=-0.5, num_posteriors=2)
    )
    assert model.no_weight_decay == ("layer_logits",)
    for stack, selection in model.layer_selections.items():
        assert selection.layer_logits.shape == (2, SIZES[f"{stack}_layers"])
        assert (selection.layer_logits == -0.5).all()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer_logits" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    again = LatentDepthForConditionalGeneration.from_pretrained(tmp_path)
    assert (again.layer_selections["decoder"].layer_logits == -0.5).all()


def test_a_model_in_training_can_be_copied_and_saved(tmp_path):
    model = latent(target_decoder_layers=2)
    model(**pair()).loss.backward()
    copied = copy.deepcopy(model)
    assert copied.training_logs() == model.training_logs()
    model.save_pretrained(tmp_path)
    assert "training_step" not in (tmp_path / "config.json").read_text()
    again = LatentDepthForConditionalGeneration.from_pretrained(tmp_path)
    assert again.training_step == 0


def test_a_vanilla_base_is_started_from(caplog):
    base = build("vanilla-prenorm")
    fields = {"latent_encoder": False, "target_decoder_layers": 2, "soft_selection_steps": 0}
    model = LatentDepthForConditionalGeneration.from_base(base, **fields)
    assert preserves_function(model.config)
    with torch.no_grad():
        torch.testing.assert_close(model(**pair()).logits, base(**pair()).logits, atol=1e-6, rtol=1e-6)
    assert (model.layer_selections["decoder"].probabilities > 0.8).all()
    assert list(model.layer_selections) == ["decoder"]
    assert not caplog.records
    other = LatentDepthForConditionalGeneration.from_base(base, layer_selection_init=0.25)
    assert not preserves_function(other.config)
    assert "does not compute the function" in caplog.text
    assert (other.layer_selections["encoder"].layer_logits == 0.25).all()
    with pytest.raises(ValueError, match="`normalize_before` must be True"):
        LatentDepthForConditionalGeneration.from_base(build("vanilla"))


def test_a_model_without_norms_has_none_and_says_what_a_base_loses(caplog):
    base = build("vanilla-prenorm", layernorm_embedding=False)
    model = LatentDepthForConditionalGeneration.from_base(base, layer_norms=False, inference_selection="hard")
    assert not [name for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)]
    assert "`layer_norms=False` leaves out the norms" in caplog.text
    norms = {name for name, _ in base.named_parameters() if "layer_norm" in name}
    own = {name for name, _ in model.named_parameters() if "layer_logits" not in name}
    assert own == {name for name, _ in base.named_parameters()} - norms
    weight = "model.decoder.layers.2.encoder_attn.k_proj.weight"
    assert torch.equal(model.state_dict()[weight], base.state_dict()[weight])
    with pytest.raises(ValueError, match="layer_norms"):
        config_of("latent-both", layer_norms="none")


def test_the_table_of_models_has_both_kinds_of_selection():
    rows = {name: config_of(name) for name, case in CASES.items() if case.family == "latent_depth"}
    assert {config.inference_selection for config in rows.values()} == {"hard", "soft"}
    model = build("latent-decoder-hard")
    gates = model.model.decoder.layer_selection(None, 3)
    assert gates[0] is False  # so that caches without the first layer are tested
    assert any(gate is True for gate in gates)
    assert torch.isfinite(model(**source(), decoder_input_ids=torch.tensor([[2]] * 3)).logits).all()


def test_a_compiled_model_that_is_not_told_its_step_warns_and_does_not_break(monkeypatch):
    warnings = []
    monkeypatch.setattr(modeling_latent_depth.logger, "warning_once", warnings.append)
    model = LatentDepthForConditionalGeneration(LatentDepthConfig(**SIZES, latent_encoder=False))
    compiled = torch.compile(model.train(), fullgraph=True, backend="eager")
    assert torch.isfinite(compiled(**pair()).loss)
    assert ["`training_step`" in warning for warning in warnings] == [True]
