"""Attention residuals (Kimi 2026, arXiv 2603.15031): each sub-layer reads a learned mixture of all outputs before it.

v_0 are the embeddings, and v_i is the output of sub-layer i, the sources. Sub-layer l reads

    h_l = sum_{i<l} p_i v_i,   p = softmax_i(w_l . v_i / rms(v_i)),   rms(v) = sqrt(mean(v^2) + 1e-6)      (Eq. 2-4)

of one learned query w_l, and computes v_l = F_l(LN(h_l)). The first sub-layer reads v_0. One more query mixes all
sources, and its mixture is what the final norm reads. In blocks, the sources are v_0, the sums of the outputs of each
finished block, and the sum so far of the block that is not finished.

All queries start at 0. Then p is uniform, and h_l is the residual sum over the number of sources. Here h_l is
multiplied by this number, which the LayerNorm behind it removes again, but for its epsilon. So a new model computes
the plain pre-norm stack, and a trained one can start from it.

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
    """What a joint takes and gives: what the next sub-layer reads, and all that it could read.

    Attributes:
        mixture: h `[B, T, D]`.
        scales: 1 / rms of each source, in float32, `[B, T, K]`.
        values: the K sources, each `[B, T, D]`.
    """

    mixture: torch.Tensor
    scales: torch.Tensor
    values: tuple[torch.Tensor, ...]


def inverse_rms(value: torch.Tensor) -> torch.Tensor:
    """1 / rms of a source `[B, T, D]`, in float32 or better, `[B, T, 1]`."""
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    return torch.rsqrt(value.square().mean(-1, keepdim=True) + EPSILON)


class DepthAttention(Join):
    """The query behind one sub-layer: it mixes what the next sub-layer reads, or the final norm.

    So a stack has as many queries as sub-layers, and none for the first, which has one source to read.
    """

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        super().__init__(config, number, joints)
        block = config.attention_block
        each = 1 if block is None else block * joints  # sub-layers of a source
        self.begins_source, self.sources = number % each == 0, number // each + 2  # those behind this sub-layer
        self.room = (config.decoder_layers * joints - 1) // each + 2  # those behind a decoder, which decodes stepwise
        self.depth_query = nn.Parameter(torch.zeros(config.d_model))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Weigh all sources alike."""
        init.zeros_(self.depth_query)

    @classmethod
    def measure(cls, joins: Sequence["DepthAttention"]) -> dict[str, float]:
        """The mean length of the queries: 0 where all sources weigh alike."""
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
        """Under autocast the joint itself, which turns it off."""
        return self if autocast else DepthAttentionStep(self)

    def weights(self, values: tuple[torch.Tensor, ...], scales: torch.Tensor) -> torch.Tensor:
        """p `[B, T, K]`, in the dtype of the scales."""
        # A copy: a loaded weight can lie at an odd address, where products of a matrix and a vector round differently.
        query = self.depth_query.to(scales.dtype, copy=True)[:, None]
        logits = torch.cat([value.to(scales.dtype) @ query for value in values], dim=-1)
        return torch.softmax(logits * scales, dim=-1)


class DepthAttentionStep:
    """A `DepthAttention` that reads one token of each row, for all joints of a stack.

    All sources stand in one block `[K, R, D]` with room for those to come, and their scales in another `[K, R]`. So a
    joint takes a few operations, however many sources there are. The first joint of the stack makes the blocks.
    """

    def __init__(self, join: DepthAttention) -> None:
        """Take the query, and how many sources there are behind the sub-layer."""
        self.dtype = torch.promote_types(join.depth_query.dtype, torch.float32)
        self.query = join.depth_query.to(self.dtype, copy=True)
        self.begins_source, self.sources, self.room = join.begins_source, join.sources, join.room

    def __call__(self, sources: Sources, output: torch.Tensor) -> Sources:
        """Add the output of a sub-layer `[R, 1, D]` to the sources, and mix them."""
        count, (block,), scales = self.sources, sources.values, sources.scales
        if scales.dim() == 3:  # of `begin`: the embeddings alone
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
    """Joins sub-layers by attention to the sources; the state is their scales, and the sources one by one."""

    join_class = DepthAttention

    def begin(self, hidden_states: torch.Tensor, state: State) -> Sources:
        """The sources so far; the embeddings are the first."""
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
        """Let a sub-layer read the mixture, and mix anew with its output."""
        return self.joins[joint](x, self.addend(norm(x.mixture), sublayer, gate))

    def end(self, joined: Sources) -> State:
        """What the next layer reads, and all that it could read."""
        return joined.mixture, joined.scales, *joined.values


class AttentionResidualEncoderLayer(AttentionResidual, EncoderLayer):
    """Self-attention and feed-forward, which read mixtures of the sources."""

    inputs = 1


class AttentionResidualDecoderLayer(AttentionResidual, DecoderLayer):
    """Causal self-attention, attention to the source sentence and feed-forward, which read mixtures of the sources."""

    inputs = 3
