"""Layers of Luna, linear unified nested attention (Ma et al. 2021, arXiv 2106.01540).

Each attention is two. P `[l, D]` is a sequence of fixed length beside the input X, and C is what is attended to:

    pack      Y_P = Attn(P, C)             unpack   Y_X = Attn(X, Y_P) W_O
    encoder   X <- LN(X + Y_X),  P <- LN(P + Y_P),  X <- LN(X + FFN(X)),  with C = X
    decoder   the same with C the encoder's states, behind causal attention

Attn is multi-head attention with projections of its own, and packing has no projection of its output. The first P is
learned. P goes from layer to layer, from the last layer of the encoder to the first of the decoder, and on.

Causal attention cannot pack with a softmax, which would see later tokens. Each position t has a mean over j <= t, with
a_j = act(P W_pq (x_j W_pk)^T / sqrt(H)) `[l]` in each head, and u_t `[l]`:

    u_t = softmax( (x_t W_q / sqrt(H)) (1/t) sum_j (x_j W_k)^T a_j ),     y_t = u_t (1/t) sum_j a_j^T (x_j W_v)

It reads P, which knows nothing of the target, and does not change it. act is log2(1 + 2^x), or elu(x) + 1; both are 1
at 0. The sums over j are taken as two products with masked `[T, T]` matrices. A running sum would have l H numbers for
each position and head, which is more than T in a sentence. So every mask and cache serves, but the cost is not linear.

What the released code (fairseq-apollo) says is followed: the heads of packing are as many as the others, pre-norm
has a norm of its own for P, and causal attention reads P without it. The code differs in four ways. A source of less
than l tokens has as many entries of P as it has tokens (`--fix-projection-length` turns this off). Causal attention
counts padding. Positions of P are counted from 0, here as positions of tokens are. The last decoder layer has a norm
of the next P, or, pre-norm, the decoder has: nothing reads what it gives.

The encoder gives the decoder one tensor, `[B, S + l, D]`: P stands behind the states. A decoder keeps for each layer
the keys and values of Y_P and the queries W_pq P, so that P is packed once for each sentence. The decoder's fast twin
(`decoding`) does not know Luna, and `generate` uses Transformers' caches.

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
    """The states of the source `[B, S, D]` and P `[B, l, D]`, of what the encoder gives.

    Raises:
        ValueError: there is no encoder's output, or it is too short.
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

    Positions are sinusoids, or none where the positions of tokens are learned.
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
        """P for each sentence of the embeddings `[B, S, D]`, `[B, l, D]`."""
        packed = self.packed_embeddings * self.scale
        if self.positions is not None:
            packed = packed + self.positions(torch.arange(len(packed), device=packed.device)).to(packed.dtype)
        if self.layer_norm is not None:
            packed = self.layer_norm(packed)
        return self.dropout(packed.to(hidden_states.dtype).expand(hidden_states.shape[0], -1, -1))


class LunaLayerNorm(nn.LayerNorm):
    """The norm behind a pre-norm encoder `[B, S + l, D]`; P has one of its own."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.d_model)
        self.config = config
        self.packed_norm = nn.LayerNorm(config.d_model)

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        """`[B, S + l, D]` to `[B, S + l, D]`."""
        states, packed = split_memory(memory, self.config)
        return torch.cat([super().forward(states), self.packed_norm(packed)], dim=1)


class Projections(nn.Module):
    """Queries, keys and values of one of two nested attentions; `luna_tie_kv` makes the keys the values."""

    def __init__(self, config: VanillaTransformerConfig, has_values: bool = True) -> None:
        super().__init__()
        make = functools.partial(input_projection, 1, config.d_model, config.d_model, config.attention_bias, fused=3)
        self.q_proj, self.k_proj = make(), make()
        self.v_proj = make() if has_values and not config.luna_tie_kv else None

    def keys_and_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, time, D]` to two times `[B, time, D]`."""
        key = self.k_proj(x)
        return key, key if self.v_proj is None else self.v_proj(x)


