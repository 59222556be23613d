"""Average the weights of checkpoints, as many papers do with the last five.

    hf-deepwide average runs/multi30k/checkpoint-{1200,1300,1400} --output runs/multi30k-mean

The result is a checkpoint for `from_pretrained`. The weights are summed in float64, and their mean is saved in the
checkpoints' own precision. Config, generation config and tokenizer come from the checkpoint that is named last.
"""

import argparse
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("checkpoints", nargs="+", help="folders with a model.safetensors each")
    parser.add_argument("--output", type=Path, required=True, help="folder for the result; the command creates it")
    parser.add_argument("--overwrite", action="store_true", help="write into the folder even if it is not empty")


def run(args: argparse.Namespace) -> None:
    """Check the output folder and the checkpoints, and average."""
    from hf_deepwide.checkpoint_files import MARK, read_config
    from hf_deepwide.durable import check_output
    from hf_deepwide.errors import UserError
    from hf_deepwide.families import all_families
    from hf_deepwide.loading import load_model
    from hf_deepwide.runs.averaging import average_checkpoints

    checkpoints = [Path(checkpoint) for checkpoint in args.checkpoints]
    check_output(args.output, inputs=checkpoints, overwrite=args.overwrite, option="--overwrite")
    if (args.output / MARK).is_file():
        raise UserError(f"{args.output} holds a run, and its scores are not those of the mean; give another folder")
    config = read_config(checkpoints[-1])
    if (family := all_families().get(str(config.get("model_type")))) is not None:
        classes = {cls.__name__: cls for cls in family.auto_classes.values()}
        named = [classes[name] for name in config.get("architectures") or [] if name in classes]
        fitting = named[0] if named else family.auto_classes["AutoModel"]
        load_model(fitting, checkpoints[-1])  # refuses weights that its config does not describe
    stale = [file.name for name in ("README*", "LICEN[CS]E*") for file in sorted(args.output.glob(name))]
    average_checkpoints(checkpoints, args.output)
    if stale:
        logger.warning(
            "%s still holds %s, which the mean has not written: replace what tells of another model",
            args.output, ", ".join(stale),
        )  # fmt: skip
