"""Parameter counts of depth-wise LSTMs against a closed form, and two sizes in the paper that remain unexplained.

All other sizes in the paper are in benchmarks/paper_tables/depthwise_lstm.yaml. test_paper_tables.py compares them.
"""

import pytest
from paper_rows import parameters_of

from hf_deepwide import DepthwiseLSTMConfig

VOCABULARY = 35627
BIG = {
    "d_model": 1024,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
}
ONE_SET = {"share_gates": "global"}
ATTENTIONS, NETWORK, GATES = (
    3 * (4 * 512**2 + 2 * 512),
    2 * 512 * 2048 + 2 * 2048 + 1024 * 512,
    3 * (2 * 512**2 + 1024),
)
RELATIVE = {"max_relative_position": 16}  # as in the settings of Li et al. (2022)
EMBEDDINGS = VOCABULARY * 512 + VOCABULARY


def lstm(encoder_layers, decoder_layers, fields):
    config = DepthwiseLSTMConfig(
        vocab_size=VOCABULARY, encoder_layers=encoder_layers, decoder_layers=decoder_layers, **fields
    )
    return parameters_of(config)


@pytest.mark.parametrize(
    ("fields", "networks", "gates"),
    [
        ({}, 12, 2),
        (ONE_SET, 12, 1),
        ({"share_gates": "none"}, 12, 12),
        ({"share_hidden": "stack"}, 2, 2),
        ({"share_hidden": "global"}, 1, 2),
        ({"share_gates": "global", "share_hidden": "global"}, 1, 1),
        ({"cell": "rnn"}, 12, 0),
        ({"decoder_merge": "two_lstms", "share_gates": "global"}, 18, 2),
        ({"decoder_merge": "two_lstms"}, 18, 3),
        ({"decoder_merge": "two_lstms", "share_gates": "none", "share_hidden": "stack"}, 3, 18),
    ],
)
def test_six_layers_have_so_many_networks_and_sets_of_gates(fields, networks, gates):
    """The closed form counts each attention with its norm, and each shared network or set of gates once."""
    expected = EMBEDDINGS + 6 * ATTENTIONS + networks * NETWORK + gates * GATES
    assert lstm(6, 6, fields) == expected


def test_the_settings_of_another_paper_add_its_relative_positions():
    """Table 6, Big of 12 + 6 layers."""
    assert lstm(12, 6, BIG | RELATIVE) / 1e6 == pytest.approx(338.75, abs=0.01)


def test_two_rows_are_not_explained():
    """The paper prints 100.18 M for two LSTMs: this model plus six feed-forward sub-layers, which it does not have.

    Table 6 prints 288.41 M for Big of 12 + 6 layers with Eq. 5 and relative positions. Nearest is the model with Eq. 5
    in the decoder alone. It has 0.03 M fewer.
    """
    two = lstm(6, 6, ONE_SET | {"decoder_merge": "two_lstms"})
    assert two / 1e6 == pytest.approx(87.58, abs=0.01)
    feed_forward = 2 * 512 * 2048 + 2048 + 1024  # without the output's bias, as in the vanilla rows, and its norm
    assert (two + 6 * feed_forward) / 1e6 == pytest.approx(100.18, abs=0.01)
    everywhere = lstm(12, 6, BIG | RELATIVE | {"lstm_hidden": "single"})
    assert everywhere / 1e6 == pytest.approx(187.64, abs=0.01)
    decoder_alone = lstm(12, 6, BIG | RELATIVE | {"decoder_lstm_hidden": "single"})
    assert decoder_alone / 1e6 == pytest.approx(288.38, abs=0.01)
