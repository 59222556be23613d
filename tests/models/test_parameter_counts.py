"""Parameter counts of MAT: the rows of its paper against a closed form, and what each option adds.

The printed numbers of all papers are in benchmarks/paper_tables. test_paper_tables.py compares them.
"""

import pytest
from paper_rows import parameters_of
from parameter_counts import rows_of

from hf_deepwide import MATConfig, VanillaTransformerConfig

SMALL = {
    "vocab_size": 10152,  # the paper's Table 1
    "d_model": 256,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
}


def closed_form(config):
    """Embeddings, and layers of attentions, feed-forward networks and norms, with the widths d and h."""
    d, h = config.d_model, config.encoder_ffn_dim
    attention = 4 * d * d + 4 * d
    feed_forward = config.ffn_branches * (2 * d * h + h + d)
    encoder = config.attention_branches * attention + feed_forward + 2 * 2 * d
    decoder = 2 * config.attention_branches * attention + feed_forward + 3 * 2 * d
    embeddings = config.vocab_size + (not config.share_encoder_decoder_embeddings) * config.decoder_vocab_size
    layers = config.encoder_layers * encoder + config.decoder_layers * decoder
    return embeddings * d + layers + config.normalize_before * 2 * 2 * d


def test_mat_has_as_many_parameters_as_its_closed_form():
    rows = [row for row in rows_of("Fan et al. 2020") if row.model_config.model_type == "mat"]  # no quoted systems
    assert len(rows) > 50
    for row in rows:
        assert row.parameters == closed_form(row.model_config), row.label


def test_each_further_branch_of_the_small_model_adds_4_737_million():
    """18 attentions of 4 d^2 + 4 d: the step of table 1, which shows that every branch has its own W_O."""
    one, two, three = (parameters_of(MATConfig(**SMALL, attention_branches=n)) for n in (1, 2, 3))
    assert two - one == three - two == 18 * (4 * 256**2 + 4 * 256) == 4_737_024


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
def test_vanilla_is_mat_with_one_branch(pre_norm):
    config = VanillaTransformerConfig(**SMALL, normalize_before=pre_norm)
    assert parameters_of(config) == closed_form(config)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"tie_word_embeddings": False}, 100 * 16),
        ({"share_encoder_decoder_embeddings": False}, 100 * 16),
        ({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 70}, 70 * 16),
        ({"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}, 2 * 100 * 16),
        ({"lm_head_bias": True}, 100),
        ({"position_embedding_type": "learned", "max_position_embeddings": 20}, 2 * 20 * 16),
        ({"layernorm_embedding": True}, 2 * 2 * 16),
        ({"attention_bias": False, "attention_branches": 3}, -3 * 4 * 16 * 18),
        ({"position_embedding_type": "marian"}, 0),
        ({"drop_unit": "head"}, 0),
        ({"branch_merge": "double_mean"}, 0),
    ],
    ids=str,
)
def test_what_each_option_adds(changes, extra):
    sizes = {"vocab_size": 100, "d_model": 16, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    branches = {"attention_branches": changes.get("attention_branches", 1)}
    before = parameters_of(MATConfig(**sizes, **branches))
    assert parameters_of(MATConfig(**{**sizes, **branches, **changes})) - before == extra
