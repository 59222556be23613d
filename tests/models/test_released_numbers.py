"""With the same weights, models and latent selection compute what the authors' released code computes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_deepwide import (
    LatentDepthConfig,
    MATConfig,
    MATForConditionalGeneration,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)
from hf_deepwide.models import branches
from hf_deepwide.models.layer_selection import LayerSelection

FOLDER = Path(__file__).parent / "golden"
CASES = json.loads((FOLDER / "released.json").read_text(encoding="utf-8"))
BRANCHING = ("attention_branches", "ffn_branches", "drop_branch", "branch_merge")
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "released.safetensors")


def under(tensors, prefix):
    """The tensors whose names begin with `prefix`, by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("base_pre", "vanilla"),
        ("base_pre", "mat"),
        ("mat_3_1_post", "mat"),
        ("mat_2_2_pre_train", "mat"),
    ],
)
def test_a_model_with_their_weights_computes_what_theirs_does(name, family, golden, monkeypatch):
    case, tensors = CASES["models"][name], under(golden, f"{name}/")
    fields = case["config"] | {"attn_implementation": "sdpa"}  # eager attention casts its scores to float32
    if family == "vanilla":
        fields = {field: value for field, value in fields.items() if field not in BRANCHING}
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**fields))
    else:
        model = MATForConditionalGeneration(MATConfig(**{"attention_branches": 1} | fields))
    model = model.double().train(case["training"])
    weights = under(tensors, "weights/")
    with torch.no_grad():
        assert dict(model.named_parameters()).keys() == weights.keys()
        for key, parameter in model.named_parameters():
            parameter.copy_(weights[key])
    kept = [[branch for branch, is_kept in enumerate(gates) if is_kept] for gates in case["kept_branches"]]
    monkeypatch.setattr(branches, "draw_branches", lambda units, rate: kept.pop(0))

    output = model(
        input_ids=tensors["source"],
        attention_mask=(~tensors["source_padding"]).long(),
        decoder_input_ids=tensors["previous"],
        labels=tensors["target"].masked_fill(tensors["target_padding"], -100),
        label_smoothing=case["label_smoothing"],
        use_cache=False,
    )
    source, target = ~tensors["source_padding"], ~tensors["target_padding"]
    torch.testing.assert_close(output.encoder_last_hidden_state[source], tensors["encoder_out"][source], **EXACT)
    torch.testing.assert_close(output.logits[target], tensors["logits"][target], **EXACT)
    torch.testing.assert_close(output.loss, tensors["loss"], **EXACT)
    assert not kept
    if case["training"]:
        output.loss.backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        torch.testing.assert_close(gradients, under(tensors, "gradients/"), **EXACT)


@pytest.mark.parametrize("name", CASES["selection"])
def test_latent_selection_draws_what_theirs_draws(name, golden):
    case, tensors = CASES["selection"][name], under(golden, "selection/")
    posteriors, layers = tensors["logits"].shape
    config = LatentDepthConfig(
        decoder_layers=layers,
        latent_encoder=False,
        num_posteriors=posteriors,
        gumbel_temperature=case["temperature"],
        soft_selection_steps=0 if case["hard"] else None,
    )
    selection = LayerSelection(config, "decoder").double()
    selection.layer_logits.data.copy_(tensors["logits"])
    selection.noise, selection.training_step = tensors["noise"], 1
    z = selection.sample()
    (z * tensors["cotangent"]).sum().backward()
    torch.testing.assert_close(z.detach(), tensors[f"{name}/z"], **EXACT)
    torch.testing.assert_close(selection.layer_logits.grad, tensors[f"{name}/gradient"], **EXACT)
