"""Merged attention: the two attentions of a decoder layer as one (Zhang, Titov and Sennrich 2019, arXiv 1908.11365).

Merged attention has no scores for target positions: it adds the mean of the values of all target positions so far.
It uses the value projection and the output projection of the attention to the source:

    MAtt(y)_t = W_O [ heads of attention(y_t, memory) + (1/t) sum_{s<=t} W_V y_s ]

This is a simplified average attention network: it has neither the gate nor the feed-forward network of the original
(Zhang, Xiong and Su 2018). The authors' code (zero, `transformer_fuse`) computes the same, and keeps a running sum
during decoding. Here the mean is computed as attention with queries of zero. So all masks, caches and back-ends work.

Shapes: B batch, T target length, S source length, D model width, H head width.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import MultiBranchAttention, eager_attention, self_attention_cache
from .branches import project
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .feed_forward import MultiBranchFeedForward
from .layers import DecoderLayer, ResidualLayer


class MeanOfValues(nn.Module):
    """The mean of the values at all positions that a position may attend to, in each of `heads` heads."""

    is_causal = True

    def __init__(self, config: VanillaTransformerConfig, heads: int, layer_idx: int) -> None:
        super().__init__()
        self.config, self.heads, self.layer_idx = config, heads, layer_idx

    def forward(
        self, value: torch.Tensor, mask: Any, past_key_values: Cache | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the means `[B, T, N * heads, H]` for the values `[B, N * heads, T, H]` of the new positions.

        N is the number of branches. If the back-end returns weights, also return the weights of one branch,
        `[B, heads, T, S]`: all branches have equal weights.
        """
        query = torch.zeros_like(value)
        if past_key_values is not None:
            cache = self_attention_cache(past_key_values)
            _, value = cache.update(value, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        # with a query of 0, all scores are 0 for any finite keys
        means, weights = attention(self, query, value, value, mask, dropout=0.0, scaling=1.0, **kwargs)
        if weights is not None and weights.shape[1] > self.heads:
            weights = weights[:, : self.heads]
            means = means + weights[:0].sum()  # weights are only reported; this 0 keeps them in the graph
        return means, weights


class MergedAttention(MultiBranchAttention):
    """Attention to the source plus the mean of the target's values, in each head. Drop-branch drops both together."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int) -> None:
        super().__init__(config, num_heads, is_cross=True, layer_idx=layer_idx)
        self.mean = MeanOfValues(config, num_heads, layer_idx)

    def attend(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        encoder_hidden_states: torch.Tensor | None,
        past_key_values: Cache | None,
        kept: list[int] | None,
        causal_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the means to the result of the parent's method. Without a source, return the means alone."""
        value = project(self.v_proj, hidden_states, self.branches, kept)
        context, _ = self.mean(self._heads(value), causal_mask, past_key_values, **kwargs)
        if encoder_hidden_states is None:
            return context, None
        source_context, weights = super().attend(
            hidden_states, attention_mask, encoder_hidden_states, past_key_values, kept, **kwargs
        )
        return source_context + context, weights


class MergedAttentionDecoderLayer(DecoderLayer):
    """Merged attention, then feed-forward."""

    joints = ("encoder_attn", "feed_forward")

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        ResidualLayer.__init__(self, config)
        self.encoder_attn = MergedAttention(config, config.decoder_attention_heads, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = MultiBranchFeedForward(config, config.decoder_ffn_dim)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: Any = None,
        gate: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform `[B, T, D]` to `[B, T, D]`, as the parent's method does."""
        kwargs |= {"past_key_values": past_key_values, "causal_mask": attention_mask}
        attended = self.attend_to_source(hidden_states, encoder_attention_mask, encoder_hidden_states, gate, **kwargs)
        return self.last_residual(hidden_states, attended, self.final_layer_norm, self.feed_forward, gate)
