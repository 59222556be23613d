"""Stacks of width 3 whose sub-layers are fixed matrices, for results that were computed outside the package.

The first encoder layer has the sub-layers F1 and F2, the second F3 and F4. Each decoder layer has F1, F2 (attention to
the source) and F3. F_k(x) = W_k x. LayerNorms keep their initial scale 1 and shift 0.
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
    """A sub-layer that computes W x. In place of an attention, it returns None for the attention weights."""

    def __init__(self, rows: list[list[float]], *, is_attention: bool) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(rows, dtype=torch.float64))
        self.is_attention = is_attention

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        product = x @ self.weight.T
        return (product, None) if self.is_attention else product


def hand_made(**fields: Any) -> VanillaTransformerModel:
    """A model in float64, with two encoder and two decoder layers whose sub-layers are the matrices W."""
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
    """Return the output of the encoder's layers for `INPUT`, before the final norm."""
    with torch.no_grad():
        return model.encoder.run_layers(position(), None).flatten().tolist()


def decode(model: VanillaTransformerModel) -> list[float]:
    """Return the output of the first decoder layer for `INPUT`."""
    with torch.no_grad():
        return model.decoder.layers[0](position(), None, position()).flatten().tolist()
