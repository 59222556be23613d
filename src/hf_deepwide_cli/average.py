"""Average the weights of checkpoints, as papers do with the last five.

    hf-deepwide average runs/multi30k/checkpoint-{1200,1300,1400} --output runs/multi30k-mean

The result is what `from_pretrained` loads: the mean in the checkpoints' own precision, summed in float64, with the
config, the generation config and the tokenizer of the checkpoint named last.
"""

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("checkpoints", nargs="+", help="folders with a model.safetensors each")
    parser.add_argument("--output", type=Path, required=True, help="folder for the result; it is made")
    parser.add_argument("--overwrite", action="store_true", help="write into the folder even if it is not empty")


def run(args: argparse.Namespace) -> None:
    """Check the output folder, average."""
    from hf_deepwide.durable import check_output
    from hf_deepwide.training.averaging import average_checkpoints

    check_output(args.output, overwrite=args.overwrite, option="--overwrite")
    average_checkpoints(args.checkpoints, args.output)
