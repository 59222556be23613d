"""Token and position embeddings of one stack."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .configuration_base import DeepWideConfig
from .dropout import Dropout

SHORTER = "it is a translation that has become too long: lower `max_new_tokens` or `max_length`"


def embed(
    embed_tokens: nn.Embedding,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    ids_name: str,
    embeds_name: str,
) -> torch.Tensor:
    """Return the token embeddings `[batch, time, D]` of ids, or the embeddings passed in their place.

    Raises:
        ValueError: neither ids nor embeddings are given, or both are.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"exactly one of `{ids_name}` and `{embeds_name}` must be given")
    return embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds


def position_ids(
    mask: torch.Tensor | None, length: int, past_length: Any, device: torch.device, is_causal: bool = False
) -> torch.Tensor:
    """Return positions counted from 0 at the first real token, `[1 or batch, length]`; padding does not count.

    Args:
        mask: `[batch, past + length]`, 1 for real tokens, or None if there is no padding. In a decoder it can also be
            the causal mask `[batch, 1, length, keys]`, which `generate` makes from that mask for a static cache.
        length: the number of tokens to embed now.
        past_length: the number of tokens already in the cache (an int, or a tensor with a static cache).
        device: the device for the positions if there is no mask.
        is_causal: whether the mask is of a decoder; a causal mask shows the number of tokens before each position.
    """
    if mask is not None and mask.dim() == 4 and is_causal:
        seen = mask if mask.dtype == torch.bool else mask == 0
        return (seen[:, 0].sum(-1) - 1).clamp(min=0)
    if mask is not None and mask.dim() == 2 and mask.shape[1] >= length:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + past_length)[None]


def check_length(length: int, longest: int, advice: str = "truncate or split the text") -> None:
    """Refuse a sequence with more tokens than the model has positions.

    Raises:
        ValueError: the sequence is too long; `advice` ends the message.
    """
    if length > longest:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the model takes: "
            f"`max_position_embeddings` is {longest}; {advice}"
        )


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids, half sines, half cosines, in a table that is rebuilt and never saved.

    `"sinusoidal"` is the formula of fairseq and tensor2tensor: frequencies 10000^(-k / (D/2 - 1)), positions counted
    from 2 (fairseq's padding index + 1). `"marian"` is the formula of Vaswani et al., section 3.5, with the features
    reordered: frequencies 10000^(-2k / D), positions counted from 0.
    """

    table: torch.Tensor

    def __init__(self, length: int, dim: int, kind: str) -> None:
        super().__init__()
        self.length, self.dim, self.kind = length, dim, kind
        self.register_buffer("table", self.build(), persistent=False)

    def initialise(self, config: DeepWideConfig) -> None:
        """Build the table, because no checkpoint contains it."""
        init.copy_(self.table, self.build())

    def build(self) -> torch.Tensor:
        """Compute the table `[length, D]` in float64."""
        half = self.dim // 2
        k = torch.arange(half, dtype=torch.float64)
        if self.kind == "marian":
            offset, exponent = 0, 2 * k / self.dim
        else:
            offset, exponent = 2, k / max(half - 1, 1)
        angles = torch.arange(offset, offset + self.length)[:, None] * 10000.0**-exponent
        return torch.cat([angles.sin(), angles.cos()], dim=1).float()

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Look up `[1 or batch, time]` positions: `[1 or batch, time, D]`."""
        return self.table[positions]


class Embeddings(nn.Module):
    """The sum of token and position embeddings: dropout([LayerNorm](sqrt(D) * token + position))."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.max_length = config.max_position_embeddings
        if config.position_embedding_type == "learned":
            self.positions = nn.Embedding(self.max_length, config.d_model)
        else:
            self.positions = SinusoidalPositions(self.max_length, config.d_model, config.position_embedding_type)
        self.layer_norm = nn.LayerNorm(config.d_model) if config.layernorm_embedding else None
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        token_embeddings: torch.Tensor,
        mask: torch.Tensor | None = None,
        past_length: Any = 0,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Scale token embeddings `[batch, time, D]` and add their positions.

        Raises:
            ValueError: the sequence is longer than `max_position_embeddings`. This is not checked if `past_length` is
                a tensor.
        """
        length = token_embeddings.shape[1]
        if isinstance(past_length, int):
            check_length(past_length + length, self.max_length, *([SHORTER] if past_length else []))
        positions = position_ids(mask, length, past_length, token_embeddings.device, is_causal)
        hidden = token_embeddings * self.scale + self.positions(positions).to(token_embeddings.dtype)
        if self.layer_norm is not None:
            hidden = self.layer_norm(hidden)
        return self.dropout(hidden)
