"""Parameter counts of the latent-depth paper: its rows against a closed form, and its masked language models."""

import pytest
from parameter_counts import rows_of

ROWS = rows_of("Li et al. 2020")
TRANSLATION = [row for row in ROWS if row.task == "translation"]


def closed_form(config):
    """Two embedding tables, layers and final norms, and a logit for each latent layer and posterior, or DLCL."""
    d, h = config.d_model, config.encoder_ffn_dim
    attention, feed_forward, norm = 4 * d * d + 4 * d, 2 * d * h + h + d, 2 * d
    norm = norm if getattr(config, "layer_norms", True) else 0
    depths = config.encoder_layers, config.decoder_layers
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    total = 2 * config.vocab_size * d + depths[0] * encoder + depths[1] * decoder + 2 * norm
    if config.model_type == "latent_depth":
        latent = config.latent_encoder, config.latent_decoder
        total += config.num_posteriors * sum(
            depth for depth, is_latent in zip(depths, latent, strict=True) if is_latent
        )
    elif config.layer_aggregation == "dlcl":  # weights of all earlier outputs, and a norm for each layer
        total += sum(layers * norm + (layers + 1) ** 2 for layers in depths)
    return total


@pytest.mark.parametrize("row", TRANSLATION, ids=lambda row: row.label)
def test_translation_models_have_as_many_parameters_as_their_closed_form(row):
    assert row.parameters == closed_form(row.model_config)


def test_the_step_of_table_1_shows_the_width():
    """12 more layers in each stack cost 63.09 million: so D is 512 and F is 1024, not the base model's 2048."""
    sizes = {row.name: row.parameters for row in TRANSLATION if row.table == "1"}
    assert (sizes["LL-Both 48/48"] - sizes["LL-Both 36/36"]) / 1e6 == pytest.approx(63.09, abs=0.005)


@pytest.mark.parametrize("row", [row for row in ROWS if row.task == "masked-lm"], ids=lambda row: row.label)
def test_masked_language_models_have_as_many_parameters_as_the_specification_counts(row):
    """D 768, F 3072, 40,000 tied rows, 514 learned positions, RoBERTa's head."""
    exact = {24: 201.857, 48: 371.966, 96: 712.184}[row.model_config.encoder_layers]
    assert round(row.parameters / 1e6, 3) == exact
