"""Parameter counts of the latent-depth paper: every row of its tables 1, 2 and 3, and the depths of 4 and 5 (V10).

`exact` is the specification's count of embeddings and layers, in millions. To it come two final norms, one logit for
each latent layer, and what DLCL has. The paper prints whole millions, or tenths below a hundred, sometimes rounded
down.
"""

import functools
from typing import NamedTuple

import pytest
import torch

from hf_deepwide import (
    LatentDepthConfig,
    LatentDepthForConditionalGeneration,
    LatentDepthForMaskedLM,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
)

WMT = {"vocab_size": 34040, "d_model": 512, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
TED = {**WMT, "vocab_size": 31300}  # source and target together 62,600
BIG = {**WMT, "d_model": 1024, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}
WIDE = {**TED, "d_model": 1024, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
LL_D = {"latent_encoder": False}
LL_E = {"latent_decoder": False}


class Row(NamedTuple):
    """A system: encoder and decoder layers, sizes, what is latent (None: static), and its parameters in millions."""

    table: str
    layers: tuple[int, int]
    sizes: dict
    latent: dict | None
    printed: float | None
    exact: float
    more: dict = {}


ROWS = [
    Row("1 Big", (6, 6), BIG, None, 246, 246.071),
    Row("1 DLCL", (36, 36), WMT, None, 224, 224.117, {"layer_aggregation": "dlcl"}),
    Row("1 LL-D", (12, 24), WMT, LL_D, 135, 135.797),  # rounded down
    Row("1 LL-D", (12, 48), WMT, LL_D, 211, 211.503),  # rounded down
    Row("1 LL-Both", (36, 36), WMT, {}, 224, 224.117),
    Row("1 LL-Both", (48, 48), WMT, {}, 287, 287.203),
    Row("1 LL-Both", (64, 64), WMT, {}, 371, 371.319),
    Row("3", (6, 6), TED, None, 63.6, 63.594),
    Row("3 wide", (6, 6), WIDE, None, 190, 190.104),
    Row("3", (12, 12), TED, None, 95.1, 95.138),
    Row("3", (12, 24), TED, None, 133, 132.991),
    Row("3", (24, 24), TED, None, 158, 158.225),
    Row("3 layer drop", (24, 24), TED, None, 158, 158.225, {"layer_drop": 0.1}),
    Row("3 LL-D", (12, 24), TED, LL_D, 133, 132.991),
    Row("3 LL-D", (24, 24), TED, LL_D, 158, 158.225),
    # tables 4 and 5 print no sizes
    Row("4 LL-D", (12, 100), TED, LL_D, None, 372.728),
    Row("5 LL-E", (36, 12), TED, LL_E, None, 145.605),
    Row("5 LL-D", (12, 36), TED, LL_D, None, 170.844),
    Row("5 LL-Both", (24, 24), TED, {}, None, 158.225),
]
# Table 1 prints 224M for the 48/48 DLCL, too, which is what the 36/36 one has.
MISPRINT = Row("1 DLCL", (48, 48), WMT, None, 224, 287.203, {"layer_aggregation": "dlcl"})


SYSTEMS = {f"{row.table} {row.layers[0]}/{row.layers[1]}": row for row in (*ROWS, MISPRINT)}


def count(model_class, config):
    """Parameters of a model that is never filled in; tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())


def model_of(row):
    encoder, decoder = row.layers
    fields = {
        **row.sizes,
        "encoder_layers": encoder,
        "decoder_layers": decoder,
        "share_encoder_decoder_embeddings": False,
        "normalize_before": True,
    }
    if row.latent is None:
        return VanillaTransformerForConditionalGeneration, VanillaTransformerConfig(**fields, **row.more)
    return LatentDepthForConditionalGeneration, LatentDepthConfig(**fields, **row.latent)


@functools.cache
def parameters_of(system):
    return count(*model_of(SYSTEMS[system]))


def closed_form(row):
    """Embeddings and layers; final norms, logits and dense connections."""
    d, h = row.sizes["d_model"], row.sizes["encoder_ffn_dim"]
    attention, feed_forward, norm = 4 * d * d + 4 * d, 2 * d * h + h + d, 2 * d
    encoder, decoder = row.layers
    layers = encoder * (attention + feed_forward + 2 * norm) + decoder * (2 * attention + feed_forward + 3 * norm)
    plain = 2 * row.sizes["vocab_size"] * d + layers
    more = 2 * norm
    if row.latent is not None:
        more += encoder * row.latent.get("latent_encoder", True) + decoder * row.latent.get("latent_decoder", True)
    if "layer_aggregation" in row.more:  # weights of all earlier outputs, and a norm on each layer's
        more += sum(layers * norm + (layers + 1) ** 2 for layers in row.layers)
    return plain, more


@pytest.mark.parametrize("system", SYSTEMS)
def test_translation_models_have_the_printed_number_of_parameters(system):
    row = SYSTEMS[system]
    parameters = parameters_of(system)
    plain, more = closed_form(row)
    assert parameters == plain + more
    assert plain / 1e6 == pytest.approx(row.exact, abs=0.0011)
    if row.printed is not None and row != MISPRINT:
        decimals = len(str(row.printed).partition(".")[2])
        assert row.printed in (round(parameters / 1e6, decimals), parameters // 10**6)


def test_the_step_of_table_1_shows_the_width():
    """12 + 12 layers more cost 63.09 million: D 512 and F 1024, and not the base model's 2048."""
    step = parameters_of("1 LL-Both 48/48") - parameters_of("1 LL-Both 36/36")
    assert step / 1e6 == pytest.approx(63.09, abs=0.005)


@pytest.mark.parametrize("latent", [True, False], ids=["LL", "static"])
@pytest.mark.parametrize(("layers", "printed", "exact"), [(24, 202, 201.857), (48, 372, 371.966), (96, 712, 712.184)])
def test_masked_language_models_have_the_printed_number_of_parameters(layers, printed, exact, latent):
    """Table 2: D 768, F 3072, 40,000 tied rows, 514 learned positions, RoBERTa's head."""
    config = LatentDepthConfig(
        vocab_size=40000,
        d_model=768,
        encoder_layers=layers,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        max_position_embeddings=514,
        position_embedding_type="learned",
        latent_encoder=latent,
    )
    parameters = count(LatentDepthForMaskedLM, config)
    assert round(parameters / 1e6) == printed
    assert round(parameters / 1e6, 3) == exact
