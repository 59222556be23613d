"""Look inside a model on one sentence: attention to the source by branch, gates of depth-wise LSTMs, layers used.

Shapes: N branches, M heads of a branch, T target tokens, S source tokens, L layers, P posteriors, D model width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn
from transformers import PreTrainedModel

from ..models.attention import MultiBranchAttention
from ..models.modeling_depthwise_lstm import LSTMGates
from .figures import new_figure
from .layer_utilization import layer_selections

GATES = ("input", "forget", "output")
CELL = 0.17  # inches for a token on an axis
SMALLEST = 2.2  # least inches of a panel's side


class Inside(NamedTuple):
    """The attention weights and gates of one forward pass.

    Attributes:
        attention: maps the number of each decoder layer that ran, from 1, to attention weights `[N, T, S]`. A branch's
            weights are the mean of its heads. The row of a target token is the attention that predicts this token.
        gates: maps each stack with depth-wise LSTMs to its gates `[cells, 3]`, in the order of `GATES`. Each gate is a
            mean over positions and features. A layer has one cell, or two (decoder, `decoder_merge="two_lstms"`).
    """

    attention: dict[int, torch.Tensor]
    gates: dict[str, torch.Tensor]


def look_inside(
    model: PreTrainedModel, source_ids: Sequence[int], target_ids: Sequence[int], **inputs: torch.Tensor
) -> Inside:
    """Run an encoder-decoder model once over a sentence and its translation, and record its attention and gates.

    The model must be in evaluation mode. Nothing else may use it during this call. Afterwards the model is as before.

    Args:
        model: any encoder-decoder model. A model that is not from this package has one branch.
        source_ids: `S` token ids.
        target_ids: `T + 1` token ids, with the decoder's start token.
        inputs: further inputs of the model, such as `posteriors`.
    """
    attention: dict[int, torch.Tensor] = {}
    gates: dict[str, list[torch.Tensor]] = {}
    stack = "encoder"

    def enter_decoder(module: nn.Module, args: tuple) -> None:
        nonlocal stack
        stack = "decoder"

    def note_attention(module: MultiBranchAttention, args: tuple, output: Any) -> None:
        weights = output[1][0].float()  # [N * M, T, S]
        attention[module.layer_idx + 1] = weights.unflatten(0, (module.branches, -1)).mean(1).cpu()

    def note_gates(module: LSTMGates, args: tuple, output: tuple[torch.Tensor, ...]) -> None:
        gates.setdefault(stack, []).append(torch.stack([gate.float().mean() for gate in output]).cpu())

    hooks: list[tuple[nn.Module, Callable]] = [
        *((module, note_attention) for module in _cross_attentions(model)),
        *((module, note_gates) for module in model.modules() if isinstance(module, LSTMGates)),
    ]
    ours = any(hook is note_attention for _, hook in hooks)
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    handles.append(model.get_decoder().register_forward_pre_hook(enter_decoder))
    try:
        with torch.no_grad(), _eager(model):
            source, target = (torch.tensor([ids], device=model.device) for ids in (source_ids, target_ids))
            # for our models, `output_attentions` would return the weights averaged over branches
            outputs = model(
                input_ids=source,
                attention_mask=torch.ones_like(source),
                decoder_input_ids=target[:, :-1],
                use_cache=False,
                output_attentions=not ours,
                **inputs,
            )
    finally:
        for handle in handles:
            handle.remove()
    if not ours:
        layers = enumerate(outputs.cross_attentions or (), start=1)
        attention = {number: weights[0].float().mean(0, keepdim=True).cpu() for number, weights in layers}
    return Inside(attention, {stack: torch.stack(cells) for stack, cells in gates.items()})


def _cross_attentions(model: nn.Module) -> list[MultiBranchAttention]:
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, MultiBranchAttention) and name.rpartition(".")[2] == "encoder_attn"
    ]


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Use eager attention within the block: no other attention implementation returns the weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def draw_attention(weights: torch.Tensor, source: Sequence[str], target: Sequence[str]) -> Figure:
    """Draw heat maps of attention, a panel for each branch: target tokens (rows) by source tokens (columns).

    Args:
        weights: attention weights `[N, T, S]`.
        source, target: the S source tokens and T target tokens as readable text.
    """
    branches = len(weights)
    columns = min(branches, 2)
    rows = -(-branches // columns)
    panel = max(SMALLEST, CELL * len(source)), max(SMALLEST, CELL * len(target) + 0.8)
    figure, axes = new_figure(rows, columns, panel, sharey=True)
    for number, axis in enumerate(axes.flat):
        if number >= branches:
            axis.set_axis_off()
            continue
        image = axis.imshow(weights[number], aspect="auto", cmap="Blues", vmin=0, vmax=float(weights.max()))
        axis.set_xticks(range(len(source)), source, rotation=90)
        axis.set_yticks(range(len(target)), target)
        axis.tick_params(length=0, labelsize=9)
        if branches > 1:
            axis.set_title(f"branch {number + 1}", fontsize="medium")
    figure.colorbar(image, ax=axes, label="attention", shrink=0.8, aspect=30, pad=0.01)
    return figure


def draw_selection(model: nn.Module, posterior: int = 0) -> Figure:
    """Draw the layers that a latent-depth model uses for one posterior, a panel for each latent stack.

    The height of a bar is q, the probability that the posterior selects the layer. Layers that evaluation uses are
    dark. If evaluation weighs layers instead of choosing them, a dot shows the weight z.

    Raises:
        ValueError: the model has no latent depth.
    """
    selections = layer_selections(model)
    if not selections:
        raise ValueError("the model has no latent depth")
    figure, axes = new_figure(1, len(selections), (3.2, 1.8), sharey=True)
    for axis, (stack, selection) in zip(axes[0], selections.items(), strict=True):
        q = selection.probabilities[posterior].tolist()
        z = selection.evaluation_weights()[posterior].tolist()
        numbers = range(1, len(q) + 1)
        axis.bar(numbers, q, color=["C0" if weight > 0 else "0.8" for weight in z])
        used = sum(weight > 0 for weight in z)
        if set(z) <= {0.0, 1.0}:
            axis.set_title(f"{stack}: {used} of {len(z)} layers used", fontsize="medium")
        else:
            axis.plot(numbers, z, "o", color="black", label="weight z")
            axis.legend(frameon=False, fontsize="small")
            axis.set_title(f"{stack}: {len(z)} layers, weighed", fontsize="medium")
        axis.axhline(0.5, color="0.5", linewidth=0.8, linestyle=":")
        axis.set_xlabel("layer")
        axis.set_ylim(0, 1.05)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0][0].set_ylabel("probability of use")
    return figure


def draw_lstm_gates(gates: dict[str, torch.Tensor]) -> Figure:
    """Draw how far the gates of depth-wise LSTMs are open, over the cells of each stack; see `Inside.gates`."""
    figure, axes = new_figure(1, len(gates), (3.2, 1.8), sharey=True)
    for axis, (stack, cells) in zip(axes[0], gates.items(), strict=True):
        for gate, values in zip(GATES, cells.T.tolist(), strict=True):
            axis.plot(range(1, len(values) + 1), values, marker="o", label=gate)
        axis.set_title(stack, fontsize="medium")
        axis.set_xlabel("cell along depth")
        axis.set_ylim(0, 1)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean of the gate")
    axes[0][-1].legend(frameon=False, fontsize="small")
    return figure
