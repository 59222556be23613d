"""Draw what the path weights of a Multi-Path model have become (Lin et al. 2023, Figure 7).

    python scripts/plot_path_weights.py runs/multi30k_en_de_multipath path_weights.png
    python scripts/plot_path_weights.py runs/multi30k_en_de_multipath/checkpoint-700 early.png

The checkpoint is a folder or a Hub id. Above: how unequal the weights of each encoder layer are, for attention and
FFN apart: |alpha_1 - alpha_2| / |alpha_1 + alpha_2| for two paths, for more their standard deviation over their mean,
which for two is the same. Below: the weights themselves. The numbers are printed, too. A training run draws the figure
of its final model by itself, into its folder `plots/`.
"""

from pathlib import Path

from transformers import AutoModelForSeq2SeqLM

from hf_deepwide.analysis.figures import image_path
from hf_deepwide.analysis.path_weights import path_weights, plot_path_weights, spread
from hf_deepwide.durable import check_output
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.loading import load_model
from hf_deepwide_cli.parser import Parser


def main() -> None:
    """Load, print, draw."""
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", help="a folder or Hub id")
    parser.add_argument("output", type=Path, help="the image to write (.png, .pdf, .svg)")
    parser.add_argument("--overwrite", action="store_true", help="replace an image of this name")
    args = parser.parse_args()
    output = image_path(args.output)
    check_output(output, overwrite=args.overwrite, option="--overwrite")
    model = load_model(AutoModelForSeq2SeqLM, args.checkpoint)
    weights = path_weights(model)
    if not weights:
        raise UserError(
            f"{args.checkpoint}: a {model.config.model_type} model without learnable path weights; accepted is a "
            "multipath_transformer with learnable_path_weights: true"
        )
    for sublayer, layers in weights.items():
        for number, alphas in enumerate(layers, start=1):
            print(f"layer {number} {sublayer:<9} spread {spread(alphas):.3f}  alpha", *(f"{a:.3f}" for a in alphas))
    print(plot_path_weights(model, output, Path(args.checkpoint).name))


if __name__ == "__main__":
    run_script(main)
