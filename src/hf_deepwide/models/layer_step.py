"""A plain decoder layer that reads one new token in each row.

It computes the equations of `layers.py` without dropout, and its parts belong to the decoder's twin (`decoding.py`).
With one sentence the matrix products are so short that every call between them matters for speed.

Shapes: R rows, B sentences, S source length, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch

from .layers import DecoderLayer

Part = Callable[..., Any]


class DecoderLayerStep:
    """`DecoderLayer` for decoding: the same sub-layers, joined by addition, pre- or post-norm."""

    self_attn: Part | None
    encoder_attn: Part | None

    def __init__(self, layer: DecoderLayer, twin_of: Callable[[Any], Part]) -> None:
        """Store the layer, and `twin_of`, a function that makes the twin of a module."""
        self.layer, self.twin_of = layer, twin_of
        self.normalize_before = layer.normalize_before
        self.self_attn = self.encoder_attn = None

    def begin(self) -> None:
        """Make the twins of the parts. This waits for the first use of the layer, since latent depth skips layers."""
        layer, twin_of = self.layer, self.twin_of
        self.self_attn, self.encoder_attn = twin_of(layer.self_attn), twin_of(layer.encoder_attn)
        self.feed_forward = twin_of(layer.feed_forward)
        self.norms = [
            twin_of(norm)
            for norm in (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        ]

    def __call__(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        memory: torch.Tensor,
        memory_mask: torch.Tensor | None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Transform the new tokens' states `[R, 1, D]` to `[R, 1, D]`.

        Args:
            x: the states of the new tokens.
            mask: the earlier tokens that a row sees, in the form of `SelfAttentionStep`.
            memory: the encoder's states `[B, S, D]`.
            memory_mask: additive, `[B, 1, 1, S]`, or None.
            gate: weight of the sub-layers' outputs; None means 1.
        """
        if self.self_attn is None:
            self.begin()
        before_self, before_cross, before_last = self.norms
        if self.normalize_before:
            x = x + gated(self.self_attn(before_self(x), mask)[0], gate)
            x = x + gated(self.encoder_attn(before_cross(x), memory_mask, memory)[0], gate)
            return x + gated(self.feed_forward(before_last(x)), gate)
        x = before_self(x + gated(self.self_attn(x, mask)[0], gate))
        x = before_cross(x + gated(self.encoder_attn(x, memory_mask, memory)[0], gate))
        return before_last(x + gated(self.feed_forward(x), gate))


def gated(output: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return the term that a sub-layer adds to its input: gate * output."""
    return output if gate is None else gate.to(output.dtype) * output
