"""Attention residuals (Kimi 2026, arXiv 2603.15031): each sub-layer reads a learned mixture of all earlier outputs.

The sources are the embeddings v_0, and the output v_i of each sub-layer i. Sub-layer l reads

    h_l = sum_{i<l} p_i v_i,   p = softmax_i(w_l . v_i / rms(v_i)),   rms(v) = sqrt(mean(v^2) + 1e-6)      (Eq. 2-4)

with one learned query w_l, and computes v_l = F_l(LN(h_l)). The first sub-layer reads v_0. One more query mixes all
sources for the final norm. With blocks of layers, the sources are v_0, the sum of the outputs in each finished block,
and the sum so far in the unfinished block.

All queries start at 0. Then p is uniform, and h_l is the residual sum divided by the number of sources. Here h_l is
multiplied by this number. The LayerNorm that follows removes the factor again, up to its epsilon. So a new model
computes the same as the plain pre-norm stack, and can start from the weights of a trained plain stack.

Shapes: B batch, T time, D model width, K sources.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .joined_layers import Join, JoinedLayer, State
from .layers import DecoderLayer, EncoderLayer

EPSILON = 1e-6


class Sources(NamedTuple):
    """The input and output of a joint: the mixture for the next sub-layer, and all sources to mix.

    Attributes:
        mixture: h `[B, T, D]`.
        scales: 1 / rms of each source, in float32, `[B, T, K]`.
        values: the K sources, each `[B, T, D]`.
    """

    mixture: torch.Tensor
    scales: torch.Tensor
    values: tuple[torch.Tensor, ...]


def inverse_rms(value: torch.Tensor) -> torch.Tensor:
    """Return 1 / rms `[B, T, 1]` of a source `[B, T, D]`, in float32 or better."""
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    return torch.rsqrt(value.square().mean(-1, keepdim=True) + EPSILON)


class DepthAttention(Join):
    """The query that follows one sub-layer: it mixes the input of the next sub-layer, or of the final norm.

    So a stack has as many queries as sub-layers. The first sub-layer needs no query, because it has one source.
    """

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        super().__init__(config, number, joints)
        block = config.attention_block
        each = 1 if block is None else block * joints  # sub-layers of a source
        self.begins_source, self.sources = number % each == 0, number // each + 2  # the count after this sub-layer
        self.room = (config.decoder_layers * joints - 1) // each + 2  # the count after a whole decoder, for decoding
        self.depth_query = nn.Parameter(torch.zeros(config.d_model))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Set the query to zero, so that all sources weigh alike."""
        init.zeros_(self.depth_query)

    @classmethod
    def measure(cls, joins: Sequence["DepthAttention"]) -> dict[str, float]:
        """Return the mean length of the queries: 0 if all sources weigh alike."""
        return {"query_length": torch.stack([join.depth_query.float().norm() for join in joins]).mean().item()}

    def forward(self, sources: Sources, output: torch.Tensor) -> Sources:
        """Add the output of a sub-layer `[B, T, D]` to the sources, and mix them."""
        first, last = sources.values[0], sources.values[-1]
        output = output.to(first.dtype)
        with torch.autocast(first.device.type, enabled=False):
            if self.begins_source:
                values, scales = (*sources.values, output), [sources.scales]
            else:
                values, scales = (*sources.values[:-1], last + output), [sources.scales[..., :-1]]
            scales = torch.cat([*scales, inverse_rms(values[-1])], dim=-1)
            weights = self.weights(values, scales) * len(values)
            mixture = weights[..., :1] * first
            for weight, value in zip(weights.split(1, dim=-1)[1:], values[1:], strict=True):
                mixture = torch.addcmul(mixture, weight, value)
        return Sources(mixture.to(first.dtype), scales, values)

    def decoding_step(self, autocast: bool) -> Any:
        """Return the step for decoding; under autocast, return this joint itself, which turns autocast off."""
        return self if autocast else DepthAttentionStep(self)

    def weights(self, values: tuple[torch.Tensor, ...], scales: torch.Tensor) -> torch.Tensor:
        """Return p `[B, T, K]`, in the dtype of the scales."""
        # A copy: a loaded weight can lie at an unaligned address, where matrix-vector products round differently.
        query = self.depth_query.to(scales.dtype, copy=True)[:, None]
        logits = torch.cat([value.to(scales.dtype) @ query for value in values], dim=-1)
        return torch.softmax(logits * scales, dim=-1)


class DepthAttentionStep:
    """`DepthAttention` for one new token in each of R rows.

    The joints of a stack share one block `[K, R, D]` for all sources, with room for later sources. A second block
    `[K, R]` holds the scales of the sources. So a joint takes a few operations for any number of sources. The first
    joint of the stack makes both blocks.
    """

    def __init__(self, join: DepthAttention) -> None:
        """Copy the query, and take the number of sources after the sub-layer."""
        self.dtype = torch.promote_types(join.depth_query.dtype, torch.float32)
        self.query = join.depth_query.to(self.dtype, copy=True)
        self.begins_source, self.sources, self.room = join.begins_source, join.sources, join.room

    def __call__(self, sources: Sources, output: torch.Tensor) -> Sources:
        """Add the output of a sub-layer `[R, 1, D]` to the sources, and mix them."""
        count, (block,), scales = self.sources, sources.values, sources.scales
        if scales.dim() == 3:  # from `begin`: the only source is the embeddings
            embeddings, block = block, output.new_empty(self.room, *output.shape[::2], dtype=self.dtype)
            block.select(0, 0).copy_(embeddings.squeeze(1))
            scales = torch.cat([scales.view(1, -1), scales.new_empty(self.room - 1, len(output))])
        newest, output = block.select(0, count - 1), output.squeeze(1)
        newest.copy_(output if self.begins_source else newest.to(output.dtype) + output)
        scales.narrow(0, count - 1, 1).copy_(inverse_rms(newest).view(1, -1))
        values = block.narrow(0, 0, count)
        weights = torch.softmax((values @ self.query) * scales.narrow(0, 0, count), dim=0) * count
        mixture = torch.bmm(weights.t().unsqueeze(1), values.transpose(0, 1))
        return Sources(mixture.to(output.dtype), scales, (block,))


class AttentionResidual(JoinedLayer):
    """A layer that joins its sub-layers by attention to the sources.

    Its state is the tensor of the scales, then each source as one tensor.
    """

    join_class = DepthAttention

    def begin(self, hidden_states: torch.Tensor, state: State) -> Sources:
        """Return the sources so far, of which the embeddings are the first."""
        if not state:
            return Sources(hidden_states, inverse_rms(hidden_states), (hidden_states,))
        return Sources(hidden_states, state[0], state[1:])

    def residual(
        self,
        x: Sources,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> Sources:
        """Compute a sub-layer on the mixture, and mix the sources again, with the new output among them."""
        return self.joins[joint](x, self.addend(norm(x.mixture), sublayer, gate))

    def end(self, joined: Sources) -> State:
        """Return the mixture that the next layer reads, and the state: the scales and the sources."""
        return joined.mixture, joined.scales, *joined.values


class AttentionResidualEncoderLayer(AttentionResidual, EncoderLayer):
    """Self-attention and feed-forward, which read mixtures of the sources."""

    inputs = 1


class AttentionResidualDecoderLayer(AttentionResidual, DecoderLayer):
    """Causal self-attention, attention to the source sentence and feed-forward, which read mixtures of the sources."""

    inputs = 3
