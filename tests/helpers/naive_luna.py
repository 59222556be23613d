"""Luna written out, one position, head and entry of P at a time, for `naive_transformer` (Ma et al. 2021)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from naive_dropout import drop

Weights = dict[str, torch.Tensor]
Vectors = list[torch.Tensor]
Norm = Callable[[torch.Tensor, Weights, str], torch.Tensor]
Network = Callable[[str, torch.Tensor], torch.Tensor]


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """W x + b of one vector; no bias where the model has none."""
    return w[name + ".weight"] @ x + w.get(name + ".bias", 0.0)


def value_name(w: Weights, name: str) -> str:
    """The name of the value projection: with tied projections, the name of the key projection."""
    return f"{name}.v_proj" if f"{name}.v_proj.weight" in w else f"{name}.k_proj"


def softmax_attention(w: Weights, name: str, heads: int, query: torch.Tensor, source: Vectors) -> torch.Tensor:
    """Multi-head attention of one vector to a source, before the output projection, `[D]`."""
    width = len(query) // heads
    found = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        q = linear(w, f"{name}.q_proj", query)[part]
        powers = [torch.exp(q @ linear(w, f"{name}.k_proj", c)[part] / math.sqrt(width)) for c in source]
        values = [linear(w, value_name(w, name), c)[part] for c in source]
        found.append(sum(e * v for e, v in zip(powers, values, strict=True)) / sum(powers))
    return torch.cat(found)


def activation(kind: str, x: torch.Tensor) -> torch.Tensor:
    """log2(1 + 2^x), or elu(x) + 1, of one number."""
    if kind == "softplus":
        return torch.log(1 + torch.exp(x * math.log(2))) / math.log(2)
    return x + 1 if x > 0 else torch.exp(x)


def causal_attention(w: Weights, name: str, config: Any, xs: Vectors, packed: Vectors) -> Vectors:
    """Causal attention by running sums: the paper's f(X, Y, Z)_t = x_t (1/t) sum_j y_j^T z_j, in each head."""
    heads = config.decoder_attention_heads
    width = config.d_model // heads
    outputs: list[list[torch.Tensor]] = [[] for _ in xs]
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        queries = [linear(w, f"{name}.pack.q_proj", p)[part] / math.sqrt(width) for p in packed]
        keys_sum = torch.zeros(width, len(packed), dtype=torch.float64)
        values_sum = torch.zeros(len(packed), width, dtype=torch.float64)
        for t, x in enumerate(xs):
            pack_key = linear(w, f"{name}.pack.k_proj", x)[part]
            a = torch.stack([activation(config.luna_activation, query @ pack_key) for query in queries])
            keys_sum = keys_sum + torch.outer(linear(w, f"{name}.unpack.k_proj", x)[part], a)
            values_sum = values_sum + torch.outer(a, linear(w, value_name(w, f"{name}.unpack"), x)[part])
            scores = linear(w, f"{name}.unpack.q_proj", x)[part] / math.sqrt(width) @ (keys_sum / (t + 1))
            powers = torch.exp(scores - max(scores))
            u = powers / sum(powers)
            outputs[t].append(u @ (values_sum / (t + 1)))
    return [linear(w, f"{name}.out_proj", torch.cat(output)) for output in outputs]


def luna_logits(w: Weights, config: Any, xs: Vectors, ys: Vectors, layer_norm: Norm, network: Network) -> torch.Tensor:
    """Logits `[T, V]`, from the embeddings of a source (S vectors `[D]`) and of a target (T vectors `[D]`)."""
    pre = config.normalize_before

    def before(vectors: Vectors, norm: str) -> Vectors:
        return [layer_norm(x, w, norm) for x in vectors] if pre else list(vectors)

    def behind(vectors: Vectors, outputs: Vectors, norm: str) -> Vectors:
        sums = [x + drop(y) for x, y in zip(vectors, outputs, strict=True)]
        return sums if pre else [layer_norm(x, w, norm) for x in sums]

    def feed_forward(vectors: Vectors, layer: str) -> Vectors:
        norm = f"{layer}.final_layer_norm"
        outputs = network(f"{layer}.feed_forward", torch.stack(before(vectors, norm)))
        return behind(vectors, list(outputs), norm)

    def unpack(name: str, heads: int, queries: Vectors, context: Vectors) -> Vectors:
        read = [softmax_attention(w, f"{name}.unpack", heads, x, context) for x in queries]
        return [linear(w, f"{name}.out_proj", x) for x in read]

    packed = []
    for position, vector in enumerate(w["encoder.packed.packed_embeddings"]):
        vector = vector * math.sqrt(config.d_model) if config.scale_embedding else vector
        if config.position_embedding_type != "learned":
            half = config.d_model // 2
            angles = [(position + 2) * 10000 ** (-k / (half - 1)) for k in range(half)]
            table = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            vector = vector + torch.tensor(table).double()  # the package keeps its table in float32
        if config.layernorm_embedding:
            vector = layer_norm(vector, w, "encoder.packed.layer_norm")
        packed.append(drop(vector))

    heads = config.encoder_attention_heads
    for number in range(config.encoder_layers):
        layer = f"encoder.layers.{number}"
        inputs = before(xs, f"{layer}.self_attn_layer_norm")
        queries = before(packed, f"{layer}.packed_layer_norm")
        context = [softmax_attention(w, f"{layer}.self_attn.pack", heads, p, inputs) for p in queries]
        xs = behind(xs, unpack(f"{layer}.self_attn", heads, inputs, context), f"{layer}.self_attn_layer_norm")
        packed = behind(packed, context, f"{layer}.packed_layer_norm")
        xs = feed_forward(xs, layer)
    xs, packed = before(xs, "encoder.layer_norm"), before(packed, "encoder.layer_norm.packed_norm")

    heads = config.decoder_attention_heads
    for number in range(config.decoder_layers):
        layer = f"decoder.layers.{number}"
        inputs = before(ys, f"{layer}.self_attn_layer_norm")
        outputs = causal_attention(w, f"{layer}.self_attn", config, inputs, packed)
        ys = behind(ys, outputs, f"{layer}.self_attn_layer_norm")
        inputs = before(ys, f"{layer}.encoder_attn_layer_norm")
        queries = before(packed, f"{layer}.packed_layer_norm")
        context = [softmax_attention(w, f"{layer}.encoder_attn.pack", heads, p, xs) for p in queries]
        outputs = unpack(f"{layer}.encoder_attn", heads, inputs, context)
        ys = behind(ys, outputs, f"{layer}.encoder_attn_layer_norm")
        if number < config.decoder_layers - 1:  # the last layer's P is not read
            packed = behind(packed, context, f"{layer}.packed_layer_norm")
        ys = feed_forward(ys, layer)
    ys = before(ys, "decoder.layer_norm")
    return torch.stack([w["lm_head.weight"] @ y + w.get("lm_head.bias", 0) for y in ys])
