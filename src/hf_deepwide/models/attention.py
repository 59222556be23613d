"""Multi-branch attention as one wide attention.

Shapes: B batch, T queries, S keys, D model width, N branches, M heads of one branch, H = D / M head width.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .branches import (
    BranchDrop,
    BranchSum,
    gated_outputs,
    input_projection,
    is_own,
    merge_scale,
    no_branch,
    output_projection,
    project,
    project_together,
    sum_branches,
)
from .relative_positions import RelativeKeys


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(Q K^T / sqrt(H)) V as two matrix products with a float32 softmax (MAT, Eq. 1).

    Args:
        query: `[B, heads, T, H]`; key, value: `[B, heads, S, H]`.
        attention_mask: additive, `[B, 1, T, S]`, or None.

    Returns:
        The context `[B, T, heads, H]` and the attention weights `[B, heads, T, S]`.
    """
    scores = torch.matmul(query * scaling, key.transpose(2, 3)).float()  # cheaper than scaling [T, S]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1).to(value.dtype)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training) if dropout else weights
    return torch.matmul(dropped, value).transpose(1, 2), weights


def cross_attention_name(config: Any) -> str:
    """Return the name of the back-end for cross-attention: the config's, but `sdpa` instead of flash attention.

    For flash attention, Transformers removes padding from the queries with the mask of the keys. That is correct only
    if queries and keys are the same sequence.
    """
    name = config._attn_implementation
    return "sdpa" if "flash" in str(name) else name


