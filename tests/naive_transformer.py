"""The papers' equations written out, one sentence, branch, head and position at a time, for tests to compare with.

Nothing here is shared with the package: parameters come from a state dict, random numbers from the caller. Where
training drops branches, `uniform(sublayer)` gives the U of Eq. 6: N numbers for a sub-layer of N branches, or N rows
of M numbers where heads are dropped one by one (Eq. 9); None drops nothing.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

Uniform = Callable[[str], Any] | None
Weights = dict[str, torch.Tensor]


def layer_norm(x: torch.Tensor, w: Weights, name: str) -> torch.Tensor:
    """One vector `[D]`: (x - mean) / sqrt(variance + 1e-5), scaled and shifted."""
    mean = sum(x) / len(x)
    variance = sum((x - mean) ** 2) / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-5) * w[name + ".weight"] + w[name + ".bias"]


def block(w: Weights, name: str, branch: int, branches: int, along: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Branch `branch`'s share of a stored projection: its rows (along 0) or columns (along 1), and its bias."""
    weight, bias = w[name + ".weight"], w.get(name + ".bias")
    size = weight.shape[along] // branches
    part = slice(branch * size, (branch + 1) * size)
    if bias is None:
        bias = 0.0
    else:
        width = len(bias) // branches
        bias = bias[branch * width : (branch + 1) * width]
    return (weight[part] if along == 0 else weight[:, part]), bias


def keep(uniform: Uniform, sublayer: str, rho: float, branch: int, head: int | None = None) -> float:
    """1{U >= rho} / (1 - rho) (Eq. 6, 8, 9); 1 in inference."""
    if uniform is None:
        return 1.0
    u = uniform(sublayer)[branch]
    u = float(u) if head is None else float(u[head])
    return (u >= rho) / (1 - rho)


def merge_factor(branches: int, how: str) -> float:
    """1/N of Eq. 4; the released code's second mean makes it 1/N^2."""
    return {"mean": 1 / branches, "double_mean": 1 / branches / branches}[how]


def attention(
    w: Weights,
    name: str,
    config: Any,
    heads: int,
    queries: torch.Tensor,
    memory: torch.Tensor,
    visible: Callable[[int, int], bool],
    uniform: Uniform = None,
) -> torch.Tensor:
    """(1/N) sum_i beta_i attn_M(Q, K, V; theta_i) of one sentence (Eq. 1, 2, 4, 5, 9, 10), `[T, D]`."""
    branches, width = config.attention_branches, config.d_model // heads
    merged = []
    for t, x in enumerate(queries):
        total = torch.zeros_like(x)
        for i in range(branches):
            wq, bq = block(w, name + ".q_proj", i, branches, 0)
            wk, bk = block(w, name + ".k_proj", i, branches, 0)
            wv, bv = block(w, name + ".v_proj", i, branches, 0)
            wo, bo = block(w, name + ".out_proj", i, branches, 1)
            q = wq @ x + bq
            concatenated = []
            for j in range(heads):
                part = slice(j * width, (j + 1) * width)
                seen = [s for s in range(len(memory)) if visible(t, s)]
                scores = [torch.exp(q[part] @ (wk @ memory[s] + bk)[part] / math.sqrt(width)) for s in seen]
                head = sum(e * (wv @ memory[s] + bv)[part] for e, s in zip(scores, seen, strict=True)) / sum(scores)
                if config.drop_unit == "head":
                    head = head * keep(uniform, name, config.drop_branch, i, j)
                concatenated.append(head)
            branch = wo @ torch.cat(concatenated) + bo
            if config.drop_unit == "branch":
                branch = branch * keep(uniform, name, config.drop_branch, i)
            total = total + branch
        merged.append(total * merge_factor(branches, config.branch_merge))
    return torch.stack(merged)


