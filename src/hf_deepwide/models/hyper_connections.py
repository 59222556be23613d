"""Hyper-connections (Zhu et al. 2024, arXiv 2409.19606) and mHC (DeepSeek 2025, arXiv 2512.24880): several streams.

The residual stream is n streams H `[n, D]` at each position. All of them start as the embeddings. A sub-layer F reads
one mixture of the streams. Its output is written to all streams, and the streams are mixed among themselves:

    u = A_m^T H,   o = F(LN(u)),   H <- beta o^T + A_r^T H

At the end of a stack the final norm reads the streams' mean. The paper takes their sum, which is the same after the
norm.

Hyper-connections: beta, A_m and A_r are weights. Dynamic hyper-connections add s_a tanh(N(H) W_a) to A_m and A_r, and
s_b tanh(N(H) w_b) to beta, at each position. N is the LayerNorm of each stream. A_r is not bounded, so the product of
all A_r in a deep stack can explode.

mHC, on the manifold of doubly stochastic matrices: with v = vec(H) / rms(vec(H)), all from one linear map of v,

    A_m = sigmoid(a_1 phi_1 v + b_1),   beta = 2 sigmoid(a_2 phi_2 v + b_2),   A_r = Sinkhorn(a_3 phi_3 v + b_3)

Sinkhorn's algorithm makes the rows and the columns of exp(.) add up to 1, in alternation. The last step is on the
columns: a column holds the weights of one new stream. As in `deepseek_v4` of Transformers, 1e-6 is added to A_m and to
the divisors in Sinkhorn's algorithm.

In decoding, `HyperStep` and `ManifoldHyperStep` compute the same for one token, from weights prepared once.

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
    """The connection of one sub-layer to the streams: it reads, mixes and writes them."""

    def __init__(self, config: VanillaTransformerConfig, number: int, joints: int) -> None:
        super().__init__(config, number, joints)
        self.streams = config.residual_streams
        self.home = number % self.streams  # the stream that this sub-layer reads most at first

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [A_m A_r] `[n, n + 1]` and beta `[n]` for streams `[B, T, n, D]`.

        Coefficients that depend on the position have the dimensions `[B, T]` before these.
        """
        raise NotImplementedError

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return u `[B, T, D]`, beta `[n]` or `[B, T, n]`, and A_r^T H `[B, T, n, D]` for streams H `[B, T, n, D]`."""
        with torch.autocast(streams.device.type, enabled=False):  # autocast would compute these products in bf16
            alpha, beta = self.coefficients(streams.to(torch.promote_types(streams.dtype, torch.float32)))
            alpha = alpha.to(streams.dtype).expand(*streams.shape[:-2], -1, -1)  # one product per position is fast
            mixed = alpha.transpose(-1, -2) @ streams
        return mixed[..., 0, :], beta.to(streams.dtype), mixed[..., 1:, :]


class HyperConnection(StreamConnection):
    """Static or dynamic hyper-connections. At first each of the n streams is a plain residual stream."""

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
        """Start by reading the home stream, keeping all streams, and writing the same to all, at every position."""
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
        """Return a `HyperStep`. Under autocast return the connection itself, which turns autocast off."""
        return self if autocast else HyperStep(self)

    @classmethod
    def measure(cls, joins: Sequence["HyperConnection"]) -> dict[str, float]:
        """Return `stream_gain`: how much all static A_r together can enlarge a stream. It is 1 in a new model."""
        product = torch.eye(joins[0].streams, dtype=torch.float64)
        for join in joins:
            product = join.static_alpha[:, 1:].cpu().double().T @ product
        return {"stream_gain": product.abs().sum(1).max().item()}

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [A_m A_r] and beta: weights, plus the term of each position in dynamic hyper-connections."""
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
        """Start by reading mostly the home stream, nearly keeping all streams, and writing the same to all.

        If each sub-layer read all streams with equal weights, the streams would stay nearly equal.
        """
        init.normal_(self.coefficient_map, std=0.02)
        self._initialise_biases()

    def initialise_plainly(self, config: VanillaTransformerConfig) -> None:
        """Start as `initialise` does, but with coefficients that do not depend on the position."""
        init.zeros_(self.coefficient_map)
        self._initialise_biases()

    def _initialise_biases(self) -> None:
        read = torch.full((self.streams,), -3.0)
        read[self.home] = 3.0
        mix = 6 * torch.eye(self.streams) - 3
        init.copy_(self.coefficient_bias, torch.cat([read, torch.zeros(self.streams), mix.flatten()]))
        init.constant_(self.coefficient_scale, 0.01)

    def decoding_step(self, autocast: bool) -> Any:
        """Return a `ManifoldHyperStep`. Under autocast return the connection itself, which turns autocast off."""
        return self if autocast else ManifoldHyperStep(self)

    @classmethod
    def measure(cls, joins: Sequence["ManifoldHyperConnection"]) -> dict[str, float]:
        """Return the mean absolute scale: it shows how much the coefficients depend on the position."""
        return {
            "coefficient_scale": torch.stack([join.coefficient_scale.abs().mean() for join in joins]).mean().item()
        }

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [A_m A_r] `[B, T, n, n + 1]` and beta `[B, T, n]`."""
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
    """Make each matrix `[..., n, n]` nearly doubly stochastic: rows add up to nearly 1, and columns to 1.

    As `deepseek_v4` in Transformers does, add 1e-6 to the first matrix K and to each sum. Every later matrix is
    K_ij / (r_i c_j), so only r and c have to be updated: r_i <- sum_j K_ij / c_j + 1e-6 r_i, and c in the same way.
    An update takes two operations, while dividing the matrix takes three. The backward pass keeps vectors instead of
    matrices.
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
    """Compute `sinkhorn` of `[R, n, n]` in place, without gradients: creating small tensors would take most time."""
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
    """A `StreamConnection` for decoding: it reads one token of each row, and its weights do not change."""

    def __init__(self, join: StreamConnection) -> None:
        """Take the number of streams and the dtype of the coefficients from `join`."""
        self.streams = join.streams
        weight = next(join.parameters())
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `StreamConnection.coefficients` returns, for streams `[R, n, D]`."""
        raise NotImplementedError

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `StreamConnection.forward` returns, for streams `[R, 1, n, D]`."""
        streams = streams.squeeze(1)
        alpha, beta = self.coefficients(streams.to(self.dtype))
        mixed = alpha.to(streams.dtype).transpose(-1, -2) @ streams
        read, mixed = mixed.narrow(1, 0, 1), mixed.narrow(1, 1, self.streams)
        return read, beta.to(streams.dtype).unsqueeze(-2), mixed.unsqueeze(1)


