"""Train a masked language model of latent depth on text in several languages, by a recipe (Li et al. 2020, Table 2).

    python scripts/train_masked_lm.py scripts/recipes/masked_lm/multi30k_masked_lm.yaml --data.root ../shared/data

Any key of the recipe can be set on the command line by its dotted name; values are YAML. The table's other rows:

    python scripts/train_masked_lm.py RECIPE.yaml --model.latent_encoder false --training.output_dir runs/static
    python -m torch.distributed.run --nproc_per_node 8 scripts/train_masked_lm.py \
        scripts/recipes/masked_lm/wikipedia25_masked_lm_24.yaml

An interrupted run goes on where it was when the same command is given again. A finished run is not touched unless
--overwrite is given. The run's folder holds what `AutoModelForMaskedLM` and `pipeline("fill-mask")` load, results.json
(perplexity on held-out text, of each language and of all), plots/, recipe.yaml, run.json and the checkpoints.
"""

import logging
import os

from transformers.utils.logging import disable_progress_bar

from hf_deepwide.command_line import Parser
from hf_deepwide.errors import run_script
from hf_deepwide.training.masked_lm import MaskedLMRecipe, run_masked_lm
from hf_deepwide.training.process_group import leaving_process_group
from hf_deepwide.training.recipe import load_recipe, parse_script


def main() -> None:
    """Read the recipe, run it, print the perplexities."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", help="the recipe, a YAML file")
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier run left in the folder")
    script, overrides = parse_script(parser)
    recipe = load_recipe(script.recipe, overrides, MaskedLMRecipe)
    first = os.environ.get("RANK", "0") == "0"  # of several processes, one speaks
    disable_progress_bar()  # of loading and saving weights, which takes no time; training keeps its own
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_deepwide").setLevel(logging.INFO if first else logging.ERROR)
    with leaving_process_group():
        results = run_masked_lm(recipe, script.overwrite)
    if first:
        for split in ("validation", "test"):
            for name, value in results.get(split, {}).items():
                print(f"{split:<12}{name.replace('_', ' '):<16}{value:8.2f}")
        print(f"the model and results.json are in {recipe.output_dir}")


if __name__ == "__main__":
    run_script(main)
