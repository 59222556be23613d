"""An encoder layer as a step of a solver of ordinary differential equations (Li et al. 2022, "ODE Transformer").

Let layer(x) = x + F(x). The second-order Runge-Kutta method evaluates the layer twice with the same weights:

    F_1 = F(x),  F_2 = F(x + F_1),  y = x + g F_1 + (1 - g) F_2,  g = sigmoid(w . [F_1; F_2] + b)

g is learned: one number for each position, from one gate for the whole encoder. The released code uses layer(x) in the
place of F(x), so F includes the residual. Then y grows twofold or threefold in each layer, and only DLCL's norms hide
this growth. Here, as in the paper, F is what a layer adds to x. Shapes: B batch, S time, D model width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers import EncoderLayer


class SolverGate(nn.Module):
    """The weight of the first of two evaluations: g = sigmoid(w . [F_1; F_2] + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.solver_weight = nn.Parameter(torch.zeros(2 * width))
        self.solver_bias = nn.Parameter(torch.zeros(1))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start like a projection to one feature: Xavier-uniform, with a bias of 0."""
        bound = math.sqrt(6 / (len(self.solver_weight) + 1))
        init.uniform_(self.solver_weight, -bound, bound)
        init.zeros_(self.solver_bias)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Map F_1 and F_2, `[B, S, D]` each, to g `[B, S, 1]`, in float32 or higher precision."""
        dtype = torch.promote_types(first.dtype, torch.float32)
        first_weight, second_weight = self.solver_weight.to(dtype).chunk(2)
        # products and a sum, because autocast would compute a matrix product in low precision
        scores = (first.to(dtype) * first_weight + second.to(dtype) * second_weight).sum(-1, keepdim=True)
        return torch.sigmoid(scores + self.solver_bias.to(dtype))


class RungeKuttaEncoderLayer(EncoderLayer):
    """Self-attention and feed-forward, evaluated twice. Dropout is drawn again in the second evaluation.

    Hooks and gradient checkpointing see one layer.
    """

    mean_gate: torch.Tensor | None = None  # of the last forward pass in training, over all positions

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        gate: torch.Tensor | None = None,
        *,
        solver: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `solver` weighs the two evaluations, `gate` what the sub-layers add."""
        once = super().forward(hidden_states, attention_mask, gate, **kwargs)
        twice = super().forward(once, attention_mask, gate, **kwargs)
        first, second = once - hidden_states, twice - once
        weight = solver(first, second)
        if self.training:
            self.mean_gate = weight.detach().mean()
        return torch.addcmul(hidden_states + second, weight.to(first), first - second)
