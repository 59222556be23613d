"""Parameter counts of the Multi-Path paper's tables 2 and 3, in millions, beside a closed form.

The paper prints whole millions, some of them truncated (193.969 as 193) and one rounded up (61.569 as 62); the three
decimals are ours, for the vocabularies that explain the printed figures.
"""

from typing import NamedTuple

import pytest
from test_models_parameter_counts import count

from hf_deepwide import MultiPathConfig, MultiPathForConditionalGeneration

PLAIN = {"path_norm": False, "learnable_path_weights": False, "more_features": False}
OURS = {"more_features": False}
MORE = {}


class Row(NamedTuple):
    """One model: encoder depth x paths, variant, printed and exact millions."""

    depth: int
    paths: int
    variant: dict
    printed: int
    exact: float


TABLE_2 = [  # En-De, one joint vocabulary of 34,040, all embeddings shared
    Row(6, 1, PLAIN, 62, 61.569),
    Row(12, 1, PLAIN, 80, 80.483),
    Row(6, 2, PLAIN, 80, 80.471),
    Row(6, 2, OURS, 80, 80.496),
    Row(24, 1, PLAIN, 118, 118.312),
    Row(12, 2, PLAIN, 118, 118.287),
    Row(12, 2, OURS, 118, 118.337),
    Row(6, 4, PLAIN, 118, 118.275),
    Row(6, 4, OURS, 118, 118.324),
    Row(6, 4, MORE, 118, 118.373),
    Row(36, 1, PLAIN, 156, 156.141),
    Row(12, 3, PLAIN, 156, 156.091),
    Row(12, 3, OURS, 156, 156.165),
    Row(12, 3, MORE, 156, 156.239),
    Row(6, 6, PLAIN, 156, 156.079),
    Row(6, 6, OURS, 156, 156.153),
    Row(6, 6, MORE, 156, 156.227),
    Row(48, 1, PLAIN, 193, 193.969),
    Row(24, 2, PLAIN, 193, 193.920),
    Row(24, 2, OURS, 193, 194.018),
    Row(12, 4, PLAIN, 193, 193.895),
    Row(12, 4, OURS, 193, 193.994),
    Row(12, 4, MORE, 193, 194.092),
    Row(6, 8, PLAIN, 193, 193.883),
    Row(6, 8, OURS, 193, 193.982),
    Row(6, 8, MORE, 193, 194.080),
]
TABLE_3 = [  # En-Fr and Fr-En: source, target and output matrices of 43,550 rows, none shared
    Row(6, 1, PLAIN, 111, 111.033),
    Row(24, 1, PLAIN, 168, 167.776),
    Row(12, 2, PLAIN, 168, 167.752),
    Row(12, 2, OURS, 168, 167.801),
    Row(6, 4, MORE, 168, 167.838),
]
UNTIED = {"vocab_size": 43550, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}


def closed_form(row, matrices):
    """Encoder layers hold `paths` attentions and FFNs, decoder layers two attentions and one FFN; d 512, h 2048."""
    d, h, n = 512, 2048, row.paths
    attention, feed_forward, norm = 4 * d * d + 4 * d, 2 * d * h + h + d, 2 * d
    features = n * (2 if row.variant.get("more_features", True) and n >= 3 else 1)
    joint = features * norm * row.variant.get("path_norm", True)
    joint += (features + 1) * row.variant.get("learnable_path_weights", True)
    encoder = n * (attention + feed_forward) + 2 * norm + 2 * joint
    decoder = 2 * attention + feed_forward + 3 * norm
    return matrices + row.depth * encoder + 6 * decoder + 2 * norm


@pytest.mark.parametrize(
    ("row", "fields", "matrices"),
    [(row, {"vocab_size": 34040}, 34040 * 512) for row in TABLE_2]
    + [(row, UNTIED, 3 * 43550 * 512) for row in TABLE_3],
)
def test_a_model_has_the_number_of_parameters_of_its_row(row, fields, matrices):
    config = MultiPathConfig(encoder_layers=row.depth, encoder_paths=row.paths, **row.variant, **fields)
    parameters = count(MultiPathForConditionalGeneration, config)
    assert parameters == closed_form(row, matrices)
    assert round(parameters / 1e6, 3) == row.exact
    assert parameters / 1e6 == pytest.approx(row.printed, rel=7.1e-3)  # whole millions, rounded or truncated
