"""A fairseq Transformer written out, with fairseq's names of weights, one sentence at a time, in float64.

Transcribed from fairseq's `TransformerEncoder`, `TransformerDecoder` and their layers in evaluation mode. No code here
is shared with the package. `z` is the weight of each layer's sub-layers, as in `examples/latent_depth`.
"""

import math
from types import SimpleNamespace

import torch

GELU = math.sqrt(2 / math.pi)
ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_accurate": lambda x: 0.5 * x * (1 + torch.tanh(GELU * (x + 0.044715 * x**3))),
}


def norm(w, name, x):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def projections(w, name):
    """Weights and biases of queries, keys and values, stored as three matrices or stacked in one."""
    if f"{name}.in_proj_weight" in w:
        size = len(w[f"{name}.in_proj_weight"]) // 3
        parts = [slice(i * size, (i + 1) * size) for i in range(3)]
        return [(w[f"{name}.in_proj_weight"][part], w[f"{name}.in_proj_bias"][part]) for part in parts]
    return [(w[f"{name}.{letter}_proj.weight"], w[f"{name}.{letter}_proj.bias"]) for letter in "qkv"]


def attend(w, name, heads, x, memory, causal):
    (wq, bq), (wk, bk), (wv, bv) = projections(w, name)
    width = x.shape[1] // heads
    outputs = torch.zeros_like(x)
    for t in range(len(x)):
        seen = range(t + 1) if causal else range(len(memory))
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            q = (wq @ x[t] + bq)[part] / math.sqrt(width)
            scores = torch.stack([q @ (wk @ memory[s] + bk)[part] for s in seen]).softmax(0)
            outputs[t, part] = sum(score * (wv @ memory[s] + bv)[part] for score, s in zip(scores, seen, strict=True))
    return outputs @ w[f"{name}.out_proj.weight"].T + w[f"{name}.out_proj.bias"]


def position(w, args, stack, t, width):
    """The vector of position t. fairseq counts from after the padding id, which is 1: the first token is at 2."""
    if args.learned:
        return w[f"{stack}.embed_positions.weight"][t + 2]
    half = width // 2
    angles = [(t + 2) * math.exp(-i * math.log(10000) / (half - 1)) for i in range(half)]
    # fairseq's tables are in float32
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64).float().double()


def embed(w, args, stack, ids):
    table = w[f"{stack}.embed_tokens.weight"]
    scale = math.sqrt(table.shape[1]) if args.scale else 1.0
    rows = [scale * table[i] + position(w, args, stack, t, table.shape[1]) for t, i in enumerate(ids)]
    x = torch.stack(rows)
    return norm(w, f"{stack}.layernorm_embedding", x) if args.layernorm_embedding else x


def run(w, args, stack, x, memory=None):
    for i in range(args.layers):
        name = f"{stack}.layers.{i}"
        z = 1.0 if args.z is None else args.z[stack][i]

        def join(x, norm_name, function, name=name, z=z):
            y = norm(w, f"{name}.{norm_name}", x) if args.pre_norm else x
            x = x + z * function(y)
            return x if args.pre_norm else norm(w, f"{name}.{norm_name}", x)

        def attention(y, name=name):
            return attend(w, f"{name}.self_attn", args.heads, y, y, memory is not None)

        def cross(y, name=name):
            return attend(w, f"{name}.encoder_attn", args.heads, y, memory, False)

        def feed_forward(y, name=name):
            hidden = ACTIVATIONS[args.activation](y @ w[f"{name}.fc1.weight"].T + w[f"{name}.fc1.bias"])
            return hidden @ w[f"{name}.fc2.weight"].T + w[f"{name}.fc2.bias"]

        x = join(x, "self_attn_layer_norm", attention)
        if memory is not None:
            x = join(x, "encoder_attn_layer_norm", cross)
        x = join(x, "final_layer_norm", feed_forward)
    return norm(w, f"{stack}.layer_norm", x) if args.pre_norm else x


def logits(w, args: SimpleNamespace, source, previous):
    """Logits `[time, V]` of one sentence; `source` ends with the id 2, and `previous` begins with 2."""
    memory = run(w, args, "encoder", embed(w, args, "encoder", source))
    x = run(w, args, "decoder", embed(w, args, "decoder", previous), memory)
    head = w["decoder.embed_out" if "decoder.embed_out" in w else "decoder.output_projection.weight"]
    return x @ head.T
