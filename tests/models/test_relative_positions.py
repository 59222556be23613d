"""Relative positions: parameter counts, clipped distances and refusals. Equations: `test_equations.py`."""

import pytest
import torch
from model_cases import build, pair

from hf_deepwide import (
    DepthwiseLSTMConfig,
    DepthwiseLSTMForConditionalGeneration,
    MATConfig,
    MATForConditionalGeneration,
    VanillaTransformerConfig,
)

SIZES = {"vocab_size": 31, "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 4}


@pytest.mark.parametrize("branches", [1, 3])
def test_parameters(branches):
    """2k + 1 vectors for each branch of each encoder layer, k + 1 in the decoder, as wide as a head."""
    fields = {**SIZES, "encoder_layers": 2, "decoder_layers": 3, "attention_branches": branches}
    counts = [
        MATForConditionalGeneration(MATConfig(**fields, max_relative_position=k)).num_parameters() for k in (None, 5)
    ]
    assert counts[1] - counts[0] == branches * (2 * (2 * 5 + 1) * 8 + 3 * (5 + 1) * 4)


def test_the_table_of_the_papers_big_model():
    """The parameters that relative positions add to a model of 338.75 million, depth 12 and 6.

    It is "+ settings of Li et al." in table 6 of the depth-wise LSTM's paper.
    """
    sizes = {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 6}
    heads = {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
    with torch.device("meta"):
        counts = [
            DepthwiseLSTMForConditionalGeneration(
                DepthwiseLSTMConfig(**sizes, **heads, max_relative_position=k)
            ).num_parameters()
            for k in (None, 16)
        ]
    assert counts[1] - counts[0] == 64 * (12 * 33 + 6 * 17)


def test_only_distances_up_to_k_are_told_apart():
    """With equal tokens and no other positions a query's scores depend on clipped distances alone."""
    model = build("vanilla-relative", attn_implementation="eager")
    attention = model.model.encoder.layers[0].self_attn
    x = torch.randn(1, 1, 16).expand(1, 9, 16)
    with torch.no_grad():
        _, weights = attention(x, output_attentions=True)
    row = weights[0, 0, 4]  # k is 2: keys 0 to 2 are 2 or more positions before the query, keys 6 to 8 after it
    torch.testing.assert_close(row[:2], row[2].expand(2))
    torch.testing.assert_close(row[7:], row[6].expand(2))
    assert len(set(row.tolist())) == 5


def test_refuses_attention_without_scores():
    model = build("vanilla-relative")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="accepted: eager, sdpa"):
        model(**pair())
    with pytest.raises(ValueError, match="max_relative_position"):
        VanillaTransformerConfig(max_relative_position=0)
