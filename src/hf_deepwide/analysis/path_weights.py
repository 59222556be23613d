"""The learned path weights of a Multi-Path encoder (Lin et al. 2023, Figure 7)."""

import math
import statistics
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn

from ..models.modeling_multipath_transformer import PathSum
from .figures import new_figure, save

PLOT = Path("plots", "path_weights.png")
SUBLAYERS = {"self_attn_paths": "attention", "feed_forward_paths": "FFN"}


def path_weights(model: nn.Module) -> dict[str, list[list[float]]]:
    """Return the alphas of each encoder layer, one for each feature, by sub-layer (`"attention"` and `"FFN"`).

    Raw features come first, and new features after them. A model without learnable path weights gives {}.
    """
    weights: dict[str, list[list[float]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PathSum) and module.alpha is not None:
            weights.setdefault(SUBLAYERS[name.rpartition(".")[2]], []).append(module.alpha.tolist())
    return weights


def spread(alphas: list[float]) -> float:
    """Return how unequal the weights of a sub-layer are: standard deviation / |mean|.

    For two paths, this is the paper's |alpha_1 - alpha_2| / |alpha_1 + alpha_2|.
    """
    mean = statistics.fmean(alphas)
    return statistics.pstdev(alphas) / abs(mean) if mean else math.inf


def plot_path_weights(model: nn.Module, path: Path, title: str = "") -> Path:
    """Plot the spread of the attention and FFN weights over the layers (Figure 7), and the weights below it.

    Args:
        model: a Multi-Path model.
        path: the image to write. Its folder is made if needed.
        title: the title above the panels.

    Raises:
        ValueError: the model has no learnable path weights.
    """
    weights = path_weights(model)
    if not weights:
        raise ValueError("the model has no learnable path weights")
    raw = model.config.encoder_paths
    figure, axes = new_figure(2, len(weights), (3.6, 2.4), sharex=True, sharey="row")
    for column, (sublayer, layers) in zip(axes.T, weights.items(), strict=True):
        numbers = range(1, len(layers) + 1)
        column[0].plot(numbers, [spread(alphas) for alphas in layers], marker="o", linewidth=1.2)
        column[0].set_title(sublayer, fontsize="medium")
        for feature, alphas in enumerate(zip(*layers, strict=True)):
            new = feature >= raw
            label = {0: "raw features", raw: "new features"}.get(feature)
            column[1].plot(numbers, alphas, "x" if new else "o", color="C1" if new else "C0", label=label, alpha=0.7)
        column[1].set_xlabel("encoder layer")
        column[1].xaxis.set_major_locator(MaxNLocator(integer=True))
        for axis in column:
            axis.grid(alpha=0.3)
    two = len(next(iter(weights.values()))[0]) == 2
    axes[0][0].set_ylabel("|α₁ − α₂| / |α₁ + α₂|" if two else "spread of α (std / mean)")
    axes[0][0].set_ylim(bottom=0)
    axes[1][0].set_ylabel("α")
    axes[1][-1].legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    return save(figure, path)


def draw_path_weights(model: nn.Module) -> Figure:
    """Draw a table of the attention and FFN path weights: a row for each encoder layer, raw features first.

    Args:
        model: a Multi-Path model.

    Raises:
        ValueError: the model has no learnable path weights.
    """
    weights = path_weights(model)
    if not weights:
        raise ValueError("the model has no learnable path weights")
    raw, layers = model.config.encoder_paths, model.config.encoder_layers
    features = len(next(iter(weights.values()))[0])
    names = [f"path {k + 1}" if k < raw else f"all but {k - raw + 1}" for k in range(features)]
    largest = max(abs(alpha) for tables in weights.values() for row in tables for alpha in row)
    figure, axes = new_figure(1, len(weights), (0.35 * features + 0.3, 0.25 * layers + 0.7), sharey=True)
    for axis, (sublayer, table) in zip(axes[0], weights.items(), strict=True):
        axis.imshow(table, aspect="auto", cmap="RdBu", vmin=-largest, vmax=largest)
        for row, alphas in enumerate(table):
            for column, alpha in enumerate(alphas):
                dark = abs(alpha) > 0.6 * largest
                color = "white" if dark else "black"
                axis.text(column, row, f"{alpha:.2f}", ha="center", va="center", fontsize=8, color=color)
        axis.set_xticks(range(features), names, rotation=90)
        axis.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
        axis.tick_params(length=0, labelsize=9)
        axis.set_title(sublayer, fontsize="medium")
    axes[0][0].set_ylabel("encoder layer")
    return figure
