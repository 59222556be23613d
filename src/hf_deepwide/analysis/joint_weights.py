"""The weights with which sub-layers read sources (attention residuals) or streams (hyper-connections and mHC).

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
CELL = 0.2  # inches for a cell of a heat map
TICKS = 16  # at most, on an axis
TOKENS = 4, 24  # number and length of random sentences


def joined_stacks(model: nn.Module) -> dict[str, list[Join]]:
    """Return the joints of each stack, bottom to top. A model whose sub-layers are joined in another way has none."""
    stacks = {name: getattr(getattr(model, "model", None), name, None) for name in ("encoder", "decoder")}
    joins = {
        name: [module for module in stack.modules() if isinstance(module, Join)]
        for name, stack in stacks.items()
        if stack is not None
    }
    return {name: found for name, found in joins.items() if found}


def random_tokens(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a batch of random source and target tokens without padding. The batch is always the same."""
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
    """Return the mean weights of each joint over all positions of a batch, by stack.

    Attention residuals give `[J, J + 1]`, or fewer columns with blocks. Row k, from 1, holds the weights of the
    sources that sub-layer k + 1 reads. The last row is for the final norm. Sources that do not exist yet are NaN.

    Streams give `[J, n, n + 2]`. The first weight of a stream is that of reading it. The next n are the weights with
    which it goes to each stream. The last is the weight with which the sub-layer's output is written to it.

    Args:
        model: the model. Nothing else may use it during this call.
        inputs: a batch without padding, decoder inputs included. Without inputs, the batch is `random_tokens`.
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
    """Fill vectors up with NaN to the length of the longest. Matrices already have one shape."""
    if rows[0].dim() > 1:
        return rows
    longest = max(map(len, rows))
    return [nn.functional.pad(row, (0, longest - len(row)), value=torch.nan) for row in rows]


def draw_joint_weights(weights: Mapping[str, torch.Tensor], title: str = "") -> Figure:
    """Draw a heat map for each stack: sub-layers (rows) by the sources or the streams that they read, mix and write.

    Args:
        weights: the result of `joint_weights`.
        title: the title above the panels.
    """
    tables = {stack: table.flatten(1) for stack, table in weights.items()}
    largest = max(table[~table.isnan()].abs().max().item() for table in tables.values())
    rows, columns = (max(table.shape[axis] for table in tables.values()) for axis in (0, 1))
    figure, axes = new_figure(1, len(tables), (max(2.4, CELL * columns), max(2.4, CELL * rows)))
    for axis, (stack, table) in zip(axes[0], tables.items(), strict=True):
        joints, is_sources = len(table), weights[stack].dim() == 2
        if not is_sources:  # columns: all read weights, then all mixing weights, then all write weights
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
    """Return the number of the sub-layer that reads the mixture of joint `index`; `end` is the final norm."""
    return str(index + 2) if index < joints - 1 else "end"


def plot_joint_weights(model: PreTrainedModel, path: Path, title: str = "") -> Path:
    """Draw the weights with which sub-layers read, over random tokens; see `draw_joint_weights`.

    Args:
        model: a model with `residual` attention, hyper or mhc.
        path: the image to write. Its folder is made if needed.
        title: the title above the panels.

    Raises:
        ValueError: the model's sub-layers are joined in another way.
    """
    if not joined_stacks(model):
        raise ValueError("the model reads neither sources nor streams: its `residual` is not attention, hyper or mhc")
    return save(draw_joint_weights(joint_weights(model), title), path)
