"""Draw which layers latent-depth models use, for each language (Li et al. 2020, Figures 5 and 6).

    python scripts/plot_layer_utilization.py runs/multi30k_en_xx_latent_depth
    python scripts/plot_layer_utilization.py runs/uniform/checkpoint-400 runs/aggregated/checkpoint-400 --output plots

Each argument is the folder of a run, or one of its checkpoints. Of each, the layers that every posterior selects are
printed, and how much it used them over training is drawn (<name>_layer_utilization.png). Samples of z from all of
them, drawn with the same noise, stand in one figure (selection_samples.png); with --hard they are 0 or 1. Figures that
exist are not replaced without --overwrite.
"""

from pathlib import Path

from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from hf_deepwide.analysis.figures import run_labels
from hf_deepwide.analysis.layer_utilization import (
    KEY,
    layer_selections,
    plot_layer_utilization,
    plot_selection_samples,
    posterior_names,
    selection_samples,
)
from hf_deepwide.durable import check_output
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.loading import load_config, load_model
from hf_deepwide.training.checkpoints import checkpoints, load_history
from hf_deepwide_cli.parser import Parser


def main() -> None:
    """Load, print, draw."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs or checkpoints")
    parser.add_argument("--output", type=Path, help="folder of the figures (default: `plots` in the first folder)")
    parser.add_argument("--hard", action="store_true", help="samples that are 0 or 1")
    parser.add_argument("--seed", type=int, default=0, help="of the samples' noise (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace figures of these names")
    script = parser.parse_args()
    disable_progress_bar()
    output = script.output or script.runs[0] / "plots"
    samples_figure = output / "selection_samples.png"
    folders = dict(zip(run_labels(script.runs), script.runs, strict=True))
    figures = {label: output / f"{label.replace('/', '_')}_layer_utilization.png" for label in folders}
    histories = {label: load_history(folder) for label, folder in folders.items()}
    drawn = {label for label, history in histories.items() if any(KEY in entry for entry in history)}
    for figure in (samples_figure, *(figures[label] for label in drawn)):
        check_output(figure, overwrite=script.overwrite, option="--overwrite")
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
            raise UserError(f"{folder}: its log is of another model, which has not {len(names)} posteriors")
        samples[label] = selection_samples(model, script.seed, script.hard)
        if label in drawn:
            print(plot_layer_utilization(histories[label], figures[label], names, label))
    print(plot_selection_samples(samples, samples_figure, names))


def latent_model(folder: Path) -> PreTrainedModel:
    """The latent-depth model in a folder, or in its newest checkpoint."""
    found = [path for path in (folder, *reversed(checkpoints(folder))) if (path / "config.json").is_file()]
    if not found:
        raise UserError(f"{folder} holds no model; give the folder of a run, or one of its checkpoints")
    masked = any(name.endswith("ForMaskedLM") for name in load_config(found[0]).architectures or [])
    model = load_model(AutoModelForMaskedLM if masked else AutoModelForSeq2SeqLM, found[0])
    if not layer_selections(model):
        raise UserError(f"{folder} holds a {type(model).__name__}, which has no latent layers")
    return model


def print_selection(model: PreTrainedModel, names: list[str]) -> None:
    """The layers that each posterior selects, counted from 1."""
    for stack, selection in layer_selections(model).items():
        for name, row in zip(names, selection.chosen, strict=True):
            layers = [layer + 1 for layer in row.nonzero().flatten().tolist()]
            print(f"  {stack}, {name}: {len(layers)} of {row.numel()} layers: {layers}")


if __name__ == "__main__":
    run_script(main)
