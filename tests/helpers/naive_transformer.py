"""The papers' equations written out, one sentence, branch, head and position at a time, for tests to compare with.

No code here is shared with the package: parameters come from a state dict, random numbers from the caller. Where
training drops branches, `uniform(sublayer)` returns the U of Eq. 5: N numbers for a sub-layer with N branches, or N
rows of M numbers if single heads are dropped (Eq. 9). If `uniform` is None, nothing is dropped.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from naive_convolution import dynamic_convolution
from naive_depthwise_lstm import step_in_depth
from naive_dropout import drop
from naive_evolved import evolved_decoder_cell, evolved_encoder_cell
from naive_joined_layers import JOINED, join, read
from naive_layer_aggregation import AGGREGATIONS
from naive_luna import luna_logits

Uniform = Callable[[str], Any] | None
Weights = dict[str, torch.Tensor]


def layer_norm(x: torch.Tensor, w: Weights, name: str, eps: float = 1e-5) -> torch.Tensor:
    """LayerNorm of one vector `[D]`: (x - mean) / sqrt(variance + eps), scaled and shifted."""
    mean = sum(x) / len(x)
    variance = sum((x - mean) ** 2) / len(x)
    return (x - mean) / torch.sqrt(variance + eps) * w[name + ".weight"] + w[name + ".bias"]


def block(w: Weights, name: str, branch: int, branches: int, along: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The part of a stored projection that belongs to `branch`: rows (along 0) or columns (along 1), and its bias."""
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
    """1{U >= rho} / (1 - rho) (Eq. 5, 8, 9); 1 in inference."""
    if uniform is None:
        return 1.0
    u = uniform(sublayer)[branch]
    u = float(u) if head is None else float(u[head])
    return (u >= rho) / (1 - rho)


def merge_factor(branches: int, how: str) -> float:
    """1/N of Eq. 4, or 1/N^2 with the second mean of the released code."""
    return {"mean": 1 / branches, "double_mean": 1 / branches / branches}[how]


def branch_attention(
    w: Weights,
    name: str,
    heads: int,
    branch: int,
    branches: int,
    t: int,
    x: torch.Tensor,
    memory: torch.Tensor,
    visible: Callable[[int, int], bool],
    keep_head: Callable[[int], float] = lambda head: 1.0,
) -> torch.Tensor:
    """attn_M of branch `branch` for the query `x` `[D]` at position `t` (Eq. 1, 2, 9, 10), `[D]`."""
    width = len(x) // heads
    wq, bq = block(w, name + ".q_proj", branch, branches, 0)
    wk, bk = block(w, name + ".k_proj", branch, branches, 0)
    wv, bv = block(w, name + ".v_proj", branch, branches, 0)
    wo, bo = block(w, name + ".out_proj", branch, branches, 1)
    q = wq @ x + bq
    concatenated = []
    for j in range(heads):
        part = slice(j * width, (j + 1) * width)
        seen = [s for s in range(len(memory)) if visible(t, s)]
        keys = {s: (wk @ memory[s] + bk)[part] + relative_key(w, name, branch, branches, s - t) for s in seen}
        scores = [torch.exp(q[part] @ keys[s] / math.sqrt(width)) for s in seen]
        head = sum(e * (wv @ memory[s] + bv)[part] for e, s in zip(scores, seen, strict=True)) / sum(scores)
        concatenated.append(head * keep_head(j))
    return wo @ torch.cat(concatenated) + bo


