"""Figures of existing runs: learning curves, layer utilisation, joints of layers, path weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from ..analysis import gradient_norms
from ..analysis.figures import run_labels
from ..analysis.joint_weights import JOINTS, joined_stacks, plot_joint_weights
from ..analysis.layer_joints import (
    GATES,
    WEIGHTS,
    layer_weights,
    plot_layer_weights,
    plot_solver_gates,
    solver_gates,
)
from ..analysis.layer_utilization import (
    KEY,
    SAMPLES,
    layer_selections,
    plot_layer_utilization,
    plot_selection_samples,
    posterior_names,
    selection_samples,
)
from ..analysis.learning_curves import plot_runs
from ..analysis.path_weights import PLOT as PATH_WEIGHTS
from ..analysis.path_weights import path_weights, plot_path_weights, spread
from ..checkpoint_files import read_results
from ..durable import check_output
from ..errors import UserError, one_line
from ..loading import auto_class, load_model
from ..training.checkpoints import INTERRUPTED, REGULAR, checkpoints
from ..training.classification import METRICS
from ..training.history import load_history
from .run_folder import RESULTS

LOGGED = ("step", "eval_loss", *(f"eval_{metric}" for metric in METRICS))  # a point of a classifier's curve


def plot_curves(runs: Sequence[Path], output: Path, overwrite: bool = False) -> Iterator[Path]:
    """Draw learning curves of runs, and gradient norms where they were logged.

    Args:
        runs: folders of runs or checkpoints.
        output: the folder of the figures.
        overwrite: replace existing figures.

    Yields:
        Each figure that was written.
    """
    histories = {}
    for label, folder in zip(run_labels(runs), runs, strict=True):
        histories_by_seed = _seed_histories(folder)
        histories |= {f"{label}, {seed}": history for seed, history in histories_by_seed.items()}
        if not histories_by_seed:
            histories[label] = load_history(folder)
    curves, norms = output / "learning_curves.png", output / gradient_norms.PLOT.name
    measured = any(gradient_norms.KEY in entry for history in histories.values() for entry in history)
    for figure in (curves, *([norms] if measured else [])):
        check_output(figure, overwrite=overwrite, option="--overwrite")
    try:
        yield plot_runs(histories, curves)
    except ValueError as error:
        raise UserError(str(error)) from error
    if measured:
        yield gradient_norms.plot_gradient_norms(histories, norms)


def seed_histories(results: dict[str, Any]) -> dict[str, list[dict]]:
    """Return each seed's validation scores from the results of a classifier's run; {} for another kind of run."""
    return {
        f"seed {seed_results['seed']}": [dict(zip(LOGGED, point, strict=True)) for point in seed_results["curve"]]
        for seed_results in results.get("seeds", ())
    }


def _seed_histories(run: Path) -> dict[str, list[dict]]:
    """`seed_histories` for the folder of a run; {} if it holds no results."""
    results = read_results(run)
    try:
        return seed_histories(results)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{run / RESULTS} is not what a run writes: {one_line(error)}") from error


def plot_layers(
    runs: Sequence[Path], output: Path | None, hard: bool = False, seed: int = 0, overwrite: bool = False
) -> Iterator[Path]:
    """Print the layers that each posterior selects. Draw their utilisation over training, and samples of z.

    Args:
        runs: folders of runs or checkpoints of latent-depth models with the same posteriors.
        output: the folder of the figures; None: `plots` in the first run.
        hard: draw hard samples (0 or 1).
        seed: seed of the samples' noise. The noise is the same for all runs.
        overwrite: replace existing figures.

    Yields:
        Each figure that was written.
    """
    output = output or runs[0] / "plots"
    samples_figure = output / SAMPLES
    folders = dict(zip(run_labels(runs), runs, strict=True))
    figures = {label: output / f"{label.replace('/', '_')}_layer_utilization.png" for label in folders}
    histories = {label: load_history(folder) for label, folder in folders.items()}
    drawn = {label for label, history in histories.items() if any(KEY in entry for entry in history)}
    for figure in (samples_figure, *(figures[label] for label in drawn)):
        check_output(figure, overwrite=overwrite, option="--overwrite")
    samples, names = {}, None
    for label, folder in folders.items():
        model = latent_model(folder)
        if names not in (None, posterior_names(model.config)):
            raise UserError(f"{folder} has the posteriors {posterior_names(model.config)}, and others have {names}")
        names = posterior_names(model.config)
        print(f"{label}:")
        print_selection(model, names)
        entries = [entry[KEY] for entry in histories[label] if KEY in entry]
        if entries and {len(rows) for rows in entries[-1].values()} != {len(names)}:
            raise UserError(f"{folder}: its log comes from another model, without {len(names)} posteriors")
        samples[label] = selection_samples(model, seed, hard)
        if label in drawn:
            yield plot_layer_utilization(histories[label], figures[label], names, label)
    yield plot_selection_samples(samples, samples_figure, names)


def plot_paths(checkpoint: str, output: Path, overwrite: bool = False) -> Iterator[Path]:
    """Print and draw the path weights of a Multi-Path model.

    Args:
        checkpoint: a folder or a Hub id.
        output: the folder of the figure.
        overwrite: replace an existing figure.

    Yields:
        The figure.
    """
    figure = output / PATH_WEIGHTS.name
    check_output(figure, overwrite=overwrite, option="--overwrite")
    model = load_model(AutoModelForSeq2SeqLM, checkpoint)
    weights = path_weights(model)
    if not weights:
        raise UserError(
            f"{checkpoint}: a {model.config.model_type} model without learnable path weights; accepted is a "
            "multipath_transformer with learnable_path_weights: true"
        )
    for sublayer, layers in weights.items():
        for number, alphas in enumerate(layers, start=1):
            print(f"layer {number} {sublayer:<9} spread {spread(alphas):.3f}  alpha", *(f"{a:.3f}" for a in alphas))
    yield plot_path_weights(model, figure, Path(checkpoint).name)


def plot_joints(run: Path, output: Path | None, overwrite: bool = False) -> Iterator[Path]:
    """Draw how the layers of a run's model are joined: which layers read which, and a solver's gates over training.

    The weights of attention residuals and streams depend on the tokens. Their means over random tokens are drawn.

    Args:
        run: the folder of a run or a checkpoint.
        output: the folder of the figures; None: `plots` in the run.
        overwrite: replace existing figures.

    Yields:
        Each figure that was written.
    """
    output, name = output or run / "plots", run_labels([run])[0]
    model = newest_model(run)
    if joined_stacks(model):
        figure = output / JOINTS.name
        check_output(figure, overwrite=overwrite, option="--overwrite")
        yield plot_joint_weights(model, figure, name)
        return
    weights = layer_weights(model)
    gates = load_history(run) if getattr(model.config, "encoder_solver", None) is not None else []
    if not weights and not gates:
        raise UserError(
            f"{run}: there is no figure of how the layers of this {model.config.model_type} are joined; there is one "
            "of `layer_aggregation` dlcl and denseformer, of `residual` attention, hyper and mhc, and of "
            "`encoder_solver`"
        )
    if gates and not solver_gates(gates)[0]:
        raise UserError(f"{run}: its log holds no gates of the solver; give the folder of a run that logged")
    figures = [*([output / WEIGHTS.name] if weights else []), *([output / GATES.name] if gates else [])]
    for figure in figures:
        check_output(figure, overwrite=overwrite, option="--overwrite")
    if weights:
        yield plot_layer_weights(model, output / WEIGHTS.name, name)
    if gates:
        yield plot_solver_gates(gates, output / GATES.name, name)


def newest_model(folder: Path) -> PreTrainedModel:
    """The model in a folder, or in its newest checkpoint."""
    newest_first = reversed(checkpoints(folder, REGULAR, INTERRUPTED))
    found = [path for path in (folder, *newest_first) if (path / "config.json").is_file()]
    if not found:
        raise UserError(f"{folder} holds no model; give the folder of a run, or one of its checkpoints")
    return load_model(auto_class(found[0]), found[0])


def latent_model(folder: Path) -> PreTrainedModel:
    """The latent-depth model in a folder, or in its newest checkpoint."""
    model = newest_model(folder)
    if not layer_selections(model):
        raise UserError(f"{folder} holds a {type(model).__name__}, which has no latent layers")
    return model


def print_selection(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Print the layers that each posterior selects, counted from 1."""
    for stack, selection in layer_selections(model).items():
        for name, row in zip(names, selection.chosen, strict=True):
            layers = [layer + 1 for layer in row.nonzero().flatten().tolist()]
            print(f"  {stack}, {name}: {len(layers)} of {row.numel()} layers: {layers}")
