"""Hyper-connections (Zhu et al. 2024, arXiv 2409.19606) and mHC (DeepSeek 2025, arXiv 2512.24880): several streams.

The residual stream is n streams H `[n, D]` at each position, all of them the embeddings at first. A sub-layer F reads
one mixture of them, its output is written to all, and the streams are mixed among themselves:

    u = A_m^T H,   o = F(LN(u)),   H <- beta o^T + A_r^T H

At the end of a stack the final norm reads the streams' mean. The paper has their sum, which the norm makes the same.

Hyper-connections: beta, A_m and A_r are weights. Dynamic ones add to them, with N the LayerNorm of each stream,
s_a tanh(N(H) W_a) and s_b tanh(N(H) w_b) at each position. A_r is not bounded, so that its products over a deep stack
can explode.

mHC, on the manifold of doubly stochastic matrices: with v = vec(H) / rms(vec(H)), all from one linear map of v,

    A_m = sigmoid(a_1 phi_1 v + b_1),   beta = 2 sigmoid(a_2 phi_2 v + b_2),   A_r = Sinkhorn(a_3 phi_3 v + b_3)

Sinkhorn's algorithm makes the rows and columns of exp(.) add up to 1, by turns; those that are summed over come last.
As in `deepseek_v4` of Transformers, 1e-6 is added to A_m and to what Sinkhorn's algorithm divides by.

Decoding reads one token after another, and its steps compute the same from weights in the form that a step uses.

Shapes: B batch, T time, D model width, n streams.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .joined_layers import Join, JoinedLayer, State
from .layers import DecoderLayer, EncoderLayer

EPSILON = 1e-6


class StreamConnection(Join):
    """Reads the streams for one sub-layer, mixes them, and writes the sub-layer's output to them."""

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        super().__init__(config, number, joints)
        self.streams = config.residual_streams
        self.home = number % self.streams  # the stream that this sub-layer reads most at first

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[A_m A_r] `[n, n + 1]` and beta `[n]` for streams `[B, T, n, D]`, of each position or of all."""
        raise NotImplementedError

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """u `[B, T, D]`, beta `[n]` or `[B, T, n]`, and A_r^T H `[B, T, n, D]` of streams H `[B, T, n, D]`."""
        with torch.autocast(streams.device.type, enabled=False):  # it would make bf16 of any matrix product
            alpha, beta = self.coefficients(streams.to(torch.promote_types(streams.dtype, torch.float32)))
            alpha = alpha.to(streams.dtype).expand(*streams.shape[:-2], -1, -1)  # a product for each position is fast
            mixed = alpha.transpose(-1, -2) @ streams
        return mixed[..., 0, :], beta.to(streams.dtype), mixed[..., 1:, :]


class HyperConnection(StreamConnection):
    """Static or dynamic hyper-connections, which start as the plain residual stream, n times."""

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        super().__init__(config, number, joints)
        width = config.d_model
        self.dynamic = config.dynamic_streams
        self.static_alpha = nn.Parameter(torch.zeros(self.streams, self.streams + 1))
        self.static_beta = nn.Parameter(torch.zeros(self.streams))
        if self.dynamic:
            self.dynamic_alpha = nn.Parameter(torch.zeros(width, self.streams + 1))
            self.dynamic_beta = nn.Parameter(torch.zeros(width))
            self.alpha_scale = nn.Parameter(torch.zeros(1))
            self.beta_scale = nn.Parameter(torch.zeros(1))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Read the home stream, keep all streams, write to all alike, and let nothing depend on the position."""
        alpha = torch.eye(self.streams, self.streams + 1).roll(1, 1)
        alpha[self.home, 0] = 1
        init.copy_(self.static_alpha, alpha)
        init.ones_(self.static_beta)
        if self.dynamic:
            init.zeros_(self.dynamic_alpha)
            init.zeros_(self.dynamic_beta)
            init.constant_(self.alpha_scale, 0.01)
            init.constant_(self.beta_scale, 0.01)

    def decoding_step(self, autocast: bool) -> Any:
        """Under autocast the joint itself, which turns it off."""
        return self if autocast else HyperStep(self)

    @classmethod
    def measure(cls, joins: Sequence["HyperConnection"]) -> dict[str, float]:
        """How many times as large a stream can become on its way through all static A_r, at 1 in a new model."""
        product = torch.eye(joins[0].streams, dtype=torch.float64)
        for join in joins:
            product = join.static_alpha[:, 1:].cpu().double().T @ product
        return {"stream_gain": product.abs().sum(1).max().item()}

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[A_m A_r] and beta: weights, or weights and what each position adds."""
        alpha, beta = self.static_alpha.to(streams.dtype), self.static_beta.to(streams.dtype)
        if not self.dynamic:
            return alpha, beta
        maps = torch.cat([self.dynamic_alpha, self.dynamic_beta[:, None]], dim=1).to(streams.dtype)
        added = torch.tanh(nn.functional.layer_norm(streams, streams.shape[-1:]) @ maps)
        alpha = torch.addcmul(alpha, self.alpha_scale.to(streams.dtype), added[..., :-1])
        return alpha, torch.addcmul(beta, self.beta_scale.to(streams.dtype), added[..., -1])


class ManifoldHyperConnection(StreamConnection):
    """Hyper-connections whose coefficients are positive and bounded, and whose A_r is doubly stochastic."""

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        super().__init__(config, number, joints)
        self.iterations = config.sinkhorn_iterations
        count = self.streams * (self.streams + 2)  # of A_m, beta, and A_r row by row
        self.coefficient_map = nn.Parameter(torch.zeros(count, self.streams * config.d_model))
        self.coefficient_bias = nn.Parameter(torch.zeros(count))
        self.coefficient_scale = nn.Parameter(torch.zeros(3))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Read mostly the home stream, nearly keep all streams, and write to all alike.

        If each sub-layer read all streams alike, the streams would stay nearly equal.
        """
        init.normal_(self.coefficient_map, std=0.02)
        self._initialise_biases()

    def initialise_plainly(self, config: VanillaTransformerConfig) -> None:
        """As `initialise`, but the weights do not depend on the position."""
        init.zeros_(self.coefficient_map)
        self._initialise_biases()

    def _initialise_biases(self) -> None:
        read = torch.full((self.streams,), -3.0)
        read[self.home] = 3.0
        mix = 6 * torch.eye(self.streams) - 3
        init.copy_(self.coefficient_bias, torch.cat([read, torch.zeros(self.streams), mix.flatten()]))
        init.constant_(self.coefficient_scale, 0.01)

    def decoding_step(self, autocast: bool) -> Any:
        """Under autocast the joint itself, which turns it off."""
        return self if autocast else ManifoldHyperStep(self)

    @classmethod
    def measure(cls, joins: Sequence["ManifoldHyperConnection"]) -> dict[str, float]:
        """The mean size of the scales: how much coefficients depend on the position."""
        return {
            "coefficient_scale": torch.stack([join.coefficient_scale.abs().mean() for join in joins]).mean().item()
        }

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[A_m A_r] and beta of each position."""
        n, flat = self.streams, streams.flatten(-2)
        inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPSILON)
        mapped = nn.functional.linear(flat, self.coefficient_map.to(flat.dtype)) * inverse_rms
        parts = [n, n, n * n]
        scale, bias = self.coefficient_scale.to(flat.dtype), self.coefficient_bias.to(flat.dtype)
        read, write, mix = map(torch.addcmul, bias.split(parts), scale.unbind(), mapped.split(parts, dim=-1))
        mix = sinkhorn(mix.unflatten(-1, (n, n)), self.iterations)
        read = torch.sigmoid(read) + EPSILON
        return torch.cat([read[..., None], mix], dim=-1), 2 * torch.sigmoid(write)


def sinkhorn(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    """A nearly doubly stochastic matrix of each `[..., n, n]`: rows and columns add up to 1, and columns exactly.

    The form is that of `deepseek_v4` in Transformers, which adds 1e-6 to the first matrix K and to each sum. All later
    matrices are K_ij / (r_i c_j). So only r and c change, by two operations where dividing the matrix takes three, and
    the backward pass keeps vectors instead of matrices: r_i <- sum_j K_ij / c_j + 1e-6 r_i, and c alike.
    """
    matrix = (torch.softmax(logits, dim=-1) + EPSILON).reshape(-1, *logits.shape[-2:])
    transposed = matrix.transpose(1, 2)
    rows = columns = torch.ones_like(matrix[:, :, :1])
    for iteration in range(iterations):
        if iteration:
            rows = torch.baddbmm(rows, matrix, columns.reciprocal(), beta=EPSILON)
        columns = torch.baddbmm(columns, transposed, rows.reciprocal(), beta=EPSILON)
    return (matrix / (rows * columns.transpose(1, 2))).view_as(logits)


def sinkhorn_in_place(logits: torch.Tensor, iterations: int) -> torch.Tensor:
    """`sinkhorn` of `[R, n, n]` without gradients, where most of the time goes into making small tensors."""
    matrix = torch.softmax(logits, dim=-1).add_(EPSILON)
    transposed = matrix.transpose(1, 2)
    rows, columns, inverse = matrix.new_ones(3, *matrix.shape[:2], 1).unbind()
    for iteration in range(iterations):
        if iteration:
            torch.reciprocal(columns, out=inverse)
            rows.baddbmm_(matrix, inverse, beta=EPSILON)
            torch.reciprocal(rows, out=inverse)
        columns.baddbmm_(transposed, inverse, beta=EPSILON)
    return matrix.div_(rows).div_(columns.transpose(1, 2))


class StreamStep:
    """A `StreamConnection` that reads one token of each row, from weights that stay as they are."""

    def __init__(self, join: StreamConnection) -> None:
        """Take the number of streams, and the precision of the coefficients."""
        self.streams = join.streams
        weight = next(join.parameters())
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `StreamConnection.coefficients`, of streams `[R, n, D]`."""
        raise NotImplementedError

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `StreamConnection.forward`, of streams `[R, 1, n, D]`."""
        streams = streams.squeeze(1)
        alpha, beta = self.coefficients(streams.to(self.dtype))
        mixed = alpha.to(streams.dtype).transpose(-1, -2) @ streams
        read, mixed = mixed.narrow(1, 0, 1), mixed.narrow(1, 1, self.streams)
        return read, beta.to(streams.dtype).unsqueeze(-2), mixed.unsqueeze(1)


class HyperStep(StreamStep):
    """`HyperConnection`: all coefficients are one table `[n, n + 2]`, that of A_m, A_r and beta."""

    def __init__(self, join: HyperConnection) -> None:
        """Put the weights of the three together."""
        super().__init__(join)
        self.table = torch.cat([join.static_alpha, join.static_beta[:, None]], dim=1).to(self.dtype)
        self.maps = None
        if join.dynamic:
            self.maps = torch.cat([join.dynamic_alpha, join.dynamic_beta[:, None]], dim=1).to(self.dtype)
            self.scale = torch.cat([join.alpha_scale.expand(self.streams + 1), join.beta_scale]).to(self.dtype)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, or weights and what each position adds."""
        table = self.table
        if self.maps is not None:
            added = torch.tanh(nn.functional.layer_norm(streams, streams.shape[-1:]) @ self.maps)
            table = torch.addcmul(table, self.scale, added)
        return table.narrow(-1, 0, self.streams + 1), table.select(-1, self.streams + 1)


