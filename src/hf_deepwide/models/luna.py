"""Layers of Luna, linear unified nested attention (Ma et al. 2021, arXiv 2106.01540).

Each attention consists of two. P `[l, D]` is a sequence of fixed length beside the input X, and C is the attended
sequence:

    pack      Y_P = Attn(P, C)             unpack   Y_X = Attn(X, Y_P) W_O
    encoder   X <- LN(X + Y_X),  P <- LN(P + Y_P),  X <- LN(X + FFN(X)),  with C = X
    decoder   the same with C the encoder's states, after causal attention

Each Attn is multi-head attention with its own projections. Packing has no output projection. The first P is learned.
Each layer passes P to the next layer, and the last layer of the encoder passes P to the first layer of the decoder.

Causal attention cannot pack with a softmax, which would see later tokens. Instead, each position t takes means over
j <= t, with a_j = act(P W_pq (x_j W_pk)^T / sqrt(H)) `[l]` in each head, and u_t `[l]`:

    u_t = softmax( (x_t W_q / sqrt(H)) (1/t) sum_j (x_j W_k)^T a_j ),     y_t = u_t (1/t) sum_j a_j^T (x_j W_v)

Causal attention reads P and does not change it; P does not depend on the target. act is log2(1 + 2^x), or elu(x) + 1;
both are 1 at 0. The sums over j are computed as two products with masked `[T, T]` matrices. A running sum would hold
l H numbers for each position and head, which is more than T in a sentence. So all masks and caches work, but the cost
is not linear.

As in the released code (fairseq-apollo), packing has as many heads as unpacking. Pre-norm layers have a separate norm
for P, and causal attention reads P without this norm. The released code differs from this file in four ways:

- If a source has fewer than l tokens, P has as many entries as the source (`--fix-projection-length` turns this off).
- Causal attention counts padding.
- Positions of P are counted from 0. Here they are counted as positions of tokens are.
- There is a norm for the P after the last decoder layer: in this layer or, in pre-norm, in the decoder. Its output is
  never read.

The encoder passes one tensor to the decoder, `[B, S + l, D]`: the states, and after them P. For each decoder layer
the cache holds the keys and values of Y_P and the queries W_pq P, so each sentence is packed only once. The decoder's
fast twin (`decoding`) does not support Luna, so `generate` uses Transformers' caches.

Shapes: B batch, S source length, T target length, D model width, H head width, l length of P.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import eager_attention, self_attention_cache
from .branches import input_projection
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout
from .dynamic_convolution import check_masks
from .embeddings import SinusoidalPositions
from .feed_forward import MultiBranchFeedForward
from .layers import DecoderLayer, EncoderLayer, ResidualLayer


def split_memory(memory: torch.Tensor | None, config: VanillaTransformerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the encoder's output into the states of the source `[B, S, D]` and P `[B, l, D]`.

    Raises:
        ValueError: there is no encoder output, or it is too short.
    """
    length = config.luna_length
    if memory is None or memory.shape[1] <= length:
        found = "nothing" if memory is None else f"{memory.shape[1]} positions"
        raise ValueError(
            f"a decoder with `layer_form='luna'` reads the source and {length} packed positions (`luna_length`) "
            f"behind it, and was given {found}; give `encoder_hidden_states` as the encoder returns them"
        )
    return memory[:, :-length], memory[:, -length:]


class PackedEmbeddings(nn.Module):
    """The P that the first layer reads: dropout([LayerNorm](sqrt(D) E + positions)), E learned.

    The positions are sinusoids. There are none if the positions of tokens are learned.
    """

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        size = config.luna_length, config.d_model
        self.packed_embeddings = nn.Parameter(torch.empty(size))
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        kind = config.position_embedding_type
        self.positions = None if kind == "learned" else SinusoidalPositions(*size, kind)
        self.layer_norm = nn.LayerNorm(config.d_model) if config.layernorm_embedding else None
        self.dropout = Dropout(config.dropout)

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start as embeddings do: N(0, 1/D), or N(0, init_std^2)."""
        init.normal_(self.packed_embeddings, std=config.d_model**-0.5 if config.init_std is None else config.init_std)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return P for each sentence, `[B, l, D]`; the embeddings `[B, S, D]` give only B and the dtype."""
        packed = self.packed_embeddings * self.scale
        if self.positions is not None:
            packed = packed + self.positions(torch.arange(len(packed), device=packed.device)).to(packed.dtype)
        if self.layer_norm is not None:
            packed = self.layer_norm(packed)
        return self.dropout(packed.to(hidden_states.dtype).expand(hidden_states.shape[0], -1, -1))