def self_attention_cache(cache: Cache) -> Cache:
    """Return the part of a cache that self-attention fills: all of it, unless it also holds the source's keys."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


class MultiBranchAttention(nn.Module):
    """The average of N attentions over the same input: self- or cross-attention (MAT, Eq. 4-6, 9-10).

    The module does not add the residual. With one branch and no drop-branch it is multi-head attention. The N x M
    heads stand side by side on the head axis. So any number of branches costs one projection each for q, k, v and the
    output, one attention call, and one cache slot.
    """

    def __init__(
        self,
        config: Any,
        num_heads: int,
        *,
        branches: int | None = None,
        is_causal: bool = False,
        is_cross: bool = False,
        layer_idx: int | None = None,
    ) -> None:
        """Make the projections; `branches` is N, and None means the config's `attention_branches`.

        Only self-attention has relative positions.
        """
        super().__init__()
        self.config = config
        self.is_causal = is_causal
        self.layer_idx = layer_idx
        self.branches = branches or config.attention_branches
        self.num_heads = num_heads
        self.head_dim = config.d_model // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.drop_branch = config.drop_branch
        self.drop_unit = config.drop_unit
        self.by_sentence = config.drop_granularity == "sentence"
        self.merge_scale = merge_scale(self.branches, config.branch_merge)

        shape = (self.branches, config.d_model, config.d_model)
        self.q_proj = input_projection(*shape, bias=config.attention_bias, fused=3)
        self.k_proj = input_projection(*shape, bias=config.attention_bias, fused=3)
        self.v_proj = input_projection(*shape, bias=config.attention_bias, fused=3)
        self.out_proj = output_projection(*shape, bias=config.attention_bias)
        self.relative_keys = None
        if config.max_relative_position is not None and not is_cross:
            self.relative_keys = RelativeKeys(self.branches, self.head_dim, config.max_relative_position, is_causal)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from `hidden_states` `[B, T, D]` to themselves or to `encoder_hidden_states` `[B, S, D]`.

        Returns:
            The merged output `[B, T, D]`, and the attention weights, or None if the back-end does not return weights.
            The weights are `[B, N * M, T, S]` for all heads. With `output_attentions` they are averaged over the
            branches, `[B, M, T, S]`.
        """
        drop, by_head = BranchDrop(self.merge_scale), self.drop_unit == "head"
        if self.training and self.drop_branch > 0:
            shape = self.branches, 1 if self.drop_unit == "branch" else self.num_heads
            scale = self.merge_scale if by_head else self.merge_scale / (1 - self.drop_branch)
            can_skip = self._can_skip(past_key_values, kwargs)
            drop = BranchDrop.draw(scale, self.drop_branch, shape, self.by_sentence, can_skip, hidden_states)
        if drop.kept == []:
            return no_branch(self, hidden_states, encoder_hidden_states), None

        context, weights = self.attend(
            hidden_states, attention_mask, encoder_hidden_states, past_key_values, drop.kept, **kwargs
        )
        if drop.gates is not None and self.drop_unit == "chunk":
            context = context.reshape(*hidden_states.shape[:-1], -1)
            return self.report(gated_outputs(self.out_proj, context, drop.gates) * drop.scale, weights, kwargs)
        if drop.gates is not None:  # [N, M]: Eq. 9 weighs the heads before the output projection mixes them
            head_gates = drop.gates.expand(*drop.gates.shape[:-1], self.num_heads).flatten(-2)  # [heads] or [B, heads]
            context = context * head_gates[..., None, :, None].to(context.dtype)
        if by_head and self.training and self.drop_branch > 0:
            context = context / (1 - self.drop_branch)  # not the output: its bias belongs to no head
        context = context.reshape(*hidden_states.shape[:-1], -1)
        gates = None if drop.gates is None or by_head else drop.gates[..., 0]
        output = sum_branches(self.out_proj, context, self.branches, drop.kept, gates)
        if drop.scale != 1:
            output = output * drop.scale
        return self.report(output, weights, kwargs)

    def report(
        self, output: torch.Tensor, weights: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the attention weights, which are averaged over the branches if they are requested."""
        if weights is not None and self.branches > 1 and self._wants_weights(kwargs):
            weights = weights.unflatten(1, (-1, self.num_heads)).mean(1)
            output = output + weights[:0].sum()  # the average is only reported; this 0 keeps it in the graph
        return output, weights

    def attend(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        encoder_hidden_states: torch.Tensor | None,
        past_key_values: Cache | None,
        kept: list[int] | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute all steps before the output projection.

        Returns:
            The contexts `[B, T, heads, H]`, and the attention weights `[B, heads, T, S]` or None.

        Raises:
            ValueError: the back-end cannot compute relative positions.
        """
        past = 0
        if self.relative_keys is not None and past_key_values is not None:  # before the new keys are in the cache
            past = past_key_values.get_seq_length(self.layer_idx) + 0  # a copy: a static cache counts in place
        query, key, value = self._project(hidden_states, encoder_hidden_states, past_key_values, kept)
        if self.relative_keys is not None:
            if self.config._attn_implementation not in ("eager", "sdpa"):
                raise ValueError(
                    f"`max_relative_position` needs scores that can be added to, and attention "
                    f"{self.config._attn_implementation!r} has none; accepted: eager, sdpa"
                )
            attention_mask = self.relative_keys(query * self.scaling, key.shape[2], past, attention_mask, kept)
        is_cross = encoder_hidden_states is not None
        name = cross_attention_name(self.config) if is_cross else self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        return attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )

    def has_own_projections(self) -> bool:
        """Return whether all projections are still the modules that this class made (see `is_own`)."""
        inputs = all(is_own(projection, nn.Linear) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return inputs and is_own(self.out_proj, nn.Linear, BranchSum)

    def _can_skip(self, past_key_values: Cache | None, kwargs: dict[str, Any]) -> bool:
        """Return whether dropped branches can be left out of the computation.

        In four cases all branches are computed, and weighed by 0 or 1. Only parts of branches are dropped, a cache
        must hold all branches, attention weights are requested, or an adapter wraps a projection.
        """
        needed = past_key_values is not None or self._wants_weights(kwargs)
        return self.drop_unit == "branch" and not needed and self.has_own_projections()

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Reshape `[B, T, heads * H]` to `[B, heads, T, H]`."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _project(
        self,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None,
        cache: Cache | None,
        kept: list[int] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries `[B, heads, T, H]`, and keys and values `[B, heads, S, H]`.

        They belong to all branches, or only to the branches in `kept`.
        """
        if not self.training or cache is not None or not self.has_own_projections():
            query = self._heads(self.q_proj(hidden_states))
            return query, *self._keys_and_values(hidden_states, memory, cache)
        if memory is None:
            projected = project_together([self.q_proj, self.k_proj, self.v_proj], hidden_states, self.branches, kept)
        else:
            projected = (
                project(self.q_proj, hidden_states, self.branches, kept),
                *project_together([self.k_proj, self.v_proj], memory, self.branches, kept),
            )
        return tuple(map(self._heads, projected))

    def _keys_and_values(
        self, hidden_states: torch.Tensor, memory: torch.Tensor | None, cache: Cache | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values; in self-attention with a cache, the cached ones come first.

        Keys and values of cross-attention are computed once per sentence and then read from the cache.
        """
        is_cross = memory is not None
        if isinstance(cache, EncoderDecoderCache):
            if is_cross and cache.is_updated.get(self.layer_idx):
                layer = cache.cross_attention_cache.layers[self.layer_idx]
                return layer.keys, layer.values
            if is_cross:
                cache.is_updated[self.layer_idx] = True
            cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
        source = memory if is_cross else hidden_states
        key, value = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        return key, value

    def _wants_weights(self, kwargs: dict[str, Any]) -> bool:
        return bool(kwargs.get("output_attentions", self.config.output_attentions))
