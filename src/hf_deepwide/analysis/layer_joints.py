"""The learned weights that join layers: which layers read which, and the gates of a Runge-Kutta encoder."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import nn

from ..models.layer_combination import LayerSum
from .figures import FEW, new_figure, save

WEIGHTS, GATES = Path("plots", "layer_weights.png"), Path("plots", "solver_gates.png")
GATE = "solver_gate/"  # the start of a log key; the layer's number follows, and the value is the mean of its gate
CELL = 0.24  # inches for a layer on an axis
TICKS = 12  # at most, on an axis


def layer_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the learned weights of sums over layers (DLCL, DenseFormer), by stack; {} for a model without sums.

    Row l, from 0, of `[L + 1, L + 1]` weighs the embeddings and the outputs of layers 1 to l. The weighted sum is the
    input of layer l + 1, and for the last row the output of the stack. Weights that no sum uses are 0. An output that
    passes without a sum has the weight 1.
    """
    sums = {name: module for name, module in model.named_modules() if isinstance(module, LayerSum)}
    return {name.split(".")[-2]: module.rows() for name, module in sums.items()}  # model.encoder.combination


def draw_layer_weights(weights: Mapping[str, torch.Tensor], title: str = "") -> Figure:
    """Draw a heat map for each stack: the reading layers (rows, the first layer at the top) by the outputs they read.

    Args:
        weights: the result of `layer_weights`.
        title: the title above the panels.
    """
    largest = max(float(table.abs().max()) for table in weights.values())
    side = max(2.2, CELL * max(map(len, weights.values())))
    figure, axes = new_figure(1, len(weights), (side, side))
    for axis, (stack, table) in zip(axes[0], weights.items(), strict=True):
        layers = len(table) - 1
        unused = torch.ones_like(table).triu(1).bool()
        image = axis.imshow(table.masked_fill(unused, torch.nan), cmap="RdBu", vmin=-largest, vmax=largest)
        shown = range(0, layers + 1, -(-(layers + 1) // TICKS))
        axis.set_xticks(shown, [str(k) if k else "emb." for k in shown])
        axis.set_yticks(shown, [str(k + 1) if k < layers else "end" for k in shown])
        axis.set_xlabel("output of layer")
        axis.set_ylabel("input of layer")
        axis.set_title(stack, fontsize="medium")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    figure.suptitle(title)
    return figure


def solver_gates(history: Sequence[dict]) -> tuple[list[int], torch.Tensor]:
    """Return the gates of the encoder's layers over training: the steps, and the mean gates `[steps, L]`.

    A history without gates gives no steps. A layer that LayerDrop has skipped so far is NaN.

    Args:
        history: `TrainerState.log_history`.
    """
    entries = {entry["step"]: entry for entry in history if any(name.startswith(GATE) for name in entry)}
    numbers = {int(name.removeprefix(GATE)) for entry in entries.values() for name in entry if name.startswith(GATE)}
    names = [f"{GATE}{number}" for number in range(1, max(numbers, default=0) + 1)]
    return list(entries), torch.tensor([[entry.get(name, math.nan) for name in names] for entry in entries.values()])


def plot_layer_weights(model: nn.Module, path: Path, title: str = "") -> Path:
    """Draw which layers read which; see `draw_layer_weights`.

    Raises:
        ValueError: the model has no learned sums over layers.
    """
    weights = layer_weights(model)
    if not weights:
        raise ValueError("the model has no learned sums over layers")
    return save(draw_layer_weights(weights, title), path)


def plot_solver_gates(history: Sequence[dict], path: Path, title: str = "") -> Path:
    """Draw the weight of the first of two evaluations over the steps, a curve for each encoder layer.

    Raises:
        ValueError: the history has no gates.
    """
    steps, gates = solver_gates(history)
    if not steps:
        raise ValueError("the log holds no gates of a solver: was a model with `encoder_solver: rk2` trained?")
    figure, axes = new_figure(1, 1, (4.2, 3.2))
    axis, layers = axes[0][0], gates.shape[1]
    colors = colormaps["viridis"](torch.linspace(0, 0.9, layers).tolist())
    for number, (curve, color) in enumerate(zip(gates.T.tolist(), colors, strict=True), start=1):
        labelled = layers <= TICKS or number in (1, layers)
        look = {"color": color, "linewidth": 1.2, "marker": "." if len(steps) < FEW else None}
        axis.plot(steps, curve, label=f"layer {number}" if labelled else None, **look)
    axis.set_ylim(0, 1)
    axis.set_xlabel("step")
    axis.set_ylabel("gate of the first evaluation")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title)
    return save(figure, path)
