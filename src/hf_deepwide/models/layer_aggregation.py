"""Networks that combine the outputs y_1 … y_L of all layers of a stack.

    AGG(x, y, …)  = LN(FF([x; y; …]) + x + y + …), FF two projections with a sigmoid between
    iterative     z_l = AGG(y_l, z_{l-1}), z_1 = y_1; the stack's output is z_L
    hierarchical  z_1 = AGG(y_1, y_2), z_i = AGG(y_{2i-1}, y_{2i}, z_{i-1}); layer 2i + 1 reads z_i
    EM routing    the layers vote for capsules, and each position weighs their votes by how well they agree

The first two are from Dou et al. 2018 (arXiv 1810.10181). EM routing is from Dou et al. 2019 (arXiv 1902.05770) and
Hinton et al. 2018 (Matrix Capsules with EM Routing). No released code was found. The papers' numbers of parameters
determine F, the inner width of a network: it equals the inner width of the stack's feed-forward networks. The
embeddings are not combined.

Shapes: B batch, T time, D model width, L layers of the stack, N capsules.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dropout import Dropout
from .layer_combination import Combined

FLOOR = 1e-3  # added to the variances of votes; without it two equal votes would have infinite density


class ConcatenationNetwork(nn.Module):
    """Two projections of several concatenated vectors: `[B, T, inputs * D]` to F features, to `[B, T, D]`.

    Dropout is at the same places as in a feed-forward network.
    """

    def __init__(self, config: VanillaTransformerConfig, inputs: int, ffn_dim: int, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.activation_dropout = Dropout(config.activation_dropout)
        self.dropout = Dropout(config.dropout)
        self.fc1 = nn.Linear(inputs * config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)

    def forward(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Transform several terms `[B, T, D]` to one `[B, T, D]`."""
        inner = self.activation_dropout(self.activation(self.fc1(torch.cat(tuple(terms), dim=-1))))
        return self.dropout(self.fc2(inner))


class AggregationNode(nn.Module):
    """AGG: a network on the concatenated terms. The terms are added to its output, and a LayerNorm follows."""

    def __init__(self, config: VanillaTransformerConfig, inputs: int, ffn_dim: int) -> None:
        super().__init__()
        self.network = ConcatenationNetwork(config, inputs, ffn_dim, nn.Sigmoid())
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, *terms: torch.Tensor) -> torch.Tensor:
        """Combine several terms `[B, T, D]` to one `[B, T, D]`."""
        return self.layer_norm(sum(terms, start=self.network(terms)))


class IterativeAggregation(nn.Module):
    """Nodes in a chain: each node combines the output of one more layer with the output of the previous node.

    The inputs of the layers do not change. A stack of one layer has no node.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int, ffn_dim: int) -> None:
        super().__init__()
        self.layers = layers
        self.nodes = nn.ModuleList([AggregationNode(config, 2, ffn_dim) for _ in range(layers - 1)])

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Pass y_l `[B, T, D]` on. After the last layer, combine it with the terms of `history`."""
        if len(history) < self.layers:
            return output, output
        _, combined, *others = (*history, output)
        for node, term in zip(self.nodes, others, strict=True):
            combined = node(term, combined)
        return combined, output


