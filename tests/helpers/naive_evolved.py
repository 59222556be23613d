"""The cells of the Evolved Transformer written out (So et al. 2019), for `naive_transformer`: one position at a time.

The caller passes attention, feed-forward network and LayerNorm, which are in `naive_transformer`.
"""

from collections.abc import Callable
from typing import Any

import torch
from naive_dropout import drop

Weights = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]
Norm = Callable[[str, torch.Tensor], torch.Tensor]  # arguments: the norm's name in the cell, and all positions


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def window(xs: torch.Tensor, t: int, width: int, is_causal: bool) -> list[torch.Tensor]:
    """The vectors that a filter at `t` reads; zeros outside the sentence."""
    first = t - width + 1 if is_causal else t - width // 2
    return [xs[s] if 0 <= s < len(xs) else torch.zeros_like(xs[0]) for s in range(first, first + width)]


def convolution(w: Weights, name: str, xs: torch.Tensor, width: int) -> list[torch.Tensor]:
    """A centred convolution, with a matrix for each place in the window."""
    matrices = w[f"{name}.weight"]  # [out, in, width]
    return [
        sum(matrices[:, :, k] @ x for k, x in enumerate(window(xs, t, width, False))) + w[f"{name}.bias"]
        for t in range(len(xs))
    ]


def separable(w: Weights, name: str, xs: torch.Tensor, width: int, is_causal: bool) -> list[torch.Tensor]:
    """A separable convolution: a number for each place and feature, and then a projection."""
    filters = w[f"{name}.depthwise.weight"]  # [features, 1, width]
    rows = []
    for t in range(len(xs)):
        filtered = sum(filters[:, 0, k] * x for k, x in enumerate(window(xs, t, width, is_causal)))
        rows.append(linear(w, f"{name}.pointwise", filtered))
    return rows


def filled(x: torch.Tensor, width: int) -> torch.Tensor:
    """x, padded with zeros to the width."""
    return torch.cat([x, x.new_zeros(width - len(x))])


def inside(x: torch.Tensor) -> torch.Tensor:
    return drop(x, "activation_dropout")


def evolved_encoder_cell(w: Weights, name: str, xs: torch.Tensor, norm: Norm, attend: Step, ffn: Step) -> torch.Tensor:
    d = xs.shape[1]

    def gated(ys: torch.Tensor) -> torch.Tensor:
        both = [linear(w, f"{name}.gated_unit", y) for y in ys]
        return torch.stack([y[:d] / (1 + torch.exp(-y[d:])) for y in both])

    def branches(ys: torch.Tensor) -> torch.Tensor:
        at = f"{name}.convolutions"
        wide = [inside(linear(w, f"{at}.wide", y).clamp(min=0)) for y in ys]
        narrow = [inside(y.clamp(min=0)) for y in convolution(w, f"{at}.narrow", ys, 3)]
        both = torch.stack([a + filled(b, len(a)) for a, b in zip(wide, narrow, strict=True)])
        outputs = separable(w, f"{at}.output", norm("convolutions.layer_norm", both), 9, False)
        return torch.stack([filled(y, d) for y in outputs])

    xs = xs + drop(gated(norm("gated_unit_layer_norm", xs)))
    xs = xs + drop(branches(norm("convolutions_layer_norm", xs)))
    xs = xs + drop(attend(norm("self_attn_layer_norm", xs)))
    return xs + drop(ffn(norm("final_layer_norm", xs)))


def evolved_decoder_cell(
    w: Weights, name: str, config: Any, xs: torch.Tensor, norm: Norm, own: Callable[..., Any], of: Callable[..., Any]
) -> torch.Tensor:
    """`own(part, heads, ys)` is causal self-attention, and `of(part, heads, ys)` attention to the source."""
    heads = config.decoder_attention_heads
    twice = 2 * heads if heads <= 8 else max(heads, 16)

    def branches(ys: torch.Tensor) -> torch.Tensor:
        at = f"{name}.convolutions"
        wide = [inside(y.clamp(min=0)) for y in separable(w, f"{at}.wide", ys, 11, True)]
        narrow = [inside(y) for y in separable(w, f"{at}.narrow", ys, 7, True)]
        both = torch.stack([a + filled(b, len(a)) for a, b in zip(wide, narrow, strict=True)])
        return torch.stack(separable(w, f"{at}.output", norm("convolutions.layer_norm", both), 7, True))

    def network(ys: torch.Tensor) -> torch.Tensor:
        inner = [linear(w, f"{name}.feed_forward.fc1", y) for y in ys]
        inner = torch.stack([inside(y / (1 + torch.exp(-y))) for y in inner])
        return torch.stack([linear(w, f"{name}.feed_forward.fc2", y) for y in norm("feed_forward.layer_norm", inner)])

    ys = norm("wide_self_attn_layer_norm", xs)
    xs = xs + drop(own("wide_self_attn", twice, ys)) + drop(of("first_encoder_attn", heads, ys))
    xs = xs + drop(branches(norm("convolutions_layer_norm", xs)))
    xs = xs + drop(own("self_attn", heads, norm("self_attn_layer_norm", xs)))
    xs = xs + drop(of("encoder_attn", heads, norm("encoder_attn_layer_norm", xs)))
    return xs + drop(network(norm("final_layer_norm", xs)))