def relative_key(w: Weights, name: str, branch: int, branches: int, distance: int) -> torch.Tensor | float:
    """a of a key that is `distance` places after its query (Shaw et al. 2018, Eq. 4), `[H]`; 0 without such vectors.

    An encoder's branch has vectors for the distances -k to k, in this order. A decoder's has them for 0, -1 to -k.
    """
    table = w.get(f"{name}.relative_keys.weight")
    if table is None:
        return 0.0
    rows = table[branch * len(table) // branches : (branch + 1) * len(table) // branches]
    if name.startswith("decoder"):
        return rows[min(-distance, len(rows) - 1)]
    most = len(rows) // 2
    return rows[max(-most, min(distance, most)) + most]


def branch_feed_forward(
    w: Weights, name: str, activation: str, branch: int, branches: int, x: torch.Tensor
) -> torch.Tensor:
    """FFN(x; w_i) at one position (Eq. 3), `[D]`."""
    functions = {"relu": lambda z: z.clamp(min=0), "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2}
    w1, b1 = block(w, name + ".fc1", branch, branches, 0)
    w2, b2 = block(w, name + ".fc2", branch, branches, 1)
    return w2 @ drop(functions[activation](w1 @ x + b1), "activation_dropout") + b2


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
    """(1/N) sum_i beta_i attn_M(Q, K, V; theta_i) of one sentence (Eq. 1, 2, 4, 5, 9, 10), `[T, D]`.

    With dynamic convolution as `layer_form`, a convolution replaces self-attention.
    """
    if getattr(config, "layer_form", "transformer") == "dynamic_convolution" and name.endswith(".self_attn"):
        return dynamic_convolution(w, name, config, queries)
    branches, rho = config.attention_branches, config.drop_branch
    merged = []
    for t, x in enumerate(queries):
        total = torch.zeros_like(x)
        for i in range(branches):
            keep_chunk = None
            if config.drop_unit == "chunk":
                weight, keep_head = 1.0, lambda head: 1.0
                keep_chunk = functools.partial(keep, uniform, name, rho, i)
            elif config.drop_unit == "head":
                weight, keep_head = 1.0, functools.partial(keep, uniform, name, rho, i)
            else:
                weight, keep_head = keep(uniform, name, rho, i), lambda head: 1.0
            output = branch_attention(w, name, heads, i, branches, t, x, memory, visible, keep_head)
            if keep_chunk is not None:  # as in the released code: after the output projection
                width = len(x) // heads
                output = torch.cat([output[j * width : (j + 1) * width] * keep_chunk(j) for j in range(heads)])
            total = total + weight * output
        merged.append(total * merge_factor(branches, config.branch_merge))
    return torch.stack(merged)


def feed_forward(w: Weights, name: str, config: Any, xs: torch.Tensor, uniform: Uniform = None) -> torch.Tensor:
    """(1/N_f) sum_i FFN(x; w_i) 1{U_i >= rho} / (1 - rho) of one sentence (Eq. 3, 7, 8), `[T, D]`."""
    branches = config.ffn_branches
    if not config.join_ffn:
        return torch.stack([unjoined_feed_forward(w, name, config, x, uniform) for x in xs])
    merged = []
    for x in xs:
        total = torch.zeros_like(x)
        for i in range(branches):
            branch = branch_feed_forward(w, name, config.activation_function, i, branches, x)
            total = total + branch * keep(uniform, name, config.drop_branch, i)
        merged.append(total * merge_factor(branches, config.branch_merge))
    return torch.stack(merged)


def unjoined_feed_forward(w: Weights, name: str, config: Any, x: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """Merge the branches before the activation and again after fc2, each time with other U's (released code)."""
    n, rho = config.ffn_branches, config.drop_branch
    share = merge_factor(n, config.branch_merge)
    inner = outer = 0
    for i in range(n):
        weight, bias = block(w, name + ".fc1", i, n, 0)
        inner = inner + share * keep(uniform, name, rho, i) * (weight @ x + bias)
    inner = drop(inner.clamp(min=0), "activation_dropout")
    for i in range(n):
        weight, bias = block(w, name + ".fc2", i, n, 1)
        outer = outer + share * keep(uniform, name + ".fc2", rho, i) * (weight @ inner + bias)
    return outer


def sinusoid(position: int, dim: int, kind: str) -> torch.Tensor:
    """The vector of the 0-based `position`, `[D]`.

    fairseq (conventions.md): index position + 2; sines of 10000^(-k/(D/2 - 1)), then cosines. Marian: Vaswani et al.,
    section 3.5, sin and cos of position / 10000^(2k/D), but with all sines before all cosines.
    """
    half = dim // 2
    if kind == "sinusoidal":
        angles = [(position + 2) * 10000 ** (-k / (half - 1)) for k in range(half)]
    else:
        angles = [position / 10000 ** (2 * k / dim) for k in range(half)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def embed(w: Weights, stack: str, config: Any, ids: list[int]) -> torch.Tensor:
    """sqrt(D) * token + position, for one sentence without padding, `[T, D]`."""
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
        rows.append(drop(row))
    return torch.stack(rows)


def deepnorm_alpha(stack: str, n: int, m: int) -> float:
    """DeepNorm's weight of a sub-layer's input, in a model with n encoder and m decoder layers (Figure 2)."""
    return 0.81 * math.pow(math.pow(n, 4) * m, 0.0625) if stack == "encoder" else math.sqrt(math.sqrt(3 * m))


def residual(
    w: Weights,
    norm: str,
    config: Any,
    xs: torch.Tensor,
    f: Callable[[torch.Tensor], torch.Tensor],
    bottom: torch.Tensor | None = None,
) -> torch.Tensor:
    """x + f(LN(x)) (pre-norm) or LN(x + f(x)) (post-norm), with dropout on the output of f.

    ReZero: x + a f(x), with the layer's `residual_weight` a. DeepNorm: LN(alpha x + f(x)). B2T, in a layer's last
    sub-layer: LN(bottom + x + f(x)), where `bottom` is the input of the layer. Latent depth, if the layer has a `z`:
    x + z f(LN(x)) (Eq. 2 as the released code applies it).
    """
    layer = norm.rpartition(".")[0]
    pre, kind = config.normalize_before, getattr(config, "residual", "add")
    if kind in JOINED:
        joint = norm.rpartition(".")[2].removesuffix("_layer_norm").replace("final", "feed_forward")
        return join(w, f"{layer}.joins.{joint}", config, xs, lambda x: layer_norm(x, w, norm), f)
    if kind == "deepnorm":
        alpha = deepnorm_alpha(norm.partition(".")[0], config.encoder_layers, config.decoder_layers)
        return torch.stack([layer_norm(alpha * x + drop(y), w, norm) for x, y in zip(xs, f(xs), strict=True)])
    if kind == "b2t" and bottom is not None:
        pairs = zip(bottom, xs, f(xs), strict=True)
        return torch.stack([layer_norm(x_0 + x + drop(y), w, norm) for x_0, x, y in pairs])
    if kind == "sdu":
        joint = norm.rpartition(".")[2].removesuffix("_layer_norm").replace("final", "feed_forward")
        seen = torch.stack([layer_norm(x, w, norm) for x in xs]) if pre else xs
        units = [self_dependency(w, f"{layer}.units.{joint}.projection", x) for x in xs]
        sums = [x + drop(y) + u for x, y, u in zip(xs, f(seen), units, strict=True)]
        return torch.stack(sums if pre else [layer_norm(x, w, norm) for x in sums])
    weight = w.get(layer + ".residual_weight")
    if weight is not None:
        return torch.stack([x + weight[0] * drop(y) for x, y in zip(xs, f(xs), strict=True)])
    if pre:
        return xs + w.get(layer + ".z", 1.0) * drop(f(pre_norm(w, config, norm, xs)))
    return torch.stack([layer_norm(x, w, norm) for x in xs + drop(f(xs))])


def pre_norm(w: Weights, config: Any, norm: str, xs: torch.Tensor) -> torch.Tensor:
    """LN(x) at each position, or x itself in a model without norms (latent depth)."""
    return torch.stack([layer_norm(x, w, norm) for x in xs]) if getattr(config, "layer_norms", True) else xs


def self_dependency(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """SDU(x) = sigmoid(W_1 x + b_1) (W_2 x + b_2), feature by feature (Chai et al. 2020), `[D]`."""
    (w1, b1), (w2, b2) = (block(w, name, i, 2, 0) for i in range(2))
    rows = zip(w1, b1, w2, b2, strict=True)
    return torch.stack([(v @ x + c) / (1 + torch.exp(-(u @ x + b))) for u, b, v, c in rows])


def transparent(w: Weights, config: Any, outputs: list[torch.Tensor], layer: int) -> torch.Tensor:
    """z_j = sum_k s_kj y_k with s = softmax over k of W (Bapna et al. 2018); if pre-norm, then the encoder's norm."""
    scores = [torch.exp(drop(row)[layer]) for row in w["encoder.combination.mixture_logits"]]
    mixed = sum(score * y for score, y in zip(scores, outputs, strict=True)) / sum(scores)
    return torch.stack([layer_norm(x, w, "encoder.layer_norm") for x in mixed]) if config.normalize_before else mixed


def selections(w: Weights, config: Any, posterior: int = 0) -> Weights:
    """z of each layer in evaluation, as `{layer}.z` (latent depth): 1{a >= 0}, sigmoid(a), or sigmoid(a / tau)."""
    z = {}
    for stack in ("encoder", "decoder"):
        for layer, a in enumerate(w.get(f"{stack}.layer_selection.layer_logits", [[]] * (posterior + 1))[posterior]):
            tau = {"soft": 1.0, "tempered": config.gumbel_temperature}.get(config.inference_selection)
            z[f"{stack}.layers.{layer}.z"] = float(a >= 0) if tau is None else 1 / (1 + torch.exp(-a / tau))
    return z


def combine(w: Weights, stack: str, config: Any, outputs: list[torch.Tensor]) -> torch.Tensor:
    """The input of the next layer, given all outputs y_0 ... y_l: y_l, or DLCL's combination (Wang et al., Eq. 8, 9).

    Pre-norm, DLCL normalises each output except y_0. Post-norm, it normalises the sum, unless y_0 stands alone.
    DenseFormer averages every k-th output, counted back from the last. If its period does not divide l, it gives y_l.
    """
    how = getattr(config, "layer_aggregation", None)
    if how in (None, "transparent"):
        return outputs[-1]
    if how in AGGREGATIONS:
        return AGGREGATIONS[how](w, stack, config, outputs)
    name, last = f"{stack}.combination", len(outputs) - 1
    if how == "denseformer":
        if last == 0 or last % config.aggregation_period:
            return outputs[-1]
        average, k = torch.zeros_like(outputs[-1]), last
        while k >= 0:
            average = average + w[f"{name}.combination_weights"][last, k] * outputs[k]
            k -= config.aggregation_dilation
        return average
    rows = []
    for t in range(len(outputs[0])):
        row = 0
        for k, output in enumerate(outputs):
            y = output[t]
            if config.normalize_before and k > 0:
                y = layer_norm(y, w, f"{name}.layer_norms.{k - 1}")
            row = row + w[f"{name}.combination_weights"][last, k] * y
        if not config.normalize_before and last > 0:
            row = layer_norm(row, w, f"{name}.layer_norms.{last - 1}")
        rows.append(row)
    return torch.stack(rows)


def multipath_sum(w: Weights, name: str, config: Any, x: torch.Tensor, paths: list[torch.Tensor]) -> torch.Tensor:
    """beta X + sum_k alpha_k PathNorm_k(F_k) at one position (Multi-Path, Eq. 4-7), `[D]`, with dropout on the sum.

    The new features are those of the paper: the mean of each combination of n - 1 of the n paths.
    """
    n = config.encoder_paths
    features = dict(enumerate(paths))
    if config.more_features and n >= 3:
        for chosen in itertools.combinations(range(n), n - 1):
            (left_out,) = set(range(n)) - set(chosen)
            features[n + left_out] = sum(paths[i] for i in chosen) / (n - 1)
    if config.learnable_path_weights:
        alpha, beta = w[name + ".alpha"], w[name + ".beta"]
    elif config.path_norm:
        alpha, beta = [config.path_weight_init or 1 / math.sqrt(n)] * len(features), 1.0
    else:
        alpha, beta = [config.path_weight_init or 1 / len(features)] * len(features), 1.0
    total = torch.zeros_like(x)
    for k, feature in features.items():
        if config.path_norm:
            feature = layer_norm(feature, w, f"{name}.path_norms.{k}")
        total = total + alpha[k] * feature
    return beta * x + drop(total)


def multipath_encoder_layer(w: Weights, name: str, config: Any, xs: torch.Tensor) -> torch.Tensor:
    """Y = beta X + sum_k alpha_k PathNorm_k(Func_k(LN(X))) with attention as Func, then with FFN; or post-norm."""
    n, heads = config.encoder_paths, config.encoder_attention_heads

    def attentions(ys: torch.Tensor, t: int) -> list[torch.Tensor]:
        return [
            branch_attention(w, f"{name}.self_attn", heads, i, n, t, ys[t], ys, lambda t, s: True) for i in range(n)
        ]

    def networks(ys: torch.Tensor, t: int) -> list[torch.Tensor]:
        function = config.activation_function
        return [branch_feed_forward(w, f"{name}.feed_forward", function, i, n, ys[t]) for i in range(n)]

    for norm, sublayer, paths in (
        ("self_attn_layer_norm", "self_attn_paths", attentions),
        ("final_layer_norm", "feed_forward_paths", networks),
    ):
        ys = xs
        if config.normalize_before:
            ys = torch.stack([layer_norm(x, w, f"{name}.{norm}") for x in xs])
        xs = torch.stack([multipath_sum(w, f"{name}.{sublayer}", config, x, paths(ys, t)) for t, x in enumerate(xs)])
        if not config.normalize_before:
            xs = torch.stack([layer_norm(x, w, f"{name}.{norm}") for x in xs])
    return xs


def encoder_layer(w: Weights, name: str, config: Any, xs: torch.Tensor, uniform: Uniform = None) -> torch.Tensor:
    if config.model_type == "multipath_transformer":
        return multipath_encoder_layer(w, name, config, xs)
    if getattr(config, "layer_form", "transformer") == "evolved":
        return evolved_cell(w, name, config, xs)
    if getattr(config, "encoder_solver", None) == "rk2":
        return runge_kutta(w, lambda ys: plain_encoder_layer(w, name, config, ys, uniform), xs)
    return plain_encoder_layer(w, name, config, xs, uniform)


def runge_kutta(w: Weights, layer: Callable[[torch.Tensor], torch.Tensor], xs: torch.Tensor) -> torch.Tensor:
    """x + g F_1 + (1 - g) F_2 with F(x) = layer(x) - x, F_1 = F(x), F_2 = F(x + F_1) (ODE Transformer, RK2)."""
    f1 = layer(xs) - xs
    f2 = layer(xs + f1) - (xs + f1)
    rows = []
    for x, a, b in zip(xs, f1, f2, strict=True):
        score = w["encoder.solver.solver_bias"][0]
        for weight, feature in zip(w["encoder.solver.solver_weight"], [*a, *b], strict=True):
            score = score + weight * feature
        g = 1 / (1 + torch.exp(-score))
        rows.append(x + g * a + (1 - g) * b)
    return torch.stack(rows)


def plain_encoder_layer(w: Weights, name: str, config: Any, xs: torch.Tensor, uniform: Uniform = None) -> torch.Tensor:
    heads, bottom = config.encoder_attention_heads, xs
    if getattr(config, "layer_form", "transformer") == "weighted":
        norm, attn = name + ".self_attn_layer_norm", name + ".self_attn"
        return residual(
            w, norm, config, xs, lambda y: branched_attention(w, attn, config, heads, y, y, lambda t, s: True)
        )
    xs = residual(
        w,
        name + ".self_attn_layer_norm",
        config,
        xs,
        lambda y: attention(w, name + ".self_attn", config, heads, y, y, lambda t, s: True, uniform),
    )
    return residual(
        w,
        name + ".final_layer_norm",
        config,
        xs,
        lambda y: feed_forward(w, name + ".feed_forward", config, y, uniform),
        bottom,
    )


def decoder_layer(
    w: Weights, name: str, config: Any, xs: torch.Tensor, memory: torch.Tensor, uniform: Uniform = None
) -> torch.Tensor:
    heads, bottom = config.decoder_attention_heads, xs
    if getattr(config, "layer_form", "transformer") == "evolved":
        return evolved_cell(w, name, config, xs, memory)
    if getattr(config, "decoder_attention", "separate") == "merged":
        return merged_decoder_layer(w, name, config, xs, memory, uniform)
    xs = residual(
        w,
        name + ".self_attn_layer_norm",
        config,
        xs,
        lambda y: attention(w, name + ".self_attn", config, heads, y, y, lambda t, s: s <= t, uniform),
    )
    if getattr(config, "layer_form", "transformer") == "weighted":
        norm, attn = name + ".encoder_attn_layer_norm", name + ".encoder_attn"
        return residual(
            w, norm, config, xs, lambda y: branched_attention(w, attn, config, heads, y, memory, lambda t, s: True)
        )
    xs = residual(
        w,
        name + ".encoder_attn_layer_norm",
        config,
        xs,
        lambda y: attention(w, name + ".encoder_attn", config, heads, y, memory, lambda t, s: True, uniform),
    )
    return residual(
        w,
        name + ".final_layer_norm",
        config,
        xs,
        lambda y: feed_forward(w, name + ".feed_forward", config, y, uniform),
        bottom,
    )


def evolved_cell(
    w: Weights, name: str, config: Any, xs: torch.Tensor, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """An encoder cell, or with `memory` a decoder cell (So et al. 2019)."""

    def norm(part: str, ys: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer_norm(y, w, f"{name}.{part}") for y in ys])

    def attend(part: str, heads: int, ys: torch.Tensor, keys: Any, is_causal: bool = False) -> torch.Tensor:
        return attention(w, f"{name}.{part}", config, heads, ys, keys, lambda t, s: s <= t or not is_causal)

    if memory is None:
        return evolved_encoder_cell(
            w,
            name,
            xs,
            norm,
            lambda ys: attend("self_attn", config.encoder_attention_heads, ys, ys),
            lambda ys: feed_forward(w, f"{name}.feed_forward", config, ys),
        )
    return evolved_decoder_cell(
        w,
        name,
        config,
        xs,
        norm,
        lambda part, heads, ys: attend(part, heads, ys, ys, is_causal=True),
        lambda part, heads, ys: attend(part, heads, ys, memory),
    )


def merged_decoder_layer(
    w: Weights, name: str, config: Any, xs: torch.Tensor, memory: torch.Tensor, uniform: Uniform = None
) -> torch.Tensor:
    """Attention to the source plus the mean of the values so far, both before W_O (Zhang et al. 2019), then FFN."""
    heads = config.decoder_attention_heads
    xs = residual(
        w,
        name + ".encoder_attn_layer_norm",
        config,
        xs,
        lambda y: (
            attention(w, name + ".encoder_attn", config, heads, y, memory, lambda t, s: True, uniform)
            + means_of_values(w, name + ".encoder_attn", config, y)
        ),
    )
    network = name + ".feed_forward"
    return residual(w, name + ".final_layer_norm", config, xs, lambda y: feed_forward(w, network, config, y, uniform))


def means_of_values(w: Weights, name: str, config: Any, xs: torch.Tensor) -> torch.Tensor:
    """W_O (1/t) sum_{s<=t} (W_V x_s + b_V), merged over the branches, `[T, D]`."""
    branches, rows = config.attention_branches, []
    for t in range(len(xs)):
        total = 0
        for i in range(branches):
            wv, bv = block(w, name + ".v_proj", i, branches, 0)
            wo, _ = block(w, name + ".out_proj", i, branches, 1)
            total = total + wo @ (sum(wv @ xs[s] + bv for s in range(t + 1)) / (t + 1))
        rows.append(total * merge_factor(branches, config.branch_merge))
    return torch.stack(rows)


def branched_attention(
    w: Weights,
    name: str,
    config: Any,
    heads: int,
    queries: torch.Tensor,
    memory: torch.Tensor,
    visible: Callable[[int, int], bool],
) -> torch.Tensor:
    """sum_i alpha_i FFN_i(kappa_i head_i W^O_i) of one sentence (Ahmed et al. 2017), `[T, D]`."""
    kappa, alpha = (on_simplex(w[f"{name}.{each}.simplex_weight"]) for each in ("kappa", "alpha"))
    rows = []
    for t, x in enumerate(queries):
        total, seen = torch.zeros_like(x), [s for s in range(len(memory)) if visible(t, s)]
        for i in range(heads):
            wq, bq = block(w, name + ".q_proj", i, heads, 0)
            wk, bk = block(w, name + ".k_proj", i, heads, 0)
            wv, bv = block(w, name + ".v_proj", i, heads, 0)
            wo, _ = block(w, name + ".out_proj", i, heads, 1)
            q = wq @ x + bq
            scores = [torch.exp(q @ (wk @ memory[s] + bk) / math.sqrt(len(q))) for s in seen]
            head = sum(e * (wv @ memory[s] + bv) for e, s in zip(scores, seen, strict=True)) / sum(scores)
            entering = kappa[i] * (wo @ head)
            total = total + alpha[i] * branch_feed_forward(w, name, config.activation_function, i, heads, entering)
        rows.append(total)
    return torch.stack(rows)


def on_simplex(x: torch.Tensor) -> torch.Tensor:
    """max(x - t, 0), with the t that makes the sum 1, found by bisection. Its gradient is that of x itself."""
    numbers = x.tolist()
    low, high = min(numbers) - 1, max(numbers)
    for _ in range(100):
        t = (low + high) / 2
        low, high = (t, high) if sum(max(number - t, 0) for number in numbers) > 1 else (low, t)
    return x + x.new_tensor([max(number - t, 0) - number for number in numbers])


def normalised(w: Weights, name: str, xs: torch.Tensor) -> torch.Tensor:
    """LayerNorm of each position (depth-wise LSTM), or `xs` itself if the model has no norm of that name."""
    return torch.stack([layer_norm(x, w, name, 1e-6) for x in xs]) if name + ".weight" in w else xs


def depthwise_lstm_encoder(w: Weights, config: Any, xs: torch.Tensor, uniform: Uniform = None) -> torch.Tensor:
    """Self-attention and one step of the LSTM in each layer (section 2.2), `[T, D]`."""
    outputs = cells = xs
    for layer in range(config.encoder_layers):
        name = f"encoder.layers.{layer}"
        ys = normalised(w, name + ".self_attn_layer_norm", outputs)
        heads = config.encoder_attention_heads
        ys = drop(attention(w, name + ".self_attn", config, heads, ys, ys, lambda t, s: True, uniform))
        outputs, cells = step_in_depth(w, config, "encoder", layer, "lstm", ys, outputs, cells)
    return normalised(w, "encoder.layer_norm", outputs)


def depthwise_lstm_decoder(
    w: Weights, config: Any, ys: torch.Tensor, memory: torch.Tensor, uniform: Uniform = None
) -> torch.Tensor:
    """Two attentions, and one step of the LSTM on their sum or concatenation, or one on each (section 2.3)."""
    outputs = cells = ys
    heads = config.decoder_attention_heads
    for layer in range(config.decoder_layers):
        name = f"decoder.layers.{layer}"
        s = normalised(w, name + ".self_attn_layer_norm", outputs)
        s = drop(attention(w, name + ".self_attn", config, heads, s, s, lambda t, s: s <= t, uniform))
        if config.decoder_merge == "two_lstms":
            outputs, cells = step_in_depth(w, config, "decoder", layer, "lstm", s, outputs, cells)
            query = outputs
        else:
            query = {"self": s, "residual": outputs + s, "previous": outputs}[config.cross_query]
        query = normalised(w, name + ".encoder_attn_layer_norm", query)
        r = drop(attention(w, name + ".encoder_attn", config, heads, query, memory, lambda t, s: True, uniform))
        if config.decoder_merge == "two_lstms":
            outputs, cells = step_in_depth(w, config, "decoder", layer, "encoder_attn_lstm", r, outputs, cells)
        else:
            x = s + r if config.decoder_merge == "add" else torch.cat([s, r], dim=1)
            outputs, cells = step_in_depth(w, config, "decoder", layer, "lstm", x, outputs, cells)
    return normalised(w, "decoder.layer_norm", outputs)


def depthwise_lstm_logits(
    w: Weights, config: Any, source: list[int], target: list[int], uniform: Uniform = None
) -> torch.Tensor:
    """Logits `[T, V]`. Output_0 and Cell_0 of each stack are its embeddings, and Output_N is its result."""
    xs = depthwise_lstm_encoder(w, config, embed(w, "encoder", config, source), uniform)
    ys = depthwise_lstm_decoder(w, config, embed(w, "decoder", config, target), xs, uniform)
    return torch.stack([w["lm_head.weight"] @ y + w.get("lm_head.bias", 0) for y in ys])


def of_language(w: Weights, config: Any, language: int) -> Weights:
    """`w`, with one language's scales and biases of norms under the names of plain norms (Zhang et al. 2020, LALN)."""
    names = {".language_scale": ".weight", ".language_bias": ".bias"}
    norms = {}
    for key, table in w.items():
        name, _, last = key.rpartition(".")
        if "." + last in names:
            norms[name + names["." + last]] = table[language]
    return w | norms


def transform(w: Weights, xs: torch.Tensor, language: int) -> torch.Tensor:
    """x W_l at each position, after the encoder (Zhang et al. 2020, LALT), `[T, D]`."""
    matrices = w.get("encoder.language_transform.language_matrices")
    if matrices is None:
        return xs
    return torch.stack([sum(feature * row for feature, row in zip(x, matrices[language], strict=True)) for x in xs])


def logits(
    w: Weights, config: Any, source: list[int], target: list[int], uniform: Uniform = None, language: int = 0
) -> torch.Tensor:
    """Logits `[T, V]` of one pair of sentences without padding; `w` has the parameter names of the headless model.

    If `w` contains a layer's z, that z replaces the one from `selections`.
    """
    if config.model_type == "depthwise_lstm":
        return depthwise_lstm_logits(w, config, source, target, uniform)
    if getattr(config, "layer_form", "transformer") == "luna":
        xs, ys = list(embed(w, "encoder", config, source)), list(embed(w, "decoder", config, target))
        return luna_logits(w, config, xs, ys, layer_norm, lambda name, x: feed_forward(w, name, config, x))
    w = of_language(selections(w, config) | w, config, language)
    outputs = [embed(w, "encoder", config, source)]
    for layer in range(config.encoder_layers):
        xs = combine(w, "encoder", config, outputs)
        outputs.append(encoder_layer(w, f"encoder.layers.{layer}", config, xs, uniform))
    xs = read(combine(w, "encoder", config, outputs))
    if config.normalize_before:
        xs = pre_norm(w, config, "encoder.layer_norm", xs)
    memories = [transform(w, xs, language)] * config.decoder_layers
    if getattr(config, "layer_aggregation", None) == "transparent":
        memories = [transparent(w, config, outputs, layer) for layer in range(config.decoder_layers)]
    outputs = [embed(w, "decoder", config, target)]
    for layer in range(config.decoder_layers):
        ys = combine(w, "decoder", config, outputs)
        outputs.append(decoder_layer(w, f"decoder.layers.{layer}", config, ys, memories[layer], uniform))
    ys = read(combine(w, "decoder", config, outputs))
    if config.normalize_before:
        ys = pre_norm(w, config, "decoder.layer_norm", ys)
    return torch.stack([w["lm_head.weight"] @ y + w.get("lm_head.bias", 0) for y in ys])