def feed_forward(w: Weights, name: str, config: Any, xs: torch.Tensor, uniform: Uniform = None) -> torch.Tensor:
    """(1/N_f) sum_i FFN(x; w_i) 1{U_i >= rho} / (1 - rho) of one sentence (Eq. 3, 7, 8), `[T, D]`."""
    branches = config.ffn_branches
    activation = {"relu": lambda z: z.clamp(min=0), "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2}
    merged = []
    for x in xs:
        total = torch.zeros_like(x)
        for i in range(branches):
            w1, b1 = block(w, name + ".fc1", i, branches, 0)
            w2, b2 = block(w, name + ".fc2", i, branches, 1)
            inner = activation[config.activation_function](w1 @ x + b1)
            total = total + (w2 @ inner + b2) * keep(uniform, name, config.drop_branch, i)
        merged.append(total * merge_factor(branches, config.branch_merge))
    return torch.stack(merged)


def sinusoid(position: int, dim: int, kind: str) -> torch.Tensor:
    """The vector of the 0-based `position`, `[D]`.

    fairseq (conventions.md): index position + 2; sines of 10000^(-k/(D/2 - 1)), then cosines. Marian: Vaswani et al.,
    section 3.5, sin and cos of position / 10000^(2k/D), here with all sines before all cosines.
    """
    half = dim // 2
    if kind == "sinusoidal":
        angles = [(position + 2) * 10000 ** (-k / (half - 1)) for k in range(half)]
    else:
        angles = [position / 10000 ** (2 * k / dim) for k in range(half)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def embed(w: Weights, stack: str, config: Any, ids: list[int]) -> torch.Tensor:
    """sqrt(D) * token + position of one sentence without its padding, `[T, D]`."""
    rows = []
    for position, token in enumerate(ids):
        row = w[f"{stack}.embed_tokens.weight"][token]
        if config.scale_embedding:
            row = row * math.sqrt(config.d_model)
        if config.position_embedding_type == "learned":
            row = row + w[f"{stack}.embeddings.positions.weight"][position]
        else:
            # the package keeps its table in float32
            row = row + sinusoid(position, config.d_model, config.position_embedding_type).float().double()
        if config.layernorm_embedding:
            row = layer_norm(row, w, f"{stack}.embeddings.layer_norm")
        rows.append(row)
    return torch.stack(rows)


def residual(
    w: Weights, norm: str, pre: bool, xs: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """x + f(LN(x)), or LN(x + f(x))."""
    if pre:
        return xs + f(torch.stack([layer_norm(x, w, norm) for x in xs]))
    return torch.stack([layer_norm(x, w, norm) for x in xs + f(xs)])


def encoder_layer(w: Weights, name: str, config: Any, xs: torch.Tensor, uniform: Uniform = None) -> torch.Tensor:
    pre, heads = config.normalize_before, config.encoder_attention_heads
    xs = residual(
        w,
        name + ".self_attn_layer_norm",
        pre,
        xs,
        lambda y: attention(w, name + ".self_attn", config, heads, y, y, lambda t, s: True, uniform),
    )
    return residual(
        w,
        name + ".final_layer_norm",
        pre,
        xs,
        lambda y: feed_forward(w, name + ".feed_forward", config, y, uniform),
    )


def decoder_layer(
    w: Weights, name: str, config: Any, xs: torch.Tensor, memory: torch.Tensor, uniform: Uniform = None
) -> torch.Tensor:
    pre, heads = config.normalize_before, config.decoder_attention_heads
    xs = residual(
        w,
        name + ".self_attn_layer_norm",
        pre,
        xs,
        lambda y: attention(w, name + ".self_attn", config, heads, y, y, lambda t, s: s <= t, uniform),
    )
    xs = residual(
        w,
        name + ".encoder_attn_layer_norm",
        pre,
        xs,
        lambda y: attention(w, name + ".encoder_attn", config, heads, y, memory, lambda t, s: True, uniform),
    )
    return residual(
        w,
        name + ".final_layer_norm",
        pre,
        xs,
        lambda y: feed_forward(w, name + ".feed_forward", config, y, uniform),
    )


def logits(w: Weights, config: Any, source: list[int], target: list[int], uniform: Uniform = None) -> torch.Tensor:
    """Logits `[T, V]` of one pair of sentences without padding; names in `w` are those of the headless model."""
    xs = embed(w, "encoder", config, source)
    for layer in range(config.encoder_layers):
        xs = encoder_layer(w, f"encoder.layers.{layer}", config, xs, uniform)
    if config.normalize_before:
        xs = torch.stack([layer_norm(x, w, "encoder.layer_norm") for x in xs])
    ys = embed(w, "decoder", config, target)
    for layer in range(config.decoder_layers):
        ys = decoder_layer(w, f"decoder.layers.{layer}", config, ys, xs, uniform)
    if config.normalize_before:
        ys = torch.stack([layer_norm(y, w, "decoder.layer_norm") for y in ys])
    return torch.stack([w["lm_head.weight"] @ y + w.get("lm_head.bias", 0) for y in ys])
