"""Draw runs: learning curves, layers that latent depth uses, joints of layers, path weights of a Multi-Path model.

    hf-deepwide plot curves runs/static_24 runs/latent_24 --output plots
    hf-deepwide plot layers runs/multi30k_en_xx_latent_depth --output plots
    hf-deepwide plot joints runs/denseformer --output plots
    hf-deepwide plot paths runs/multi30k_en_de_multipath --output plots

`curves` draws learning_curves.png. If a loss has further terms, the figure shows the cross-entropy alone. For runs
with `training.gradient_norms: true` it also draws gradient_norms.png (Li et al. 2020, Figures 3 and 2).

`layers` prints which layers every posterior selects. It draws how much the layers were used over training, and samples
of z (Li et al. 2020, Figures 5 and 6).

`joints` draws which earlier layers each layer reads (DLCL, DenseFormer), and the gates of a Runge-Kutta encoder over
training. For attention residuals and streams (hyper-connections, mHC), it draws the weights with which sub-layers
read, as means over random tokens.

`paths` prints the weights of paths, and draws how unequal they are in each layer (Lin et al. 2023, Figure 7).

A run is given by its folder or by one of its checkpoints; `paths` takes a Hub id, too. A finished run already has
figures in `plots/`. Existing figures are not replaced without --overwrite.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of each kind of figure."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    curves = kinds.add_parser("curves", help="learning curves and gradient norms of runs, side by side")
    curves.add_argument("runs", nargs="+", type=Path, help="folders of runs or checkpoints")
    curves.add_argument("--output", type=Path, required=True, help="folder for the figures; the command creates it")
    layers = kinds.add_parser("layers", help="layers that latent-depth models use")
    layers.add_argument("runs", nargs="+", type=Path, help="folders of runs or checkpoints")
    layers.add_argument("--output", type=Path, help="folder of the figures (default: `plots` in the first folder)")
    layers.add_argument("--hard", action="store_true", help="draw hard samples (0 or 1)")
    layers.add_argument("--seed", type=int, default=0, help="seed of the samples' random noise (default: 0)")
    joints = kinds.add_parser("joints", help="learned weights that join the layers of a model")
    joints.add_argument("run", type=Path, help="folder of a run or a checkpoint")
    joints.add_argument("--output", type=Path, help="folder of the figures (default: `plots` in the run)")
    paths = kinds.add_parser("paths", help="path weights of a Multi-Path model")
    paths.add_argument("checkpoint", help="a folder or Hub id")
    paths.add_argument("--output", type=Path, required=True, help="folder for the figure; the command creates it")
    for kind in (curves, layers, joints, paths):
        kind.add_argument("--overwrite", action="store_true", help="replace figures of these names")


def run(args: argparse.Namespace) -> None:
    """Draw the figures, and print their paths."""
    from hf_deepwide.runs import figures

    kinds: dict[str, Callable[..., Iterable[Path]]] = {
        "curves": figures.plot_curves,
        "layers": figures.plot_layers,
        "joints": figures.plot_joints,
        "paths": figures.plot_paths,
    }
    draw = kinds[args.kind]
    options = {name: value for name, value in vars(args).items() if name != "kind"}
    for path in draw(**options):
        print(path)