class ManifoldHyperStep(StreamStep):
    """`ManifoldHyperConnection`: the scales are in the map, and one sigmoid serves A_m and beta."""

    def __init__(self, join: ManifoldHyperConnection) -> None:
        """Scale the map."""
        super().__init__(join)
        n, self.iterations = join.streams, join.iterations
        sizes = torch.tensor([n, n, n * n], device=join.coefficient_scale.device)
        scale = join.coefficient_scale.to(self.dtype).repeat_interleave(sizes)
        self.map = join.coefficient_map.to(self.dtype) * scale[:, None]
        self.bias = join.coefficient_bias.to(self.dtype)
        self.epsilon = torch.full((1,), EPSILON, dtype=self.dtype, device=self.map.device)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[A_m A_r] and beta of each row."""
        n, flat = self.streams, streams.flatten(1)
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        inverse_rms = torch.addcmul(self.epsilon, length, length, value=1 / flat.shape[1]).rsqrt_()
        mapped = torch.addcmul(self.bias, inverse_rms, nn.functional.linear(flat, self.map))
        read, write = mapped.narrow(1, 0, 2 * n).sigmoid().split(n, dim=1)
        mix = sinkhorn_in_place(mapped.narrow(1, 2 * n, n * n).view(-1, n, n), self.iterations)
        return torch.cat([read.add(EPSILON).unsqueeze(2), mix], dim=2), 2 * write


class Streams(JoinedLayer):
    """Joins sub-layers by streams; the state is all streams, and the layer's output is their mean."""

    join_class: ClassVar[type[StreamConnection]]

    def begin(self, hidden_states: torch.Tensor, state: State) -> torch.Tensor:
        """The streams `[B, T, n, D]`; all are the embeddings at first."""
        if state:
            return state[0]
        return hidden_states.unsqueeze(-2).repeat_interleave(self.joins["self_attn"].streams, dim=-2)

    def residual(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        gate: torch.Tensor | None = None,
        joint: str = "",
    ) -> torch.Tensor:
        """Let a sub-layer read the streams `[B, T, n, D]`, mix them, and write what it gives to each."""
        read, beta, mixed = self.joins[joint](x)
        output = self.addend(norm(read), sublayer, gate).to(mixed.dtype)
        return torch.addcmul(mixed, beta.unsqueeze(-1), output.unsqueeze(-2))

    def end(self, joined: torch.Tensor) -> State:
        """The streams' mean, and the streams."""
        return joined.mean(-2), joined


class HyperEncoderLayer(Streams, EncoderLayer):
    """Self-attention and feed-forward on streams."""

    join_class = HyperConnection
    inputs = 1


class HyperDecoderLayer(Streams, DecoderLayer):
    """Causal self-attention, attention to the source sentence and feed-forward on streams."""

    join_class = HyperConnection
    inputs = 3


class ManifoldHyperEncoderLayer(Streams, EncoderLayer):
    """Self-attention and feed-forward on streams that doubly stochastic matrices mix."""

    join_class = ManifoldHyperConnection
    inputs = 1


class ManifoldHyperDecoderLayer(Streams, DecoderLayer):
    """Causal self-attention, attention to the source sentence and feed-forward on such streams."""

    join_class = ManifoldHyperConnection
    inputs = 3
