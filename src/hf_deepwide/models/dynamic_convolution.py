"""Dynamic convolutions in the place of self-attention (Wu et al. 2019, arXiv 1901.10430, "Pay Less Attention").

For each head, each token predicts the weights of its neighbours from its own features alone:

    g_t = a_t * sigmoid(b_t),  [a_t; b_t] = W_I x_t + b_I         a gated linear unit of the input
    k_t = softmax(W_Q g_t)                                        of each head, over the K places of its window
    o_t = W_O [ sum_j k_tj g_(t + j - l) of each head ] + b_O     j = 0 … K - 1

l places of the window lie before the token: K - 1 in the decoder, and K/2 in the encoder, rounded down. Beyond the
ends of a sentence and at padding g is 0, but these places keep their part of the softmax. The H features of a head
share its kernel. In training, weights are dropped after the softmax (DropConnect), with the rate `attention_dropout`.

The paper's kernels are 3, 7, 15 and then 31 places wide, from the first layer up. The released code (fairseq,
`lightconv`) computes the same. Here too, W_Q has no bias and starts uniform within 1/sqrt(D). The released code also
drops the input of W_I, by default at a rate of 0.1; this library does not. The released code has a separate rate for
kernels, and models without the gate. In its encoder, windows of an even width begin one place later.

The windows are a band in a matrix [T, S], which is used like attention weights. For sentences this takes less memory
than a copy of each window. A cache holds g, both as keys and as values. The twin in `decoding` reads the last K.

Shapes: B batch, T new positions, S all positions, D model width, H head width, K kernel width.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache

from .attention import self_attention_cache
from .configuration_vanilla_transformer import VanillaTransformerConfig


def check_masks(config: VanillaTransformerConfig) -> None:
    """Refuse an attention implementation whose mask does not mark single positions as padding.

    Raises:
        ValueError: the implementation is neither `eager` nor `sdpa`.
    """
    if (attention := config._attn_implementation) not in ("eager", "sdpa"):
        raise ValueError(
            f"`layer_form={config.layer_form!r}` needs a mask of positions, and attention {attention!r} has none; "
            "accepted: eager, sdpa"
        )


def is_seen(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as bools, True where a position is seen; the given mask is additive or boolean."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class KernelPrediction(nn.Linear):
    """The projection W_Q to the kernels of a token, for all heads side by side."""

    def __init__(self, features: int, heads: int, width: int) -> None:
        super().__init__(features, heads * width, bias=False)

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start uniform within 1/sqrt(D), or from N(0, init_std^2)."""
        gain = getattr(self, "gain", 1)
        if config.init_std is None:
            bound = gain / math.sqrt(self.in_features)
            init.uniform_(self.weight, -bound, bound)
        else:
            init.normal_(self.weight, std=gain * config.init_std)


class DynamicConvolution(nn.Module):
    """Gated input, dynamic convolution and output projection, with the interface of self-attention."""

    def __init__(self, config: VanillaTransformerConfig, heads: int, width: int, layer_idx: int | None = None) -> None:
        """Make the projections; `width` is K, and `layer_idx` is the slot of a decoder layer in a cache, else None."""
        super().__init__()
        self.config = config
        self.heads, self.width, self.layer_idx = heads, width, layer_idx
        self.head_dim = config.d_model // heads
        self.before = width // 2 if layer_idx is None else width - 1  # l; a decoder sees no later token
        self.dropout = config.attention_dropout
        self.in_proj = nn.Linear(config.d_model, 2 * config.d_model, bias=config.attention_bias)
        self.kernel_proj = KernelPrediction(config.d_model, heads, width)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=config.attention_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map `[B, T, D]` to `[B, T, D]`, and also return the weights of all positions, `[B, heads, T, S]`.

        Without dropout, the weights of a position add up to 1 if its window contains only tokens, and else to less.
        """
        check_masks(self.config)
        gated = nn.functional.glu(self.in_proj(hidden_states))
        scores = self.kernel_proj(gated).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        kernel = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(gated.dtype)
        kernel = nn.functional.dropout(kernel, self.dropout, self.training)
        values, past = gated.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2), 0
        if past_key_values is not None:  # the length is read before the new values are in the cache …
            past = past_key_values.get_seq_length(self.layer_idx) + 0  # … and copied: a static cache counts in place
            cache = self_attention_cache(past_key_values)
            _, values = cache.update(values, values, self.layer_idx)
        weights = self.band(kernel, values.shape[2], past, attention_mask)
        return self.out_proj((weights @ values).transpose(1, 2).flatten(2)), weights

    def band(
        self, kernel: torch.Tensor, length: int, past: int | torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Spread kernels `[B, heads, T, K]` to weights of all positions, `[B, heads, T, S]`.

        Args:
            kernel: the kernels of the new positions.
            length: S.
            past: the first new position.
            mask: `[B, 1, T, S]`, additive, or bools that are True where a position is seen, or None.
        """
        device = kernel.device
        centres = torch.arange(kernel.shape[2], device=device)[:, None] + past
        places = torch.arange(length, device=device) - centres + self.before  # j, [T, S]
        is_inside = (places >= 0) & (places < self.width)
        if mask is not None:
            is_inside = is_inside & is_seen(mask)
        index = places.clamp(0, self.width - 1).expand(*kernel.shape[:2], -1, -1)
        return kernel.gather(3, index).masked_fill(~is_inside, 0)


def convolve(layers: nn.ModuleList, config: VanillaTransformerConfig, is_decoder: bool) -> None:
    """Replace the self-attention in all layers of a stack by dynamic convolutions."""
    heads = config.decoder_attention_heads if is_decoder else config.encoder_attention_heads
    for index, (layer, width) in enumerate(zip(layers, config.kernel_sizes(is_decoder), strict=True)):
        layer.self_attn = DynamicConvolution(config, heads, width, index if is_decoder else None)
