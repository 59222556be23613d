"""The cell of the Evolved Transformer, found by architecture search (So et al. 2019, arXiv 1901.11117).

One layer here is one cell, which replaces two layers of a Transformer. Each step starts with LN, and dropout follows
each term that is added. The encoder's cell is

    x <- x + a * sigmoid(b),  [a; b] = W LN(x)                          a gated linear unit
    x <- x + [S9(LN(relu(W h) + [relu(C3 h); 0])); 0],  h = LN(x)       two branches, F and D/2 wide
    x <- x + attention(LN(x))
    x <- x + FFN(LN(x))

and the decoder's cell is

    x <- x + attention(h) + attention(h, memory),  h = LN(x)            of twice as many heads, and of as many
    x <- x + S7(LN(relu(S11 h) + [S7 h; 0])),  h = LN(x)                two branches, 2D and D/2 wide
    x <- x + attention(LN(x))
    x <- x + attention(LN(x), memory)
    x <- x + W_2 LN(swish(W_1 LN(x)))

C3 is a convolution over 3 positions. S9 is a separable convolution over 9 positions: first each feature by itself,
then a projection. […; 0] fills up with zeros to the width of the sum. The windows of the encoder's convolutions are
centred. The windows of the decoder's convolutions end at the position itself. Padding counts as zeros. The first
self-attention of the decoder, the wide one, has twice as many heads as the other attentions, at most 16. It never has
fewer heads than the other attentions.

These are the equations of the released code (tensor2tensor, `evolved_transformer`). There F is 4D, and there is one
dropout rate, except for attention weights. Here F is the inner width of the stack, and `activation_dropout` is the
rate inside branches and networks. Attentions of tensor2tensor have no biases, as here with `attention_bias=False`.
Convolutions start as in tensor2tensor: uniform within sqrt(6/(inputs + outputs)), where both are multiplied by the
number of positions of the filter. For a filter of a single feature, the formula counts all features as inputs and one
output, so its weights are small.

A cell stores more for each token than an attention does, so it uses several slots of a cache. With N cells, cell i
uses slot i for its plain self-attention, and slot N + i for its wide self-attention. Slots 2N + i and 3N + i hold the
inputs of its convolutions: of the two branches, and of the convolution after them. In the cache of the source, the
last attention uses slot i, and the first attention uses slot N + i. `decoding` has no twin of a cell, so such a model
decodes with Transformers' own caches.

Reported attention weights are those of the plain self-attention and of the last attention to the source.

Shapes: B batch, T time, S source length, D model width, F inner width, C features, K kernel width.
"""

import copy
import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache

from .attention import MultiBranchAttention, self_attention_cache
from .branches import input_projection
from .configuration_vanilla_transformer import CELL_SLOTS, VanillaTransformerConfig
from .dropout import Dropout
from .dynamic_convolution import check_masks, is_seen
from .feed_forward import MultiBranchFeedForward
from .layers import DecoderLayer, EncoderLayer, ResidualLayer

SOURCE_SLOTS = 2  # slots of a decoder cell in the cache of the source


class Convolution(nn.Conv1d):
    """A convolution over time; the caller pads the input: `[B, T + K - 1, C]` to `[B, T, out]`."""

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start as in tensor2tensor, or from N(0, init_std^2)."""
        if config.init_std is None:
            outputs = 1 if self.groups > 1 else self.out_channels
            bound = math.sqrt(6 / (self.kernel_size[0] * (self.in_channels + outputs)))
            init.uniform_(self.weight, -bound, bound)
        else:
            init.normal_(self.weight, std=config.init_std)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve along the second axis."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class SeparableConvolution(nn.Module):
    """A filter over time for each feature, then a projection: `[B, T + K - 1, C]` to `[B, T, out]`."""

    def __init__(self, features: int, outputs: int, width: int) -> None:
        super().__init__()
        self.depthwise = Convolution(features, features, width, groups=features, bias=False)
        self.pointwise = nn.Linear(features, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve, then project."""
        return self.pointwise(self.depthwise(x))


