<<<<<<< HEAD
"""Average the weights of checkpoints, as papers do with the last five.

    python scripts/average_checkpoints.py runs/multi30k/checkpoint-{1200,1300,1400} --output runs/multi30k-mean

The result is what `from_pretrained` loads: the mean in the checkpoints' own precision, summed in float64, with the
config, the generation config and the tokenizer of the checkpoint named last.
"""

import logging
from pathlib import Path

from hf_deepwide_cli.parser import Parser
from hf_deepwide.durable import check_output
from hf_deepwide.errors import run_script
from hf_deepwide.loading import load_model
from hf_deepwide.registration import FAMILIES
from hf_deepwide.training.averaging import average_checkpoints, read_config


def main() -> None:
    """Check the output folder and the checkpoints, average."""
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", help="folders with a model.safetensors each")
    parser.add_argument("--output", required=True, help="folder for the result; it is made")
    parser.add_argument("--overwrite", action="store_true", help="write into the folder even if it is not empty")
    script = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    output = Path(script.output)
    checkpoints = [Path(checkpoint) for checkpoint in script.checkpoints]
    check_output(output, inputs=checkpoints, overwrite=script.overwrite, option="--overwrite")
    config = read_config(checkpoints[-1])
    if (family := FAMILIES.get(config.get("model_type"))) is not None:
        masked = any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or [])
        load_model(family.masked_lm if masked else family.lm, checkpoints[-1])  # its config describes its weights
    average_checkpoints(checkpoints, output)
=======
"""Average the weights of checkpoints; the same as `hf-deepwide average`, which `--help` explains."""
>>>>>>> b20443d (Give evaluate, compare, plot, share, average and replay one command)

from hf_deepwide_cli import main

if __name__ == "__main__":
    main("average")
