"""What sub-layers read: sources of attention residuals, or the streams of hyper-connections and mHC.

Shapes: J sub-layers of a stack, K sources, n streams.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from transformers import PreTrainedModel

from ..models.attention_residuals import DepthAttention
from ..models.joined_layers import Join
from .figures import new_figure, save

JOINTS = Path("plots", "joint_weights.png")
CELL = 0.2  # inches of a cell
TICKS = 16  # at most, on an axis
TOKENS = 4, 24  # sentences and length of random ones


def joined_stacks(model: nn.Module) -> dict[str, list[Join]]:
    """The joints of each stack from bottom to top; empty for a model whose sub-layers are joined in another way."""
    stacks = {name: getattr(getattr(model, "model", None), name, None) for name in ("encoder", "decoder")}
    joins = {
        name: [module for module in stack.modules() if isinstance(module, Join)]
        for name, stack in stacks.items()
        if stack is not None
    }
    return {name: found for name, found in joins.items() if found}


def random_tokens(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A batch of sentences and translations of random tokens without padding, always the same."""
    generator, config = torch.Generator().manual_seed(0), model.config
    length = min(TOKENS[1], config.max_position_embeddings)
    sizes = {"input_ids": config.vocab_size, "decoder_input_ids": config.decoder_vocab_size}
    ids = {
        name: torch.randint(size - 1, (TOKENS[0], length), generator=generator)
        for name, size in sizes.items()  # any token but padding
    }
    return {name: (each + (each >= config.pad_token_id)).to(model.device) for name, each in ids.items()}


@torch.no_grad()
def joint_weights(model: PreTrainedModel, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """The mean weights of each joint over all positions of a batch, by stack, for joined sub-layers.

    Attention residuals: `[J, J + 1]`, or with fewer columns in blocks. Row k weighs the sources that sub-layer k + 1
    reads, the last row those of the final norm; sources that are not there yet are not a number. Streams: `[J, n,
    n + 2]`: of each stream how much is read, how much goes to each stream, and how much is written to it.

    Args:
        model: a model, which must do nothing else meanwhile.
        inputs: a batch without padding, with the inputs of the decoder; without any, random tokens.
    """
    stacks, seen = joined_stacks(model), {}

    def note_sources(join: DepthAttention, args: tuple, output: Any) -> None:
        seen[join] = join.weights(output.values, output.scales).flatten(0, -2).mean(0).float().cpu()

    def note_streams(join: Any, args: tuple, output: Any) -> None:
        alpha, beta = join.coefficients(args[0].to(torch.promote_types(args[0].dtype, torch.float32)))
        alpha, beta = (x.flatten(0, -k).mean(0) if x.dim() >= k else x for x, k in ((alpha, 3), (beta, 2)))
        seen[join] = torch.cat([alpha, beta[:, None]], dim=1).float().cpu()

    handles = [
        join.register_forward_hook(note_sources if isinstance(join, DepthAttention) else note_streams)
        for joins in stacks.values()
        for join in joins
    ]
    training = model.training
    try:
        model.eval()
        model(**(inputs or random_tokens(model)), use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    tables = {stack: [seen[join] for join in joins] for stack, joins in stacks.items()}
    return {stack: torch.stack(_to_one_length(rows)) for stack, rows in tables.items()}


def _to_one_length(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Vectors filled up with not-a-number to the longest; matrices have one shape."""
    if rows[0].dim() > 1:
        return rows
    longest = max(map(len, rows))
    return [nn.functional.pad(row, (0, longest - len(row)), value=torch.nan) for row in rows]


def draw_joint_weights(weights: Mapping[str, torch.Tensor], title: str = "") -> Figure:
    """A heat map for each stack: sub-layers (rows) by the sources or the streams that they read, mix and write.

    Args:
        weights: what `joint_weights` gives.
        title: above the panels.
    """
    tables = {stack: table.flatten(1) for stack, table in weights.items()}
    largest = max(table[~table.isnan()].abs().max().item() for table in tables.values())
    rows, columns = (max(table.shape[axis] for table in tables.values()) for axis in (0, 1))
    figure, axes = new_figure(1, len(tables), (max(2.4, CELL * columns), max(2.4, CELL * rows)))
    for axis, (stack, table) in zip(axes[0], tables.items(), strict=True):
        joints, is_sources = len(table), weights[stack].dim() == 2
        if not is_sources:  # all that is read, then all that is mixed, then all that is written
            read, *mixed, written = weights[stack].unbind(2)
            table = torch.cat([read, *mixed, written], dim=1)
        image = axis.imshow(table, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
        shown = range(0, joints, -(-joints // TICKS))
        axis.set_yticks(shown, [_row(k, joints) if is_sources else str(k + 1) for k in shown])
        axis.set_ylabel("input of sub-layer" if is_sources else "sub-layer")
        if is_sources:
            sources = range(0, table.shape[1], -(-table.shape[1] // TICKS))
            axis.set_xticks(sources, [str(k) if k else "emb." for k in sources])
            axis.set_xlabel("source")
        else:
            streams = len(weights[stack][0])
            for edge in range(1, streams + 2):
                axis.axvline(edge * streams - 0.5, color="black", linewidth=0.5)
            middles = [(k + 0.5) * streams - 0.5 for k in range(streams + 2)]
            axis.set_xticks(middles, ["read", *(f"to {k + 1}" for k in range(streams)), "write"])
            axis.set_xlabel("weights of the streams")
        axis.set_title(stack, fontsize="medium")
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    figure.suptitle(title)
    return figure


def _row(index: int, joints: int) -> str:
    """The sub-layer that reads what the joint behind sub-layer `index + 1` mixes; the last is read by the norm."""
    return str(index + 2) if index < joints - 1 else "end"


def plot_joint_weights(model: PreTrainedModel, path: Path, title: str = "") -> Path:
    """Draw what sub-layers read, over random tokens; see `draw_joint_weights`.

    Args:
        model: a model with `residual` attention, hyper or mhc.
        path: the image to write; its folder is made.
        title: above the panels.

    Raises:
        ValueError: the model's sub-layers are joined in another way.
    """
    if not joined_stacks(model):
        raise ValueError("the model reads neither sources nor streams: its `residual` is not attention, hyper or mhc")
    return save(draw_joint_weights(joint_weights(model), title), path)