def add_narrow(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors, with zeros appended to the features of `narrow`."""
    return wide + nn.functional.pad(narrow, (0, wide.shape[-1] - narrow.shape[-1]))


class EncoderConvolutions(nn.Module):
    """The convolutions of the encoder's cell: [S9(LN(relu(W h) + [relu(C3 h); 0])); 0]."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        d, inner = config.d_model, config.encoder_ffn_dim
        self.wide, self.narrow = nn.Linear(d, inner), Convolution(d, d // 2, 3)
        self.layer_norm = nn.LayerNorm(inner)
        self.output = SeparableConvolution(inner, d // 2, 9)
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: torch.Tensor, is_token: torch.Tensor | None) -> torch.Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `is_token` `[B, S, 1]` is False at padding, or None without padding."""
        x = without_padding(x, is_token)
        wide = self.dropout(self.wide(x).relu())
        narrow = self.dropout(self.narrow(nn.functional.pad(x, (0, 0, 1, 1))).relu())
        inner = without_padding(self.layer_norm(add_narrow(wide, narrow)), is_token)
        output = self.output(nn.functional.pad(inner, (0, 0, 4, 4)))
        return nn.functional.pad(output, (0, x.shape[-1] - output.shape[-1]))


class DecoderConvolutions(nn.Module):
    """The convolutions of the decoder's cell, over positions so far: S7(LN(relu(S11 h) + [S7 h; 0]))."""

    def __init__(self, config: VanillaTransformerConfig, slots: tuple[int, int]) -> None:
        """Make the weights; `slots` are the cache slots for the inputs of the branches and of the last convolution."""
        super().__init__()
        d, self.slots = config.d_model, slots
        self.wide, self.narrow = SeparableConvolution(d, 2 * d, 11), SeparableConvolution(d, d // 2, 7)
        self.layer_norm = nn.LayerNorm(2 * d)
        self.output = SeparableConvolution(2 * d, d, 7)
        self.dropout = Dropout(config.activation_dropout)

    def forward(self, x: torch.Tensor, is_token: torch.Tensor | None, cache: Cache | None) -> torch.Tensor:
        """Map `[B, T, D]` to `[B, T, D]`; `is_token` `[B, T, 1]` is False at padding, or None without padding."""
        x = with_past(without_padding(x, is_token), 10, cache, self.slots[0])
        wide = self.dropout(self.wide(x).relu())
        narrow = self.dropout(self.narrow(x[:, 4:]))
        inner = without_padding(self.layer_norm(add_narrow(wide, narrow)), is_token)
        return self.output(with_past(inner, 6, cache, self.slots[1]))


def without_padding(x: torch.Tensor, is_token: torch.Tensor | None) -> torch.Tensor:
    """Replace padding by zeros."""
    return x if is_token is None else x.masked_fill(~is_token, 0)


def with_past(x: torch.Tensor, before: int, cache: Cache | None, slot: int) -> torch.Tensor:
    """Return the last `before` positions of a cache slot, then the new positions `[B, T, C]`: `[B, before + T, C]`.

    Missing positions are zeros. The cache stores the new positions.
    """
    if cache is None:
        return nn.functional.pad(x, (0, 0, before, 0))
    past = cache.get_seq_length(slot) + 0  # a copy: a static cache counts in place
    kept, _ = cache.update(x[:, None], x[:, None, :, :0], slot)
    places = torch.arange(-before, x.shape[1], device=x.device) + past
    return kept[:, 0].index_select(1, places.clamp(min=0)).masked_fill((places < 0)[:, None], 0)


class NormalisedFeedForward(nn.Module):
    """The feed-forward network W_2 LN(swish(W_1 x + b_1)) + b_2."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.activation, self.activation_dropout = nn.SiLU(), Dropout(config.activation_dropout)
        self.layer_norm = nn.LayerNorm(ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        return self.fc2(self.layer_norm(self.activation_dropout(self.activation(self.fc1(x)))))


class EvolvedEncoderLayer(EncoderLayer):
    """Gated linear unit, convolutions, self-attention and feed-forward."""

    joints = ("gated_unit", "convolutions", "self_attn", "feed_forward")

    def __init__(self, config: VanillaTransformerConfig) -> None:
        ResidualLayer.__init__(self, config)
        self.config = config
        self.gated_unit = input_projection(2, config.d_model, config.d_model)  # values and gates
        self.convolutions = EncoderConvolutions(config)
        self.self_attn = MultiBranchAttention(config, config.encoder_attention_heads)
        self.feed_forward = MultiBranchFeedForward(config, config.encoder_ffn_dim)
        self.gated_unit_layer_norm, self.convolutions_layer_norm, self.self_attn_layer_norm, self.final_layer_norm = (
            nn.LayerNorm(config.d_model) for _ in self.joints
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `[B, S, D]` to `[B, S, D]`, with the parent's arguments."""
        check_masks(self.config)
        is_token = None if attention_mask is None else is_seen(attention_mask)[:, 0, 0, :, None]
        x = self.residual(
            hidden_states, self.gated_unit_layer_norm, lambda h: nn.functional.glu(self.gated_unit(h)), gate
        )
        x = self.residual(x, self.convolutions_layer_norm, lambda h: self.convolutions(h, is_token), gate)
        x = self.residual(x, self.self_attn_layer_norm, lambda h: self.self_attn(h, attention_mask, **kwargs)[0], gate)
        return self.residual(x, self.final_layer_norm, self.feed_forward, gate)


class EvolvedDecoderLayer(DecoderLayer):
    """Two attentions side by side, convolutions, self-attention, attention to the source and feed-forward."""

    joints = ("wide_self_attn", "convolutions", "self_attn", "encoder_attn", "feed_forward")

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        ResidualLayer.__init__(self, config)
        self.config = config
        heads, cells = config.decoder_attention_heads, config.decoder_layers
        slots = [n * cells + layer_idx for n in range(CELL_SLOTS)]
        self.wide_self_attn = MultiBranchAttention(config, config.wide_heads, is_causal=True, layer_idx=slots[1])
        self.first_encoder_attn = MultiBranchAttention(config, heads, is_cross=True, layer_idx=slots[1])
        self.convolutions = DecoderConvolutions(config, (slots[2], slots[3]))
        self.self_attn = MultiBranchAttention(config, heads, is_causal=True, layer_idx=slots[0])
        self.encoder_attn = MultiBranchAttention(config, heads, is_cross=True, layer_idx=slots[0])
        self.feed_forward = NormalisedFeedForward(config, config.decoder_ffn_dim)
        self.wide_self_attn_layer_norm, self.convolutions_layer_norm = (nn.LayerNorm(config.d_model) for _ in range(2))
        self.self_attn_layer_norm, self.encoder_attn_layer_norm = (nn.LayerNorm(config.d_model) for _ in range(2))
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `[B, T, D]` to `[B, T, D]`, with the parent's arguments."""
        check_masks(self.config)
        cache = None if past_key_values is None else self_attention_cache(past_key_values)
        make_room(past_key_values, self.config.decoder_layers)
        past = 0 if cache is None else cache.get_seq_length(self.self_attn.layer_idx) + 0
        is_token = None if attention_mask is None else own_positions(attention_mask, past)
        kwargs["past_key_values"] = past_key_values

        def to_target(attention: nn.Module, h: torch.Tensor) -> torch.Tensor:
            return attention(h, attention_mask, **kwargs)[0]

        def to_source(attention: nn.Module, h: torch.Tensor) -> torch.Tensor:
            return attention(h, encoder_attention_mask, encoder_hidden_states, **kwargs)[0]

        h = self.wide_self_attn_layer_norm(hidden_states)
        x = hidden_states + self.addend(h, lambda h: to_target(self.wide_self_attn, h), gate)
        if encoder_hidden_states is not None:
            x = x + self.addend(h, lambda h: to_source(self.first_encoder_attn, h), gate)
        x = self.residual(x, self.convolutions_layer_norm, lambda h: self.convolutions(h, is_token, cache), gate)
        x = self.residual(x, self.self_attn_layer_norm, lambda h: to_target(self.self_attn, h), gate)
        if encoder_hidden_states is not None:
            x = self.residual(x, self.encoder_attn_layer_norm, lambda h: to_source(self.encoder_attn, h), gate)
        return self.residual(x, self.final_layer_norm, self.feed_forward, gate)


def own_positions(mask: torch.Tensor, past: int | torch.Tensor) -> torch.Tensor:
    """Return which new positions are tokens, `[B, T, 1]`: a token sees itself in the mask `[B, 1, T, S]`."""
    places = torch.arange(mask.shape[2], device=mask.device)[:, None] + past
    return is_seen(mask)[:, 0].gather(2, places.expand(len(mask), -1, -1))


def make_room(cache: Cache | None, cells: int) -> None:
    """Add the slots that the cells need to a cache that was made with one slot per layer.

    Raises:
        ValueError: the cache already contains tokens (PEFT's prefix tuning), but not in all slots.
    """
    if cache is None:
        return
    parts = [(cache, CELL_SLOTS)]
    if isinstance(cache, EncoderDecoderCache):
        parts = [(cache.self_attention_cache, CELL_SLOTS), (cache.cross_attention_cache, SOURCE_SLOTS)]
    for part, slots in parts:
        if part.layer_class_to_replicate is not None or len(part.layers) >= slots * cells:
            continue
        if part.get_seq_length() > 0:
            raise ValueError(
                f"`past_key_values` begins with tokens in {len(part.layers)} slots, and {cells} cells of "
                f"`layer_form='evolved'` need {slots * cells}; begin with an empty cache"
            )
        part.layers.extend(copy.deepcopy(part.layers[0]) for _ in range(slots * cells - len(part.layers)))
