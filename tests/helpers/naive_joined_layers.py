"""Attention residuals, hyper-connections and mHC written out, one position at a time; see `naive_transformer`.

Between sub-layers, a state replaces the hidden states `[T, D]`. `read` computes the input of the final norm from it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from naive_dropout import drop

Weights = dict[str, torch.Tensor]
Norm = Callable[[torch.Tensor], torch.Tensor]  # of one vector
Sublayer = Callable[[torch.Tensor], torch.Tensor]  # of all positions
JOINED = ("attention", "hyper", "mhc")


class Outputs(NamedTuple):
    """The embeddings and the outputs of all sub-layers so far, and the input of the next sub-layer, each `[T, D]`."""

    values: list[torch.Tensor]
    mixture: torch.Tensor


class Streams(NamedTuple):
    """H of each position, `[T, n, D]`."""

    rows: torch.Tensor


def read(state: Any) -> torch.Tensor:
    """The input of the final norm, `[T, D]`."""
    if isinstance(state, Outputs):
        return state.mixture
    return torch.stack([sum(rows) / len(rows) for rows in state.rows]) if isinstance(state, Streams) else state


def join(w: Weights, name: str, config: Any, state: Any, norm: Norm, f: Sublayer) -> Outputs | Streams:
    """The state after sub-layer `f`. The join's weights are under `name`. The first state is the embeddings."""
    return (attend if config.residual == "attention" else stream)(w, name, config, state, norm, f)


def sources_of(values: list[torch.Tensor], sublayers: int | None) -> list[torch.Tensor]:
    """v_0 and the other outputs. With blocks of `sublayers` sub-layers: v_0 and the sum of each block's outputs."""
    if sublayers is None:
        return values
    outputs = values[1:]
    return [values[0], *(sum(outputs[i : i + sublayers]) for i in range(0, len(outputs), sublayers))]


def rms(v: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(sum(v**2) / len(v) + 1e-6)


def attend(w: Weights, name: str, config: Any, state: Any, norm: Norm, f: Sublayer) -> Outputs:
    """v_l = F(LN(h_l)), and h_{l+1} = K sum_i p_i v_i over K sources, with `name`'s query (Eq. 2-4, times K)."""
    if not isinstance(state, Outputs):
        state = Outputs([state], state)
    output = drop(f(torch.stack([norm(h) for h in state.mixture])))
    values = [*state.values, output]
    joints = 2 if name.startswith("encoder") else 3
    sources = sources_of(values, None if config.attention_block is None else config.attention_block * joints)
    query, mixtures = w[name + ".depth_query"], []
    for t in range(len(output)):
        weights = [torch.exp(query @ (v[t] / rms(v[t]))) for v in sources]
        mixtures.append(len(sources) * sum(p * v[t] for p, v in zip(weights, sources, strict=True)) / sum(weights))
    return Outputs(values, torch.stack(mixtures))


def stream(w: Weights, name: str, config: Any, state: Any, norm: Norm, f: Sublayer) -> Streams:
    """H_j <- beta_j F(LN(u)) + sum_i A_r[i, j] H_i, with u = sum_i A_m[i] H_i."""
    n = config.residual_streams
    if not isinstance(state, Streams):
        state = Streams(torch.stack([torch.stack([x] * n) for x in state]))
    of_positions = [(hyper if config.residual == "hyper" else manifold)(w, name, config, rows) for rows in state.rows]
    reads = [
        sum(a_m[i] * rows[i] for i in range(n)) for (a_m, _, _), rows in zip(of_positions, state.rows, strict=True)
    ]
    outputs = drop(f(torch.stack([norm(u) for u in reads])))
    return Streams(
        torch.stack(
            [
                torch.stack([beta[j] * o + sum(a_r[i][j] * rows[i] for i in range(n)) for j in range(n)])
                for (_, a_r, beta), o, rows in zip(of_positions, outputs, state.rows, strict=True)
            ]
        )
    )


def hyper(w: Weights, name: str, config: Any, rows: torch.Tensor) -> tuple[Any, Any, Any]:
    """A_m `[n]`, A_r `[n, n]` and beta `[n]`; dynamic ones depend on the streams `[n, D]` of the position."""
    n, a_m, a_r, beta = len(rows), [], [], []
    for i, row in enumerate(rows):
        of_row, of_beta = w[f"{name}.static_alpha"][i], w[f"{name}.static_beta"][i]
        if config.dynamic_streams:
            mean = sum(row) / len(row)
            normal = (row - mean) / torch.sqrt(sum((row - mean) ** 2) / len(row) + 1e-5)
            maps = w[f"{name}.dynamic_alpha"], w[f"{name}.dynamic_beta"]
            of_row = of_row + w[f"{name}.alpha_scale"] * torch.tanh(torch.stack([normal @ c for c in maps[0].T]))
            of_beta = of_beta + w[f"{name}.beta_scale"][0] * torch.tanh(normal @ maps[1])
        a_m.append(of_row[0])
        a_r.append([of_row[1 + j] for j in range(n)])
        beta.append(of_beta)
    return a_m, a_r, beta


def manifold(w: Weights, name: str, config: Any, rows: torch.Tensor) -> tuple[Any, Any, Any]:
    """A_m = sigmoid, beta = 2 sigmoid and A_r = Sinkhorn of a linear map of the streams `[n, D]` of the position."""
    n, v = len(rows), torch.cat(list(rows))
    v = v / rms(v)
    scale, bias = w[f"{name}.coefficient_scale"], w[f"{name}.coefficient_bias"]
    raw = [row @ v for row in w[f"{name}.coefficient_map"]]
    a_m = [1e-6 + 1 / (1 + torch.exp(-(scale[0] * raw[i] + bias[i]))) for i in range(n)]
    beta = [2 / (1 + torch.exp(-(scale[1] * raw[n + i] + bias[n + i]))) for i in range(n)]
    exponents = [
        [torch.exp(scale[2] * raw[k] + bias[k]) for k in range(start, start + n)]
        for start in range(2 * n, 2 * n + n * n, n)
    ]
    m = [[e / sum(row) + 1e-6 for e in row] for row in exponents]
    for iteration in range(config.sinkhorn_iterations):
        if iteration > 0:
            m = [[e / (sum(row) + 1e-6) for e in row] for row in m]
        columns = [sum(m[i][j] for i in range(n)) + 1e-6 for j in range(n)]
        m = [[m[i][j] / columns[j] for j in range(n)] for i in range(n)]
    return a_m, m, beta