class LunaLayerNorm(nn.LayerNorm):
    """The final norm of a pre-norm encoder, with a separate norm for P."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.d_model)
        self.config = config
        self.packed_norm = nn.LayerNorm(config.d_model)

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        """Normalise the states and P in `[B, S + l, D]`."""
        states, packed = split_memory(memory, self.config)
        return torch.cat([super().forward(states), self.packed_norm(packed)], dim=1)


class Projections(nn.Module):
    """The projections of one of the two nested attentions. With `luna_tie_kv` the keys are also the values."""

    def __init__(self, config: VanillaTransformerConfig, has_values: bool = True) -> None:
        super().__init__()
        make = functools.partial(input_projection, 1, config.d_model, config.d_model, config.attention_bias, fused=3)
        self.q_proj, self.k_proj = make(), make()
        self.v_proj = make() if has_values and not config.luna_tie_kv else None

    def keys_and_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project `[B, time, D]` to keys and values, both `[B, time, D]`."""
        key = self.k_proj(x)
        return key, key if self.v_proj is None else self.v_proj(x)


class NestedAttention(nn.Module):
    """The base class of Luna's attentions: the projections of packing and unpacking, and the heads."""

    is_causal = False

    def __init__(self, config: VanillaTransformerConfig, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.d_model // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout
        self.pack = Projections(config, has_values=not self.is_causal)
        self.unpack = Projections(config)
        self.out_proj = nn.Linear(config.d_model, config.d_model, config.attention_bias)

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Split `[B, time, D]` into heads, `[B, heads, time, H]`."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def dropped(self, weights: torch.Tensor) -> torch.Tensor:
        """Apply dropout to attention weights."""
        return nn.functional.dropout(weights, self.dropout, self.training) if self.dropout else weights

    def wants_weights(self, kwargs: dict[str, Any]) -> bool:
        """Return whether attention weights are requested, and the back-end (eager) returns them."""
        asked = kwargs.get("output_attentions", self.config.output_attentions)
        return bool(asked) and self.config._attn_implementation == "eager"


class LunaAttention(NestedAttention):
    """Attention that packs its source to the length of P, and reads the packed source. It has no residuals."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return contexts `[B, T, D]`, and weights `[B, heads, T, S]` or None, depending on the back-end.

        Raises:
            ValueError: the back-end is neither eager attention nor sdpa, and has other masks.
        """
        check_masks(self.config)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.dropout if self.training else 0.0
        context, weights = attention(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return context.flatten(2), weights

    def pack_source(
        self, packed: torch.Tensor, source: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Pack C `[B, S, D]` with P `[B, l, D]`: return Y_P `[B, l, D]`, and weights `[B, heads, l, S]` or None."""
        query = self.heads(self.pack.q_proj(packed))
        key, value = map(self.heads, self.pack.keys_and_values(source))
        mask = None if mask is None else mask[:, :, :1]  # padding is the same for every query
        context, weights = self.attend(query, key, value, mask, **kwargs)
        return context, weights if self.wants_weights(kwargs) else None

    def keys_and_values(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of Y_P for unpacking, `[B, heads, l, H]`."""
        key, value = map(self.heads, self.unpack.keys_and_values(context))
        return key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pack_weights: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Unpack: return Y_X `[B, T, D]` for X `[B, T, D]` and the keys and values of Y_P.

        With `pack_weights`, also return the product of the weights of both attentions, `[B, heads, T, S]`.
        """
        context, weights = self.attend(self.heads(self.unpack.q_proj(hidden_states)), key, value, None, **kwargs)
        output = self.out_proj(context)
        if pack_weights is None:
            return output, None
        weights = weights @ pack_weights
        return output + weights[:0].sum(), weights  # weights are only reported; this 0 keeps them in the graph


class CausalLunaAttention(NestedAttention):
    """Luna's causal self-attention of the decoder."""

    is_causal = True

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int) -> None:
        super().__init__(config, num_heads)
        self.layer_idx = layer_idx

    def queries(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the scaled queries of P `[B, l, D]`, `[B, heads, l, H]`."""
        return self.heads(self.pack.q_proj(packed)) * self.scaling

    def activate(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply act, computed in float32 or better."""
        full = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.config.luna_activation == "elu":
            return (nn.functional.elu(full) + 1).to(scores.dtype)
        return nn.functional.softplus(full, beta=math.log(2)).to(scores.dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        queries: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return y `[B, T, D]` for x `[B, T, D]` and P's `queries` `[B, heads, l, H]`.

        If attention weights are requested, also return the weights of the values, `[B, heads, T, S]`, divided by their
        sum.
        """
        query = self.heads(self.unpack.q_proj(hidden_states)) * self.scaling
        key, value = map(self.heads, self.unpack.keys_and_values(hidden_states))
        pack_key = self.heads(self.pack.k_proj(hidden_states))
        if past_key_values is not None:
            cache = self_attention_cache(past_key_values)
            kept = torch.cat([key, pack_key], 1), torch.cat([value, pack_key], 1)  # both need one shape
            keys, values = cache.update(*kept, self.layer_idx)
            (key, pack_key), value = keys.chunk(2, 1), values.chunk(2, 1)[0]
        share = shares(attention_mask, query, key)
        packing = self.dropped(self.activate(pack_key @ queries.transpose(2, 3)))  # a, [B, heads, S, l]
        scores = (share * (query @ key.transpose(2, 3))) @ packing
        full = torch.promote_types(scores.dtype, torch.float32)
        unpacking = self.dropped(scores.softmax(-1, dtype=full).to(value.dtype))  # u, [B, heads, T, l]
        weights = share * (unpacking @ packing.transpose(2, 3))
        output = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        if not self.wants_weights(kwargs):
            return output, None
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        return output + weights[:0].sum(), weights  # weights are only reported; this 0 keeps them in the graph


def shares(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return 1/t for each of the t positions that a query sees, and 0 for other positions, `[1 or B, 1, T, S]`.

    Args:
        mask: as Transformers makes it for eager attention or sdpa. None: causal; a single query sees all positions.
        query: `[B, heads, T, H]`.
        key: `[B, heads, S, H]`.
    """
    time, length = query.shape[2], key.shape[2]
    full = torch.promote_types(query.dtype, torch.float32)
    if mask is None:
        visible = query.new_ones(1, 1, time, length, dtype=full)
        visible = visible if time == 1 else visible.tril()  # as sdpa; slots of a static cache may follow
    else:
        visible = (mask if mask.dtype == torch.bool else mask == 0).to(full)[..., :length]
    return (visible / visible.sum(-1, keepdim=True).clamp(min=1)).to(query.dtype)


class SourceInput(NamedTuple):
    """The inputs of a decoder layer that depend only on the source.

    Attributes:
        queries: queries of P in causal attention, `[B, heads, l, H]`.
        key, value: key and value of Y_P, `[B, heads, l, H]`.
        weights: attention weights of packing, if requested, `[B, heads, l, S]`.
    """

    queries: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor | None = None


class LunaLayer:
    """A mixin that joins an attention's output to its input, for X and for P."""

    normalize_before: bool
    dropout: Dropout

    def before(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """Return the sub-layer's input: x `[B, T, D]`, normalised in pre-norm."""
        return norm(x) if self.normalize_before else x

    def behind(self, x: torch.Tensor, output: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """Join the sub-layer's output `[B, T, D]` to its input x."""
        joined = x + self.dropout(output)
        return joined if self.normalize_before else norm(joined)


class LunaEncoderLayer(LunaLayer, EncoderLayer):
    """Luna's self-attention, then feed-forward; the state is P."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        ResidualLayer.__init__(self, config)
        self.self_attn = LunaAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.packed_layer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = MultiBranchFeedForward(config, config.encoder_ffn_dim)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, packed: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next X `[B, S, D]` and P `[B, l, D]`."""
        x = self.before(hidden_states, self.self_attn_layer_norm)
        queries = self.before(packed, self.packed_layer_norm)
        context, weights = self.self_attn.pack_source(queries, x, attention_mask, **kwargs)
        output, _ = self.self_attn(x, *self.self_attn.keys_and_values(context), weights, **kwargs)
        hidden_states = self.behind(hidden_states, output, self.self_attn_layer_norm)
        packed = self.behind(packed, context, self.packed_layer_norm)
        return self.last_residual(hidden_states, hidden_states, self.final_layer_norm, self.feed_forward), packed


class LunaDecoderLayer(LunaLayer, DecoderLayer):
    """Luna's causal attention, its attention to the source, then feed-forward; the state is P."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        ResidualLayer.__init__(self, config)
        heads = config.decoder_attention_heads
        self.layer_idx = layer_idx
        self.self_attn = CausalLunaAttention(config, heads, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = LunaAttention(config, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        nobody_reads_it = not config.normalize_before and layer_idx == config.decoder_layers - 1
        self.packed_layer_norm = nn.Identity() if nobody_reads_it else nn.LayerNorm(config.d_model)
        self.feed_forward = MultiBranchFeedForward(config, config.decoder_ffn_dim)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None,
        packed: torch.Tensor,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next X `[B, T, D]` and P `[B, l, D]`, for the source `[B, S, D]`."""
        source_input, packed = self.read_source(
            packed, encoder_hidden_states, encoder_attention_mask, past_key_values, **kwargs
        )
        x = self.before(hidden_states, self.self_attn_layer_norm)
        output, _ = self.self_attn(x, source_input.queries, attention_mask, past_key_values, **kwargs)
        hidden_states = self.behind(hidden_states, output, self.self_attn_layer_norm)
        x = self.before(hidden_states, self.encoder_attn_layer_norm)
        output, _ = self.encoder_attn(x, source_input.key, source_input.value, source_input.weights, **kwargs)
        hidden_states = self.behind(hidden_states, output, self.encoder_attn_layer_norm)
        return self.last_residual(hidden_states, hidden_states, self.final_layer_norm, self.feed_forward), packed

    def read_source(
        self,
        packed: torch.Tensor,
        source: torch.Tensor,
        mask: torch.Tensor | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> tuple[SourceInput, torch.Tensor]:
        """Pack the source, or take the packed source from the cache. Return it and the next P.

        If the packed source is in the cache, P is returned unchanged: no layer needs it. If attention weights are
        requested, everything is computed again.
        """
        has_cache = isinstance(past_key_values, EncoderDecoderCache)
        is_kept = has_cache and past_key_values.is_updated.get(self.layer_idx)
        if is_kept and not self.encoder_attn.wants_weights(kwargs):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            keys, values = (each[:, :, : packed.shape[1]] for each in (layer.keys, layer.values))  # static: longer
            (key, queries), value = keys.chunk(2, 1), values.chunk(2, 1)[0]
            return SourceInput(queries, key, value), packed
        queries = self.self_attn.queries(packed)
        reading = self.before(packed, self.packed_layer_norm)
        context, weights = self.encoder_attn.pack_source(reading, source, mask, **kwargs)
        key, value = self.encoder_attn.keys_and_values(context)
        if has_cache and not is_kept:
            past_key_values.is_updated[self.layer_idx] = True
            kept = torch.cat([key, queries], 1), torch.cat([value, queries], 1)  # both need one shape
            past_key_values.cross_attention_cache.update(*kept, self.layer_idx)
        return SourceInput(queries, key, value, weights), self.behind(packed, context, self.packed_layer_norm)
