"""Layer aggregation written out, one position, capsule and feature at a time, for `naive_transformer`.

`outputs` are the embeddings and the outputs of all layers so far, each `[T, D]`.
"""

import math
from typing import Any

import torch
from naive_dropout import drop

Weights = dict[str, torch.Tensor]


def network(w: Weights, name: str, vectors: list[torch.Tensor], activation: str) -> torch.Tensor:
    """W_2 act(W_1 [x; y; ...] + b_1) + b_2 of vectors `[D]`, with dropout as in a feed-forward network."""
    functions = {
        "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
        "relu": lambda z: z.clamp(min=0),
        "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    }
    inner = functions[activation](w[name + ".fc1.weight"] @ torch.cat(vectors) + w[name + ".fc1.bias"])
    return drop(w[name + ".fc2.weight"] @ drop(inner, "activation_dropout") + w[name + ".fc2.bias"])


def aggregate(w: Weights, name: str, *terms: torch.Tensor) -> torch.Tensor:
    """LN(FF([x; y; ...]) + x + y + ...) at each position (Dou et al. 2018), `[T, D]`."""
    rows = []
    for vectors in zip(*terms, strict=True):
        x = network(w, name + ".network", list(vectors), "sigmoid")
        for vector in vectors:
            x = x + vector
        mean = sum(x) / len(x)
        deviation = torch.sqrt(sum((x - mean) ** 2) / len(x) + 1e-5)
        rows.append((x - mean) / deviation * w[name + ".layer_norm.weight"] + w[name + ".layer_norm.bias"])
    return torch.stack(rows)


def iterative(w: Weights, stack: str, config: Any, outputs: list[torch.Tensor]) -> torch.Tensor:
    """z_l = AGG(y_l, z_{l-1}) with z_1 = y_1. Before the last layer, the output of the layer itself."""
    if len(outputs) - 1 < getattr(config, f"{stack}_layers"):
        return outputs[-1]
    z = outputs[1]
    for layer in range(2, len(outputs)):
        z = aggregate(w, f"{stack}.combination.nodes.{layer - 2}", outputs[layer], z)
    return z


def hierarchical(w: Weights, stack: str, config: Any, outputs: list[torch.Tensor]) -> torch.Tensor:
    """z_1 = AGG(y_1, y_2), z_i = AGG(y_{2i-1}, y_{2i}, z_{i-1}). A last layer without a partner: AGG(y_L, z)."""
    layers, done = getattr(config, f"{stack}_layers"), len(outputs) - 1
    z = None
    for i in range(1, done // 2 + 1):
        name = f"{stack}.combination.nodes.{i - 1}"
        pair = outputs[2 * i - 1], outputs[2 * i]
        z = aggregate(w, name, *pair) if z is None else aggregate(w, name, *pair, z)
    if done % 2 == 0:
        return outputs[0] if z is None else z
    if done == layers and z is not None:
        return aggregate(w, f"{stack}.combination.nodes.{done // 2}", outputs[-1], z)
    return outputs[-1]


def em_routing(w: Weights, stack: str, config: Any, outputs: list[torch.Tensor]) -> torch.Tensor:
    """The outputs of the capsules that the layers vote for, concatenated (Dou et al. 2019), `[T, D]`."""
    layers = getattr(config, f"{stack}_layers")
    if len(outputs) - 1 < layers:
        return outputs[-1]
    name, capsules, rows = f"{stack}.combination", config.routing_capsules or config.d_model, []
    width = config.d_model // capsules
    for t in range(len(outputs[0])):
        votes = []
        for layer in range(layers):
            seen = [outputs[k][t] for k in range(1, layer + 2)]
            votes.append(network(w, f"{name}.voters.{layer}", seen, config.activation_function))
        share = [[torch.tensor(1.0, dtype=torch.float64) / capsules] * capsules for _ in votes]
        for iteration in range(config.routing_iterations):
            mean, variance, active = [], [], []
            for n in range(capsules):
                own = [vote[n * width : (n + 1) * width] for vote in votes]
                received = sum(share[k][n] for k in range(layers))
                mu = sum(share[k][n] * own[k] for k in range(layers)) / received
                var = sum(share[k][n] * (own[k] - mu) ** 2 for k in range(layers)) / received + 1e-3
                cost = received * sum(torch.log(torch.sqrt(v)) + 0.5 + math.log(2 * math.pi) / 2 for v in var)
                score = w[f"{name}.capsule_bias"][n] - w[f"{name}.capsule_cost"][n] * received - cost
                mean.append(mu)
                variance.append(var)
                active.append(1 / (1 + torch.exp(-score)))
            if iteration == config.routing_iterations - 1:
                break
            for k, vote in enumerate(votes):
                likely = []
                for n in range(capsules):
                    p = active[n]
                    for i in range(width):
                        v, mu, var = vote[n * width + i], mean[n][i], variance[n][i]
                        p = p * torch.exp(-((v - mu) ** 2) / (2 * var)) / torch.sqrt(2 * math.pi * var)
                    likely.append(p)
                share[k] = [p / sum(likely) for p in likely]
        rows.append(torch.cat([a * mu for a, mu in zip(active, mean, strict=True)]))
    return torch.stack(rows)


AGGREGATIONS = {"iterative": iterative, "hierarchical": hierarchical, "em_routing": em_routing}
