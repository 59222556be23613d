"""Relative positions: a score also depends on the distance from query to key (Shaw et al. 2018, arXiv 1803.02155).

    e_ts = q_t (k_s + a_c)^T / sqrt(H),  c = clip(s - t, -k, k)                      (Eq. 4, of keys alone)

Each branch of each layer has its own vectors a, which the heads of the branch share. All positions beyond the distance
k have the same vector as the distance k. A decoder has k + 1 vectors, because no key comes after its query. An encoder
has 2k + 1.

Shapes: B batch, T queries, S keys, N branches, H head width.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init

from .configuration_base import DeepWideConfig


class RelativeKeys(nn.Module):
    """The vectors a of one attention, and the bias that they add to its scores."""

    def __init__(self, branches: int, head_dim: int, most: int, is_causal: bool) -> None:
        """Make the vectors; `most` is k, the largest distance with a vector of its own."""
        super().__init__()
        self.branches, self.most, self.is_causal = branches, most, is_causal
        self.vectors = most + 1 if is_causal else 2 * most + 1
        self.weight = nn.Parameter(torch.empty(branches * self.vectors, head_dim))  # a of each branch, stacked

    def initialise(self, config: DeepWideConfig) -> None:
        """Fill the weights of a new model: Xavier-uniform for each branch separately, or N(0, init_std^2)."""
        if config.init_std is None:
            bound = math.sqrt(6 / (self.vectors + self.weight.shape[1]))
            init.uniform_(self.weight, -bound, bound)
        else:
            init.normal_(self.weight, std=config.init_std)

    def table(self) -> torch.Tensor:
        """Return the vectors, `[N, H, vectors]`. In a decoder they begin at the query's own position and go back."""
        return self.weight.unflatten(0, (self.branches, self.vectors)).transpose(1, 2)

    def forward(
        self,
        query: torch.Tensor,
        keys: int,
        past: int | torch.Tensor,
        mask: torch.Tensor | None,
        kept: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a mask for each head: q_t a_c^T, combined with `mask`.

        Args:
            query: queries scaled by 1/sqrt(H), of all branches or of the branches in `kept`, `[B, heads, T, H]`.
            keys: S, the number of keys.
            past: the position of the first query.
            mask: `[B, 1, T, S]`, additive, or bools that are True where a key is visible, or None.
            kept: the branches that are computed; None: all.

        Returns:
            The additive mask `[B, heads, T, S]`.
        """
        table = self.table() if kept is None else self.table()[kept]
        scores = query.unflatten(1, (len(table), -1)) @ table[:, None].to(query.dtype)  # [B, N, heads, T, vectors]
        device = query.device
        places = torch.arange(query.shape[2], device=device)[:, None] + past
        distances = torch.arange(keys, device=device) - places  # [T, S]
        if self.is_causal:
            index = (-distances).clamp(0, self.most)
        else:
            index = distances.clamp(-self.most, self.most) + self.most
        bias = scores.flatten(1, 2).gather(3, index.expand(*query.shape[:2], -1, -1))
        if mask is None and self.is_causal and query.shape[2] > 1:
            mask = (distances <= 0)[None, None]
        if mask is None:
            return bias
        if mask.dtype == torch.bool:
            return bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        return bias + mask
