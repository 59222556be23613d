"""The gradient norm of each layer, which shows where gradients vanish or explode (Li et al. 2020, Figure 2)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.ticker import MaxNLocator
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .figures import FEW, new_figure, save

KEY = "gradient_norms"  # the key in a log entry: {"encoder": L numbers, "decoder": L numbers}, bottom to top
PLOT = Path("plots", "gradient_norms.png")
CURVES = 6  # curves in one panel, each from one step of training


def layer_gradient_norms(model: nn.Module, scale: float = 1.0) -> dict[str, list[float]]:
    """Return the L2 norm of each layer's gradient, over all parameters of the layer, by stack, bottom to top.

    Args:
        model: a model with an encoder, a decoder, or both, which have `layers`, after a backward pass.
        scale: the factor by which the loss was multiplied (fp16).
    """
    norms = {}
    for stack in ("encoder", "decoder"):
        layers = getattr(getattr(model.base_model, stack, None), "layers", [])
        gradients = [[p.grad for p in layer.parameters() if p.grad is not None] for layer in layers]
        totals = [torch.stack(torch._foreach_norm(each)).norm() if each else torch.zeros(()) for each in gradients]
        if totals:
            totals = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]  # shards
            norms[stack] = (torch.stack([total.float().cpu() for total in totals]) / scale).tolist()
    return norms


class GradientNorms(TrainerCallback):
    """A callback that writes the gradient norms of the layers into the log.

    The Trainer calls `measure` after the backward pass and before it clips gradients. The entries (`KEY`) are part of
    `trainer_state.json`. A finished run has the figure `plots/gradient_norms.png`.
    """

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {}

    def measure(self, model: nn.Module, args: TrainingArguments, state: TrainerState, scale: float = 1.0) -> None:
        """Measure the gradient norms if this step will be logged. `state.global_step` does not count this step yet."""
        step = state.global_step + 1
        if args.logging_strategy != "steps" or step % state.logging_steps == 0 or step == 1:
            self.norms = layer_gradient_norms(model, scale)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the norms to the newest log entry. TensorBoard takes only single numbers, and has its copy already."""
        if "loss" in (logs or {}) and self.norms:
            state.log_history[-1][KEY] = self.norms


def plot_gradient_norms(histories: Mapping[str, Sequence[dict]], path: Path) -> Path:
    """Plot the gradient norm by layer at some steps of training (Figure 2).

    The figure has a row for each run and a panel for each stack.

    Args:
        histories: maps the label of each run to its `TrainerState.log_history`. Runs without norms are left out.
        path: the image to write. Its folder is made if needed.

    Raises:
        ValueError: no run has gradient norms in its log.
    """
    runs = {label: [entry for entry in history if KEY in entry] for label, history in histories.items()}
    runs = {label: entries for label, entries in runs.items() if entries}
    if not runs:
        raise ValueError("the log holds no gradient norms: train with `gradient_norms: true`")
    stacks = list(dict.fromkeys(stack for entries in runs.values() for stack in entries[-1][KEY]))
    figure, axes = new_figure(len(runs), len(stacks), (3.6, 2.6), sharey=True)
    for row, (label, entries) in zip(axes, runs.items(), strict=True):
        places = torch.linspace(0, len(entries) - 1, min(CURVES, len(entries))).round().int().tolist()
        moments = [entries[place] for place in places]  # the first and the last entry are among them
        colors = colormaps["viridis"](torch.linspace(0, 0.9, len(moments)).tolist())
        for axis, stack in zip(row, stacks, strict=True):
            for entry, color in zip(moments, colors, strict=True):
                values = entry[KEY].get(stack, [])
                look = {"color": color, "linewidth": 1.2, "marker": "." if len(values) < FEW else None}
                axis.plot(range(1, len(values) + 1), values, label=f"step {entry['step']}", **look)
            axis.set_yscale("log")
            axis.set_title(f"{label}: {stack}" if label else stack, fontsize="medium")
            axis.grid(alpha=0.3)
        row[0].set_ylabel("gradient norm")
        row[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axis in axes[-1]:
        axis.set_xlabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return save(figure, path)
