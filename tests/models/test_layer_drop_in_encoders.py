"""LayerDrop in masked language models and classifiers: training computes the model without the skipped layers."""

import pytest
import torch
from model_cases import SIZES, build, scramble, tokens

from hf_deepwide import (
    LatentDepthConfig,
    LatentDepthForMaskedLM,
    MATRobertaConfig,
    MATRobertaForMaskedLM,
    MATRobertaForSequenceClassification,
)

OFF = {"dropout": 0.0, "attention_dropout": 0.0, "drop_branch": 0.0, "layer_drop": 0.4}
MAT = {
    "vocab_size": 41,
    "d_model": 16,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    **OFF,
}
STATIC = {**SIZES, **OFF, "encoder_layers": 3, "latent_encoder": False}
CASES = [
    (MATRobertaForMaskedLM, MATRobertaConfig, MAT),
    (MATRobertaForSequenceClassification, MATRobertaConfig, MAT),
    (LatentDepthForMaskedLM, LatentDepthConfig, STATIC),
]


def encoder_of(model):
    return model.encoder if hasattr(model, "encoder") else model.model.encoder


@pytest.mark.parametrize(("cls", "config", "fields"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_training_skips_layers(cls, config, fields, monkeypatch):
    model = scramble(cls(config(**fields))).double()
    ids, mask = tokens((7, 4, 5))
    batch = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        whole = model.eval()(**batch).logits
        monkeypatch.setattr(torch, "rand", lambda n, device: torch.tensor([0.9, 0.4, 0.5]))  # the second is skipped
        assert torch.equal(model(**batch).logits, whole)
    skipped = model.train()(**batch).logits
    skipped.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder_of(model).parameters())
    layers = encoder_of(model).layers
    encoder_of(model).layers = torch.nn.ModuleList([layers[0], layers[2]])
    torch.testing.assert_close(model.eval()(**batch).logits, skipped, rtol=0, atol=1e-12)
    assert (skipped - whole).abs().max() > 1e-3


def test_families_without_layer_drop_do_not_skip():
    """A config keeps unknown keys, but they have no effect."""
    model = build("mat-3", layer_drop=0.99).train()
    assert not any(model.model.encoder.draw_skipped(None))


def test_layers_that_choose_themselves_are_not_skipped():
    with pytest.raises(ValueError, match="both do"):
        LatentDepthConfig(layer_drop=0.1)
    with pytest.raises(ValueError, match="layer_drop"):
        MATRobertaConfig(layer_drop=1.5)