class HyperStep(StreamStep):
    """The decoding step of `HyperConnection`. One table `[n, n + 2]` holds A_m, A_r and beta."""

    def __init__(self, join: HyperConnection) -> None:
        """Concatenate the weights of A_m, A_r and beta."""
        super().__init__(join)
        self.table = torch.cat([join.static_alpha, join.static_beta[:, None]], dim=1).to(self.dtype)
        self.maps = None
        if join.dynamic:
            self.maps = torch.cat([join.dynamic_alpha, join.dynamic_beta[:, None]], dim=1).to(self.dtype)
            self.scale = torch.cat([join.alpha_scale.expand(self.streams + 1), join.beta_scale]).to(self.dtype)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [A_m A_r] and beta: weights, plus the term of each row in dynamic hyper-connections."""
        table = self.table
        if self.maps is not None:
            added = torch.tanh(nn.functional.layer_norm(streams, streams.shape[-1:]) @ self.maps)
            table = torch.addcmul(table, self.scale, added)
        return table.narrow(-1, 0, self.streams + 1), table.select(-1, self.streams + 1)


class ManifoldHyperStep(StreamStep):
    """The decoding step of `ManifoldHyperConnection`. The map contains the scales; A_m and beta share one sigmoid."""

    def __init__(self, join: ManifoldHyperConnection) -> None:
        """Multiply the map by the scales."""
        super().__init__(join)
        n, self.iterations = join.streams, join.iterations
        sizes = torch.tensor([n, n, n * n], device=join.coefficient_scale.device)
        scale = join.coefficient_scale.to(self.dtype).repeat_interleave(sizes)
        self.map = join.coefficient_map.to(self.dtype) * scale[:, None]
        self.bias = join.coefficient_bias.to(self.dtype)
        self.epsilon = torch.full((1,), EPSILON, dtype=self.dtype, device=self.map.device)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [A_m A_r] `[R, n, n + 1]` and beta `[R, n]`."""
        n, flat = self.streams, streams.flatten(1)
        length = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
        inverse_rms = torch.addcmul(self.epsilon, length, length, value=1 / flat.shape[1]).rsqrt_()
        mapped = torch.addcmul(self.bias, inverse_rms, nn.functional.linear(flat, self.map))
        read, write = mapped.narrow(1, 0, 2 * n).sigmoid().split(n, dim=1)
        mix = sinkhorn_in_place(mapped.narrow(1, 2 * n, n * n).view(-1, n, n), self.iterations)
        return torch.cat([read.add(EPSILON).unsqueeze(2), mix], dim=2), 2 * write


class Streams(JoinedLayer):
    """A mixin that joins sub-layers by streams. The state is all streams, and the layer's output is their mean."""

    join_class: ClassVar[type[StreamConnection]]

    def begin(self, hidden_states: torch.Tensor, state: State) -> torch.Tensor:
        """Return the streams `[B, T, n, D]`. In the first layer of a stack, all streams are the embeddings."""
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
        """Let a sub-layer read the streams `[B, T, n, D]`, mix the streams, and write its output to each stream."""
        read, beta, mixed = self.joins[joint](x)
        output = self.addend(norm(read), sublayer, gate).to(mixed.dtype)
        return torch.addcmul(mixed, beta.unsqueeze(-1), output.unsqueeze(-2))

    def end(self, joined: torch.Tensor) -> State:
        """Return the mean of the streams, and the streams."""
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
    """Causal self-attention, attention to the source and feed-forward on streams that such matrices mix."""

    join_class = ManifoldHyperConnection
    inputs = 3
