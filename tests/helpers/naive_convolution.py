"""Dynamic convolution written out (Wu et al. 2019), for `naive_transformer`: one token, head and place at a time."""

from typing import Any

import torch

Weights = dict[str, torch.Tensor]
WIDTHS = [3, 7, 15, 31]


def dynamic_convolution(w: Weights, name: str, config: Any, xs: torch.Tensor) -> torch.Tensor:
    """W_O (sum_j k_tj g_(t+j-l) of each head) + b_O with the kernel k_t = softmax(W_Q g_t), `[T, D]`.

    `name` is `<stack>.layers.<layer>.self_attn`. Outside the sentence, g is 0.
    """
    stack, _, layer, _ = name.split(".")
    heads, widths = getattr(config, f"{stack}_attention_heads"), getattr(config, f"{stack}_kernel_sizes") or WIDTHS
    width = widths[-1] if int(layer) >= len(widths) else widths[int(layer)]
    first = 1 - width if stack == "decoder" else -(width // 2)  # the window's first place, relative to the token
    gated = [gate(w, name, x) for x in xs]
    rows = []
    for t, g in enumerate(gated):
        outputs = []
        for head in range(heads):
            part = slice(head * len(g) // heads, (head + 1) * len(g) // heads)
            scores = [torch.exp(row @ g) for row in w[f"{name}.kernel_proj.weight"][head * width : (head + 1) * width]]
            total = torch.zeros_like(g[part])
            for j, score in enumerate(scores):
                place = t + first + j
                if 0 <= place < len(gated):
                    total = total + score / sum(scores) * gated[place][part]
            outputs.append(total)
        rows.append(w[f"{name}.out_proj.weight"] @ torch.cat(outputs) + w.get(f"{name}.out_proj.bias", 0))
    return torch.stack(rows)


def gate(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """GLU: a * sigmoid(b), where a and b are the halves of W_I x + b_I, `[D]`."""
    both = w[f"{name}.in_proj.weight"] @ x + w.get(f"{name}.in_proj.bias", 0)
    a, b = both[: len(x)], both[len(x) :]
    return a / (1 + torch.exp(-b))
