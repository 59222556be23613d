"""Residual connections other than addition and a LayerNorm; each kind is a mixin class.

x is the input of a sub-layer F, and x_0 is the input of its layer. N and M are the numbers of encoder and decoder
layers. L is the number of layers in the layer's own stack. None of these kinds changes the width, or how layers are
joined to each other:

    ReZero     x + a F(x), without LayerNorms; a is 0 at first           (Bachlechner et al. 2021, arXiv 2003.04887)
    DeepNorm   LN(alpha x + F(x)), alpha by both depths                  (Wang et al. 2022, arXiv 2203.00555)
    B2T        LN(x_0 + x + F(x)) in the last sub-layer of a layer       (Takase et al. 2023, arXiv 2206.00330)
    SDU        x + F(x) + sigmoid(W_1 x + b_1) * (W_2 x + b_2)           (Chai et al. 2020, arXiv 2004.08178)

Shapes: B batch, T time, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .branches import input_projection, mark
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers import DecoderLayer, EncoderLayer, remove_norms


class ReZero:
    """A mixin for layers that start as the identity: x + a * dropout(sublayer(x)), without LayerNorms.

    One weight a per layer, initially 0, multiplies all its sub-layers.
    """

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        remove_norms(self)
        self.residual_weight = nn.Parameter(torch.zeros(1))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Set a to 0, so that the layer starts as the identity."""
        init.zeros_(self.residual_weight)

    def residual(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> torch.Tensor:
        """Join a sub-layer to its input; the norm is the identity, and the gate is a."""
        return super().residual(x, norm, sublayer, self.residual_weight, joint)


class ReZeroEncoderLayer(ReZero, EncoderLayer):
    """Self-attention and feed-forward, multiplied by a."""


class ReZeroDecoderLayer(ReZero, DecoderLayer):
    """Causal self-attention, attention to the source and feed-forward, multiplied by a."""


class DeepNorm:
    """A mixin for post-norm layers with a scaled input: LN(alpha * x + dropout(sublayer(x))).

    Alpha grows with the depth of the model. The initial weights of the projections `v_proj`, `out_proj`, `fc1` and
    `fc2` are multiplied by beta. Each stack has its own two constants, with N encoder layers and M decoder layers:

        encoder   alpha = 0.81 (N^4 M)^(1/16), beta = 0.87 (N^4 M)^(-1/16)
        decoder   alpha = (3 M)^(1/4),         beta = (12 M)^(-1/4)

    In torchscale, beta of an encoder with a decoder is 1.32 times as large, because 0.87 is inverted twice there.
    """

    projections = ("v_proj", "out_proj", "fc1", "fc2")  # and not q_proj and k_proj

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.alpha, beta = self.constants(config.encoder_layers, config.decoder_layers)
        scale_initial_weights(self, self.projections, beta)

    @staticmethod
    def constants(encoder_layers: int, decoder_layers: int) -> tuple[float, float]:
        """Return alpha and beta of the layer's stack, in a model with these numbers of layers."""
        raise NotImplementedError

    def residual(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> torch.Tensor:
        """Join a sub-layer to its input: norm(alpha * x + gate * dropout(sublayer(x)))."""
        return norm(torch.add(self.addend(x, sublayer, gate), x, alpha=self.alpha))


class DeepNormEncoderLayer(DeepNorm, EncoderLayer):
    """Self-attention and feed-forward, joined by DeepNorm."""

    @staticmethod
    def constants(encoder_layers: int, decoder_layers: int) -> tuple[float, float]:
        """Return alpha and beta of the encoder."""
        root = (encoder_layers**4 * decoder_layers) ** (1 / 16)
        return 0.81 * root, 0.87 / root


class DeepNormDecoderLayer(DeepNorm, DecoderLayer):
    """Causal self-attention, attention to the source and feed-forward, joined by DeepNorm."""

    @staticmethod
    def constants(encoder_layers: int, decoder_layers: int) -> tuple[float, float]:
        """Return alpha and beta of the decoder, which depend only on the depth of the decoder."""
        return (3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25


class BottomToTop:
    """A mixin for post-norm layers with a connection from the layer's input to its last norm (B2T).

    The connection bypasses the norms between. As in the released code, the initial weights of all projections of a
    layer are multiplied by L^(-1/2).
    """

    projections = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    depth_field: str  # the config's field that counts the layers of the stack

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        scale_initial_weights(self, self.projections, getattr(config, self.depth_field) ** -0.5)

    def last_residual(
        self,
        bottom: torch.Tensor,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Join the last sub-layer to x and to the layer's input: norm(bottom + x + gate * dropout(sublayer(x)))."""
        return norm(bottom + x + self.addend(x, sublayer, gate))


class BottomToTopEncoderLayer(BottomToTop, EncoderLayer):
    """Self-attention and feed-forward, with the connection around them."""

    depth_field = "encoder_layers"


class BottomToTopDecoderLayer(BottomToTop, DecoderLayer):
    """Causal self-attention, attention to the source and feed-forward, with the connection around all three."""

    depth_field = "decoder_layers"


class SelfDependencyUnit(nn.Module):
    """A gated unit at each position: sigmoid(W_1 x + b_1) * (W_2 x + b_2) (Highway Transformer, Eq. 3 and 4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = input_projection(2, width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, D]` to `[B, T, D]`."""
        gate, value = self.projection(x).chunk(2, dim=-1)
        return torch.sigmoid(gate) * value


class SelfDependent:
    """A mixin that adds a gated unit beside each sub-layer F.

    Post-norm: LN(x + dropout(F(x)) + SDU(x)). Pre-norm, as in the released code: x + dropout(F(LN(x))) + SDU(x). The
    released code can also use tanh instead of the sigmoid. Xu et al. (2024) count a unit for every sub-layer of both
    stacks.
    """

    def __init__(self, config: VanillaTransformerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self.units = nn.ModuleDict({joint: SelfDependencyUnit(config.d_model) for joint in self.joints})

    def residual(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> torch.Tensor:
        """Join a sub-layer and its unit to their input."""
        output = self.addend(norm(x) if self.normalize_before else x, sublayer, gate) + self.units[joint](x)
        return x + output if self.normalize_before else norm(x + output)


class SelfDependentEncoderLayer(SelfDependent, EncoderLayer):
    """Self-attention and feed-forward, with a unit beside each."""


class SelfDependentDecoderLayer(SelfDependent, DecoderLayer):
    """Causal self-attention, attention to the source and feed-forward, with a unit beside each."""


def scale_initial_weights(layer: nn.Module, projections: tuple[str, ...], gain: float) -> None:
    """Mark the projections with these names in a layer, so that their weights start `gain` times as large."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in projections:
            mark(module, gain=gain)