class NestedAttention(nn.Module):
    """What Luna's attentions share: the projections of packing and unpacking, and the heads."""

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
        """`[B, time, D]` to `[B, heads, time, H]`."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def dropped(self, weights: torch.Tensor) -> torch.Tensor:
        """Weights of attention with dropout."""
        return nn.functional.dropout(weights, self.dropout, self.training) if self.dropout else weights

    def wants_weights(self, kwargs: dict[str, Any]) -> bool:
        """Whether attention weights are asked for, of the back-end that gives them."""
        asked = kwargs.get("output_attentions", self.config.output_attentions)
        return bool(asked) and self.config._attn_implementation == "eager"


class LunaAttention(NestedAttention):
    """Attention that packs its source into P's length, and reads what is packed; the residuals are not part of it."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Contexts `[B, T, D]`, and weights `[B, heads, T, S]` where the back-end gives them.

        Raises:
            ValueError: the back-end has other masks than these two.
        """
        check_masks(self.config)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.dropout if self.training else 0.0
        context, weights = attention(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return context.flatten(2), weights

    def pack_source(
        self, packed: torch.Tensor, source: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Y_P `[B, l, D]` of P `[B, l, D]` and C `[B, S, D]`, and, where asked for, weights `[B, heads, l, S]`."""
        query = self.heads(self.pack.q_proj(packed))
        key, value = map(self.heads, self.pack.keys_and_values(source))
        mask = None if mask is None else mask[:, :, :1]  # what is padding is so for every query
        context, weights = self.attend(query, key, value, mask, **kwargs)
        return context, weights if self.wants_weights(kwargs) else None

    def keys_and_values(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What unpacking reads of Y_P: keys and values, `[B, heads, l, H]`."""
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
        """Y_X `[B, T, D]` of X `[B, T, D]` and of keys and values.

        Given the weights of packing, those of both attentions, multiplied, are returned beside: `[B, heads, T, S]`.
        """
        context, weights = self.attend(self.heads(self.unpack.q_proj(hidden_states)), key, value, None, **kwargs)
        output = self.out_proj(context)
        if pack_weights is None:
            return output, None
        weights = weights @ pack_weights
        return output + weights[:0].sum(), weights  # they are only reported; this 0 keeps them in the graph


class CausalLunaAttention(NestedAttention):
    """Luna's attention to the target so far."""

    is_causal = True

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int) -> None:
        super().__init__(config, num_heads)
        self.layer_idx = layer_idx

    def queries(self, packed: torch.Tensor) -> torch.Tensor:
        """P `[B, l, D]` to its queries, scaled, `[B, heads, l, H]`."""
        return self.heads(self.pack.q_proj(packed)) * self.scaling

    def activate(self, scores: torch.Tensor) -> torch.Tensor:
        """act, computed in float32 or better."""
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
        """y `[B, T, D]` of x `[B, T, D]` and of P's `queries` `[B, heads, l, H]`.

        The weights that are returned beside, where asked for, are those of the values, `[B, heads, T, S]`, divided by
        their sum.
        """
        query = self.heads(self.unpack.q_proj(hidden_states)) * self.scaling
        key, value = map(self.heads, self.unpack.keys_and_values(hidden_states))
        pack_key = self.heads(self.pack.k_proj(hidden_states))
        if past_key_values is not None:
            cache = self_attention_cache(past_key_values)
            kept = torch.cat([key, pack_key], 1), torch.cat([value, pack_key], 1)  # slots of a cache are alike
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
        return output + weights[:0].sum(), weights  # they are only reported; this 0 keeps them in the graph


def shares(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """1/t for each of the t positions that a query sees, and 0 for others, `[1 or B, 1, T, S]`.

    Args:
        mask: as Transformers makes it for eager attention or sdpa. None is causal, and a single query sees all.
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
    """What a decoder layer reads of a source, whatever the target is.

    Attributes:
        queries: of P in causal attention, `[B, heads, l, H]`.
        key, value: of Y_P, `[B, heads, l, H]`.
        weights: of packing, where asked for, `[B, heads, l, S]`.
    """

    queries: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    weights: torch.Tensor | None = None


class LunaLayer:
    """Joins what an attention gives to its input: for X and for P."""

    normalize_before: bool
    dropout: Dropout

    def before(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """What a sub-layer reads of its input x `[B, T, D]`."""
        return norm(x) if self.normalize_before else x

    def behind(self, x: torch.Tensor, output: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """Its output `[B, T, D]`, joined to its input x."""
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
        """X `[B, S, D]` and P `[B, l, D]` to their next."""
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
        """X `[B, T, D]` and P `[B, l, D]` to their next, with the source `[B, S, D]`."""
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
        """Pack the source, or find it packed in the cache; and the next P, which with a cache nobody reads.

        Where attention weights are asked for, all is computed anew.
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
            kept = torch.cat([key, queries], 1), torch.cat([value, queries], 1)  # slots of a cache are alike
            past_key_values.cross_attention_cache.update(*kept, self.layer_idx)
        return SourceInput(queries, key, value, weights), self.behind(packed, context, self.packed_layer_norm)
