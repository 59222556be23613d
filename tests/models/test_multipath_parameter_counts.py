"""Parameter counts of the Multi-Path paper's rows against a closed form."""

import pytest
from parameter_counts import rows_of


def closed_form(config):
    """Encoder layers hold `paths` attentions and FFNs, decoder layers two attentions and one FFN; pre-norm."""
    d, h, n = config.d_model, config.encoder_ffn_dim, getattr(config, "encoder_paths", 1)
    attention, feed_forward, norm = 4 * d * d + 4 * d, 2 * d * h + h + d, 2 * d
    joint = 0
    if config.model_type == "multipath_transformer":
        features = n * (2 if config.more_features and n >= 3 else 1)
        joint = features * norm * config.path_norm + (features + 1) * config.learnable_path_weights
    encoder = n * (attention + feed_forward) + 2 * norm + 2 * joint
    decoder = 2 * attention + feed_forward + 3 * norm
    matrices = 3 - config.tie_word_embeddings - config.share_encoder_decoder_embeddings
    return (
        matrices * config.vocab_size * d + config.encoder_layers * encoder + config.decoder_layers * decoder + 2 * norm
    )


@pytest.mark.parametrize("row", rows_of("Lin et al. 2023"), ids=lambda row: row.label)
def test_a_model_has_as_many_parameters_as_its_closed_form(row):
    assert row.parameters == closed_form(row.model_config)
