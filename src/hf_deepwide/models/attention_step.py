"""Attention of one new token in each row, with the keys and values of all tokens before it.

The equations are those of `attention.py`. Here they serve decoding alone: nothing is dropped, no token is hidden from
a later one, and weights stay as they are. So q, k and v are one product, 1/sqrt(H) is in W_q, and 1/N is in the output
projection.

Shapes: R rows, that is sentences times beams, B sentences, S source length, t tokens so far, D model width, heads of
all branches, H head width.
"""

from typing import Any

import torch
from torch import nn

from .matrix_product import MatrixProduct

BLOCK = 16  # tokens that a cache grows by, at least


class SelfAttentionStep:
    """Self-attention of a new token; owns the keys and values, `[R, heads, t, H]` in a block with room for more."""

    def __init__(self, attention: nn.Module, dtype: torch.dtype | None) -> None:
        """Take the weights of a `MultiBranchAttention`."""
        self.head_dim = attention.head_dim
        self.project = joint_product(attention, ["q_proj", "k_proj", "v_proj"], dtype)
        self.merge = output_product(attention, dtype)
        self.length = 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor, *unused: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """`[R, 1, D]` to `[R, 1, D]`, and no attention weights. A new token sees all tokens of its row."""
        rows, heads = len(hidden_states), -1
        query, key, value = self.project(hidden_states).view(rows, 3, heads, self.head_dim).unbind(1)
        self.append(key, value)
        keys = self.keys.flatten(0, 1)[:, : self.length]
        values = self.values.flatten(0, 1)[:, : self.length]
        context = attend(query.reshape(-1, 1, self.head_dim), keys, values)
        return self.merge(context.view(rows, 1, -1)), None

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the key and the value of the new token, `[R, heads, H]`."""
        if self.keys is None or self.length == self.keys.shape[2]:
            room = key.new_empty(*key.shape[:2], max(BLOCK, self.length // 4), self.head_dim)
            self.keys = room if self.keys is None else torch.cat([self.keys, room], dim=2)
            self.values = room.clone() if self.values is None else torch.cat([self.values, room], dim=2)
        self.keys.select(2, self.length).copy_(key)
        self.values.select(2, self.length).copy_(value)
        self.length += 1

    def states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens so far, `[R, heads, t, H]`."""
        return self.keys[:, :, : self.length].contiguous(), self.values[:, :, : self.length].contiguous()

    def reorder(self, rows: torch.Tensor) -> None:
        """Let row i go on from row `rows[i]`."""
        if self.keys is not None:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class CrossAttentionStep:
    """Attention of a new token to the source; owns the source's keys and values, once for all beams of a sentence."""

    def __init__(self, attention: nn.Module, dtype: torch.dtype | None) -> None:
        """Take the weights of a `MultiBranchAttention`."""
        self.head_dim = attention.head_dim
        self.project = joint_product(attention, ["q_proj"], dtype)
        self.project_source = attention.k_proj, attention.v_proj  # used once, for all tokens of the source
        self.merge = output_product(attention, dtype)
        self.keys: torch.Tensor | None = None  # [B, heads, S, H]
        self.values: torch.Tensor | None = None

    def __call__(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None, memory: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """`[R, 1, D]` to `[R, 1, D]`, and no attention weights.

        To its source, the beams of a sentence are what several tokens of a sentence are.

        Args:
            hidden_states: the new tokens; the rows of a sentence stand together.
            mask: additive, `[B, 1, 1, S]`, or None.
            memory: the source `[B, S, D]`, read in the first call alone.
            kwargs: not used.
        """
        if self.keys is None:
            projected = (project(memory).unflatten(-1, (-1, self.head_dim)) for project in self.project_source)
            self.keys, self.values = (states.transpose(1, 2).contiguous() for states in projected)
        rows, (sentences, heads) = len(hidden_states), self.keys.shape[:2]
        query = self.project(hidden_states).view(sentences, -1, heads, self.head_dim).transpose(1, 2)
        query = query.reshape(sentences * heads, -1, self.head_dim)  # [B * heads, beams, H]
        if mask is not None:
            mask = mask.expand(-1, heads, -1, -1).flatten(0, 1)
        context = attend(query, self.keys.flatten(0, 1), self.values.flatten(0, 1), mask)
        context = context.view(sentences, heads, -1, self.head_dim).transpose(1, 2)
        return self.merge(context.reshape(rows, 1, -1)), None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(Q K^T + mask) V, with queries that are scaled already.

    For few queries two products are faster on a processor than PyTorch's own attention. Elsewhere its own attention is
    one operation.

    Args:
        query: `[sentences * heads, T, H]`; key, value: `[sentences * heads, S, H]`.
        mask: additive, `[sentences * heads, 1, S]`, or None.
    """
    if query.device.type != "cpu":
        states = query[None], key[None], value[None]  # fast kernels want sentences before heads
        bias = None if mask is None else mask[None]
        return nn.functional.scaled_dot_product_attention(*states, attn_mask=bias, scale=1.0)[0]
    transposed = key.transpose(1, 2)
    scores = torch.bmm(query, transposed) if mask is None else torch.baddbmm(mask, query, transposed)
    if scores.dtype in (torch.float32, torch.float64):
        return torch.bmm(scores.softmax(-1), value)
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(value.dtype), value)


def joint_product(attention: nn.Module, names: list[str], dtype: torch.dtype | None) -> MatrixProduct:
    """Several projections of one input as one product; queries are scaled."""
    weights, biases = [], []
    for name in names:
        projection, scale = getattr(attention, name), attention.scaling if name == "q_proj" else 1
        weights.append(projection.weight * scale)
        if projection.bias is not None:
            biases.append(projection.bias * scale)
    return MatrixProduct(torch.cat(weights), torch.cat(biases) if biases else None, dtype)


def output_product(attention: nn.Module, dtype: torch.dtype | None) -> MatrixProduct:
    """The output projections of all branches, merged."""
    projection, scale = attention.out_proj, attention.merge_scale
    bias = None if projection.bias is None else projection.summed_bias() * scale
    return MatrixProduct(projection.weight * scale, bias, dtype)
