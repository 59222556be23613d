"""Layers of encoder and decoder: sub-layers joined by residual connections.

Shapes: B batch, S source length, T target length, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import MultiBranchAttention
from .configuration_base import DeepWideConfig
from .dropout import Dropout
from .feed_forward import MultiBranchFeedForward


class ResidualLayer(GradientCheckpointingLayer):
    """A layer whose sub-layers are joined to their input by addition, pre- or post-norm."""

    joints: tuple[str, ...]  # names of the sub-layers, in their order

    def __init__(self, config: DeepWideConfig) -> None:
        super().__init__()
        self.normalize_before = config.normalize_before
        self.dropout = Dropout(config.dropout)

    def residual(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> torch.Tensor:
        """Pre-norm: x + gate * dropout(sublayer(norm(x))). Post-norm: norm(x + gate * dropout(sublayer(x))).

        `gate` is a scalar or `[B, 1, 1]`; None means 1. `joint` is the name of the sub-layer, one of `joints`. Classes
        whose joints have weights of their own find these weights by the name.
        """
        output = self.addend(norm(x) if self.normalize_before else x, sublayer, gate)
        return x + output if self.normalize_before else norm(x + output)

    def last_residual(
        self,
        bottom: torch.Tensor,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Join a layer's last sub-layer as `residual` does; `bottom`, the layer's input `[B, time, D]`, is unused."""
        return self.residual(x, norm, sublayer, gate, self.joints[-1])

    def attend_to_itself(
        self, hidden_states: torch.Tensor, mask: Any, gate: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """Run the sub-layer `self_attn` on `[B, time, D]`, and join it to its input."""
        return self.residual(
            hidden_states,
            self.self_attn_layer_norm,
            lambda x: self.self_attn(x, mask, **kwargs)[0],
            gate,
            "self_attn",
        )

    def attend_to_source(
        self, hidden_states: torch.Tensor, mask: Any, memory: torch.Tensor, gate: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        """Run the decoder sub-layer `encoder_attn` on `[B, T, D]`, and join it to its input; `memory`: `[B, S, D]`."""
        return self.residual(
            hidden_states,
            self.encoder_attn_layer_norm,
            lambda x: self.encoder_attn(x, mask, memory, **kwargs)[0],
            gate,
            "encoder_attn",
        )

    def addend(
        self,
        x: torch.Tensor,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the term that a sub-layer adds to its input: gate * dropout(sublayer(x))."""
        output = self.dropout(sublayer(x))
        return output if gate is None else gate.to(output.dtype) * output


def remove_norms(module: nn.Module) -> None:
    """Replace the LayerNorms that are direct children of the module by the identity."""
    for name, part in list(module.named_children()):
        if isinstance(part, nn.LayerNorm):
            setattr(module, name, nn.Identity())


class EncoderLayer(ResidualLayer):
    """Self-attention, then feed-forward."""

    joints = ("self_attn", "feed_forward")

    def __init__(self, config: DeepWideConfig) -> None:
        super().__init__(config)
        self.self_attn = MultiBranchAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.feed_forward = MultiBranchFeedForward(config, config.encoder_ffn_dim)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        gate: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Transform `[B, S, D]` to `[B, S, D]`; `gate` weighs the sub-layers' outputs."""
        bottom = hidden_states
        hidden_states = self.attend_to_itself(hidden_states, attention_mask, gate, **kwargs)
        return self.last_residual(bottom, hidden_states, self.final_layer_norm, self.feed_forward, gate)


class DecoderLayer(ResidualLayer):
    """Causal self-attention, attention to the source, then feed-forward."""

    joints = ("self_attn", "encoder_attn", "feed_forward")

    def __init__(self, config: DeepWideConfig, layer_idx: int) -> None:
        super().__init__(config)
        heads = config.decoder_attention_heads
        self.self_attn = MultiBranchAttention(config, heads, is_causal=True, layer_idx=layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = MultiBranchAttention(config, heads, is_cross=True, layer_idx=layer_idx)
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
        """Transform `[B, T, D]` to `[B, T, D]`, and attend to `encoder_hidden_states` `[B, S, D]`, if given.

        `gate` weighs the sub-layers' outputs.
        """
        kwargs["past_key_values"] = past_key_values
        bottom = hidden_states
        hidden_states = self.attend_to_itself(hidden_states, attention_mask, gate, **kwargs)
        if encoder_hidden_states is not None:
            hidden_states = self.attend_to_source(
                hidden_states, encoder_attention_mask, encoder_hidden_states, gate, **kwargs
            )
        return self.last_residual(bottom, hidden_states, self.final_layer_norm, self.feed_forward, gate)
