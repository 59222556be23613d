"""The layers that a latent-depth model uses: by language over training, and in samples (Li et al. 2020, Figures 5, 6).

Shapes: N posteriors (languages), L layers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..models.layer_selection import LayerSelection, gumbel_difference, sample_selection
from .figures import new_figure, save

KEY = "layer_utilization"  # the key in a log entry: {"decoder": N lists of L probabilities, …}
PLOT = Path("plots", "layer_utilization.png")
SAMPLES = "selection_samples.png"

Table = Sequence[Sequence[float]]  # N rows of L numbers


def layer_selections(model: nn.Module) -> dict[str, LayerSelection]:
    """Return the posteriors of each latent stack, `"encoder"` or `"decoder"`; {} for a model without latent depth."""
    return getattr(model, "layer_selections", {})


def layer_utilization(model: nn.Module) -> dict[str, Table]:
    """Return q, the probability that each posterior selects each layer, for each latent stack."""
    return {
        stack: [[round(q, 4) for q in row] for row in selection.probabilities.tolist()]
        for stack, selection in layer_selections(model).items()
    }


def posterior_names(config: Any) -> list[str]:
    """Return the names of the posteriors, such as languages. Without names they are `posterior 0`, `posterior 1`, …"""
    return config.posterior_names or [f"posterior {i}" for i in range(config.num_posteriors)]


class LayerUtilization(TrainerCallback):
    """A callback that writes into each log entry how much each posterior uses each layer.

    The entries (`KEY`) are part of `trainer_state.json` and so survive an interruption. A finished run has the figure
    `plots/layer_utilization.png`.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the table to the newest log entry. TensorBoard takes only single numbers, and has its copy already."""
        if "loss" in (logs or {}):
            state.log_history[-1][KEY] = layer_utilization(model)


def plot_layer_utilization(history: Sequence[dict], path: Path, names: Sequence[str], title: str = "") -> Path:
    """Plot the utilisation of each layer over training, a panel for each language and one for the mean u_l (Figure 6).

    Args:
        history: `TrainerState.log_history` of a run with `LayerUtilization`.
        path: the image to write. Its folder is made if needed.
        names: the names of the posteriors.
        title: the title above the panels.

    Raises:
        ValueError: the history has no utilisations.
    """
    entries = [entry for entry in history if KEY in entry]
    if not entries:
        raise ValueError("the log holds no layer utilisation: was a model of latent depth trained?")
    steps = [entry["step"] for entry in entries]
    stacks = list(entries[-1][KEY])
    several = len(names) > 1
    figure, axes = new_figure(len(stacks), len(names) + several, (2.4, 2.4), sharex=True, sharey="row")
    for row, stack in zip(axes, stacks, strict=True):
        tables = torch.tensor([entry[KEY][stack] for entry in entries])  # [steps, N, L]
        panels = dict(zip(names, tables.unbind(1), strict=True))
        if several:
            panels = {"mean": tables.mean(1), **panels}
        for axis, (name, panel) in zip(row, panels.items(), strict=True):
            edges = (steps[0], max(steps[-1], steps[0] + 1), 0.5, panel.shape[1] + 0.5)
            image = axis.imshow(panel.T, origin="lower", aspect="auto", extent=edges, vmin=0, vmax=1)
            axis.set_title(f"{stack}, {name}" if several else stack, fontsize="medium")
        row[0].set_ylabel("layer")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.colorbar(image, ax=axes, label="probability of being used")
    figure.suptitle(title)
    return save(figure, path)


def selection_samples(model: nn.Module, seed: int = 0, hard: bool = False) -> dict[str, torch.Tensor]:
    """Draw one z for each layer and posterior, as training does: `[N, L]` for each latent stack.

    Args:
        model: a latent-depth model.
        seed: seed of the noise. With the same seed, the samples of models differ only because their posteriors differ.
        hard: whether z is 0 or 1.
    """
    config, samples = model.config, {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for stack, selection in layer_selections(model).items():
            logits = selection.layer_logits.float().cpu()
            samples[stack] = sample_selection(logits, gumbel_difference(logits), config.last_temperature, hard)
    return samples


def plot_selection_samples(
    samples: Mapping[str, Mapping[str, torch.Tensor]], path: Path, names: Sequence[str]
) -> Path:
    """Plot samples z of several models, a row for each model: layers by languages (Figure 5, which compares priors).

    Args:
        samples: maps the label of each model to its result of `selection_samples`. A stack that a model lacks stays
            empty.
        path: the image to write. Its folder is made if needed.
        names: the names of the posteriors.
    """
    stacks = list(dict.fromkeys(stack for tables in samples.values() for stack in tables))
    figure, axes = new_figure(len(samples), len(stacks), (4.5, 0.7 + 0.28 * len(names)))
    image = None
    for row, (label, tables) in zip(axes, samples.items(), strict=True):
        for axis, stack in zip(row, stacks, strict=True):
            if stack not in tables:
                axis.set_axis_off()
                continue
            image = axis.imshow(tables[stack], aspect="auto", vmin=0, vmax=1)
            _label_cells(axis, tables[stack].shape[1], names)
            axis.set_title(f"{label}: {stack}", fontsize="medium")
    figure.colorbar(image, ax=axes, label="z")
    return save(figure, path)


def _label_cells(axis: Axes, layers: int, names: Sequence[str]) -> None:
    """Label the x axis with at most 12 layer numbers, from 1, and the y axis with the languages."""
    shown = range(0, layers, -(-layers // 12))
    axis.set_xticks(shown, [str(layer + 1) for layer in shown])
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("layer")