class HierarchicalAggregation(nn.Module):
    """A tree of nodes. A node follows every second layer, and its output is the input of the next layer.

    The paper's stacks have even numbers of layers. Our reading of an odd number: the last layer has a node of its own,
    with two terms: y_L and the output of the previous node. A stack of one layer has no node.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int, ffn_dim: int) -> None:
        super().__init__()
        self.layers = layers
        ends = [layer for layer in range(2, layers + 1) if layer % 2 == 0 or layer == layers]
        self.nodes = nn.ModuleList(
            [AggregationNode(config, 3 if layer % 2 == 0 and layer > 2 else 2, ffn_dim) for layer in ends]
        )

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Return the input of layer l + 1, or the stack's output, for y_l `[B, T, D]`; it is also the term.

        `history` holds the l earlier results: the embeddings, and for each layer y or the output of its node.
        """
        layer = len(history)
        if layer > 1 and layer % 2 == 0:
            output = self.nodes[layer // 2 - 1](history[-1], output, *history[-2:-1][: layer > 2])
        elif layer > 1 and layer == self.layers:
            output = self.nodes[-1](output, history[-1])
        return output, output


class EMRouting(nn.Module):
    """Routing by agreement: y_1 … y_L vote for N capsules of D / N features, whose outputs are concatenated.

    At each position, with the votes V_ln, the shares C_ln = 1/N at first, and i the features of a capsule:

        M   R_n = sum_l C_ln, mu_n = sum_l C_ln V_ln / R_n, s_n = sum_l C_ln (V_ln - mu_n)^2 / R_n + a small constant
            A_n = sigmoid(beta_n - gamma_n R_n - R_n sum_i (log s_ni + 1 + log 2 pi) / 2)
        E   C_ln proportional to A_n prod_i Normal(V_lni; mu_ni, s_ni), and they add up to 1 over n

    M and E alternate, and the output of the last M is A_n mu_n. Our reading: V_l = FF_l([y_1; …; y_l]), since the
    paper counts 108 D^2 parameters for a stack of six layers (sum of 4l + 4). There is no inverse temperature, and no
    norm after the routing.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int, ffn_dim: int) -> None:
        super().__init__()
        self.layers, self.iterations = layers, config.routing_iterations
        self.capsules = config.routing_capsules or config.d_model
        self.voters = nn.ModuleList(
            [
                ConcatenationNetwork(config, count, ffn_dim, ACT2FN[config.activation_function])
                for count in range(1, layers + 1)
            ]
        )
        self.capsule_bias = nn.Parameter(torch.zeros(self.capsules))
        self.capsule_cost = nn.Parameter(torch.zeros(self.capsules))

    def initialise(self, config: VanillaTransformerConfig) -> None:
        """Start without a preference for any capsule."""
        init.zeros_(self.capsule_bias)
        init.zeros_(self.capsule_cost)

    def forward(self, history: Sequence[torch.Tensor], output: torch.Tensor) -> Combined:
        """Pass y_l `[B, T, D]` on. After the last layer, route y_L and the terms of `history` but the embeddings."""
        if len(history) < self.layers:
            return output, output
        _, *outputs = (*history, output)
        votes = torch.stack([voter(outputs[: 1 + index]) for index, voter in enumerate(self.voters)], dim=-2)
        routed = self.route(votes.to(torch.promote_types(votes.dtype, torch.float32)))
        return routed.to(output.dtype), output

    def route(self, votes: torch.Tensor) -> torch.Tensor:
        """Route the votes `[B, T, L, D]` to `[B, T, D]`."""
        votes = votes.unflatten(-1, (self.capsules, -1))  # [B, T, L, N, D / N]
        mean, variance, active = self.maximise(votes, torch.full_like(votes[..., 0], -math.log(self.capsules)))
        for _ in range(self.iterations - 1):
            mean, variance, active = self.maximise(votes, self.expect(votes, mean, variance, active))
        return (active.sigmoid()[..., None] * mean).squeeze(-3).flatten(-2)

    def maximise(
        self, votes: torch.Tensor, log_shares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return mean and variance of each capsule's votes, `[B, T, 1, N, D / N]`, and the logit of A, `[B, T, 1, N]`.

        Shares are given as logarithms `[B, T, L, N]`, so that a capsule that receives nothing has a mean, too.
        """
        received = log_shares.exp().sum(-2, keepdim=True)
        weights = log_shares.softmax(-2)[..., None]  # shares / received
        mean = (weights * votes).sum(-3, keepdim=True)
        variance = (weights * (votes - mean).square()).sum(-3, keepdim=True) + FLOOR
        cost = received * (variance.log() + 1 + math.log(2 * math.pi)).sum(-1) / 2
        return mean, variance, self.capsule_bias - self.capsule_cost * received - cost

    def expect(
        self, votes: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, active: torch.Tensor
    ) -> torch.Tensor:
        """Return log C `[B, T, L, N]`: the shares of each layer's vote among the capsules, as logarithms."""
        density = -((votes - mean).square() / variance + variance.log()).sum(-1) / 2  # up to a constant
        return (nn.functional.logsigmoid(active) + density).log_softmax(-1)


AGGREGATIONS: dict[str, type[IterativeAggregation | HierarchicalAggregation | EMRouting]] = {
    "iterative": IterativeAggregation,
    "hierarchical": HierarchicalAggregation,
    "em_routing": EMRouting,
}
