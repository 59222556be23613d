"""Draw runs side by side: learning curves, and gradient norms by layer (Li et al. 2020, Figures 3 and 2).

    python scripts/compare_runs.py runs/static_24 runs/latent_24 --output plots

Each argument is the folder of a run, or one of its checkpoints. Written are learning_curves.png (of models whose loss
has further terms, the cross-entropy alone) and, if a run was trained with `training.gradient_norms: true`,
gradient_norms.png. Figures that exist are not replaced without --overwrite.
"""

from pathlib import Path

from hf_deepwide.analysis import gradient_norms
from hf_deepwide.analysis.figures import run_labels
from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.durable import check_output
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.training.checkpoints import load_history
from hf_deepwide_cli.parser import Parser


def main() -> None:
    """Read the logs, draw."""
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs or checkpoints")
    parser.add_argument("--output", type=Path, required=True, help="folder of the figures; it is made")
    parser.add_argument("--overwrite", action="store_true", help="replace figures of these names")
    script = parser.parse_args()
    labels = run_labels(script.runs)
    histories = {label: load_history(folder) for label, folder in zip(labels, script.runs, strict=True)}
    curves, norms = script.output / "learning_curves.png", script.output / gradient_norms.PLOT.name
    measured = any(gradient_norms.KEY in entry for history in histories.values() for entry in history)
    for figure in (curves, *([norms] if measured else [])):
        check_output(figure, overwrite=script.overwrite, option="--overwrite")
    try:
        print(plot_runs(histories, curves))
    except ValueError as error:
        raise UserError(str(error)) from error
    if measured:
        print(gradient_norms.plot_gradient_norms(histories, norms))


if __name__ == "__main__":
    run_script(main)
