"""The cell of the depth-wise LSTM (Xu et al. 2024, Eq. 1-8), one gate, layer and position at a time."""

import math
from typing import Any

import torch
from naive_dropout import drop

Weights = dict[str, torch.Tensor]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """LN of one vector."""
    mean = sum(x) / len(x)
    variance = sum((x - mean) ** 2) / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-6) * scale + shift


def owner(config: Any, stack: str, layer: int, lstm: str, sharing: str) -> str:
    """The module that owns the weights: the layer, its stack, or the encoder for weights that both stacks share."""
    if sharing == "none":
        return f"{stack}.layers.{layer}.{lstm}"
    return f"{stack}.{lstm}" if sharing == "stack" or lstm == "encoder_attn_lstm" else f"encoder.{lstm}"


def gate(w: Weights, name: str, which: int, c: torch.Tensor) -> torch.Tensor:
    """sigmoid(LN(W c + b)) of input (0), forget (1) or output gate (2): Eq. 2-4, `[D]`."""
    size = len(w[name + ".gates.fc.weight"]) // 3
    mine = slice(which * size, (which + 1) * size)
    bias = w[name + ".gates.fc.bias"][mine] if name + ".gates.fc.bias" in w else 0
    z = w[name + ".gates.fc.weight"][mine] @ c + bias
    return sigmoid(norm(z, w[name + ".gates.layer_norm.weight"][mine], w[name + ".gates.layer_norm.bias"][mine]))


def hidden_state(w: Weights, name: str, kind: str, function: str, c: torch.Tensor) -> torch.Tensor:
    """h by Eq. 5 ("single") or Eq. 6 ("glu"), after dropout, `[D]`."""
    name = name + ".hidden"
    z = w[name + ".fc1.weight"] @ c + w.get(name + ".fc1.bias", 0)
    z = norm(z, w[name + ".layer_norm.weight"], w[name + ".layer_norm.bias"])
    if kind == "single":
        return drop({"gelu": z * (1 + torch.erf(z / math.sqrt(2))) / 2, "relu": z.clamp(min=0)}[function])
    half = len(z) // 2
    inner = drop(z[:half] * sigmoid(z[half:]), "activation_dropout")
    return drop(w[name + ".fc2.weight"] @ inner + w.get(name + ".fc2.bias", 0))


def step_in_depth(
    w: Weights,
    config: Any,
    stack: str,
    layer: int,
    lstm: str,
    xs: torch.Tensor,
    outputs: torch.Tensor,
    cells: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output_l and Cell_l of a layer, each `[T, D]`, from its x and the previous layer's output and cell.

    x is `[T, D]` or `[T, 2D]`. `lstm` is the name of the cell in its layer.
    """
    gates = owner(config, stack, layer, lstm, config.share_gates)
    hidden = owner(config, stack, layer, lstm, config.share_hidden)
    kind = config.lstm_hidden if stack == "encoder" else config.decoder_lstm_hidden
    new_outputs, new_cells = [], []
    for x, output, cell in zip(xs, outputs, cells, strict=True):
        c = torch.cat([output, x])
        h = hidden_state(w, hidden, kind, config.activation_function, c)
        if config.cell == "lstm":
            cell = cell * gate(w, gates, 1, c) + h * gate(w, gates, 0, c)
            h = cell * gate(w, gates, 2, c)
        new_outputs.append(h)
        new_cells.append(cell)
    return torch.stack(new_outputs), torch.stack(new_cells)
