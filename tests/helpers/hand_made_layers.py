"""Stacks of width 3 whose sub-layers are fixed matrices, for numbers that were worked out outside the package.

The two encoder layers hold F1, F2 and F3, F4, each decoder layer F1, F2 (attention to the source) and F3, all of them
F_k(x) = W_k x. LayerNorms are as they start: without an effect of their own.
"""

from typing import Any

import torch
from torch import nn

from hf_deepwide import VanillaTransformerConfig
from hf_deepwide.models.modeling_vanilla_transformer import VanillaTransformerModel

W = (
    [[0.5, -0.2, 0.1], [0, 0.3, -0.4], [0.2, 0.1, -0.1]],
    [[-0.3, 0.4, 0], [0.1, -0.5, 0.2], [0.6, 0, 0.3]],
    [[0.2, 0.2, -0.2], [-0.1, 0.4, 0.3], [0, -0.6, 0.5]],
    [[0.1, 0, 0.7], [-0.4, 0.2, 0.1], [0.3, -0.3, 0.2]],
)
INPUT = (1.0, 2.0, -0.5)


class Matrix(nn.Module):
    """W x in the place of a sub-layer; of an attention, no weights beside it."""

    def __init__(self, rows: list[list[float]], *, is_attention: bool) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(rows, dtype=torch.float64))
        self.is_attention = is_attention

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        product = x @ self.weight.T
        return (product, None) if self.is_attention else product


def hand_made(**fields: Any) -> VanillaTransformerModel:
    """A model in float64 of two encoder and two decoder layers whose sub-layers are W."""
    sizes = {"vocab_size": 5, "d_model": 3, "encoder_ffn_dim": 3, "decoder_ffn_dim": 3, "max_position_embeddings": 4}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "position_embedding_type": "learned"}
    config = VanillaTransformerConfig(**sizes, **heads, **{"encoder_layers": 2, "decoder_layers": 2, **fields})
    model = VanillaTransformerModel(config).double().eval()
    for index, layer in enumerate(model.encoder.layers):
        layer.self_attn = Matrix(W[2 * index], is_attention=True)
        layer.feed_forward = Matrix(W[2 * index + 1], is_attention=False)
    for layer in model.decoder.layers:
        layer.self_attn, layer.encoder_attn = (Matrix(rows, is_attention=True) for rows in W[:2])
        layer.feed_forward = Matrix(W[2], is_attention=False)
    return model


def position(values: Any = INPUT) -> torch.Tensor:
    """One position of one sentence, `[1, 1, 3]`."""
    return torch.tensor([[values]], dtype=torch.float64)


def encode(model: VanillaTransformerModel) -> list[float]:
    """What the encoder's layers make of `INPUT`, before the final norm."""
    with torch.no_grad():
        return model.encoder.run_layers(position(), None).flatten().tolist()


def decode(model: VanillaTransformerModel) -> list[float]:
    """What the first decoder layer makes of `INPUT`."""
    with torch.no_grad():
        return model.decoder.layers[0](position(), None, position()).flatten().tolist()
