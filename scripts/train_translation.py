"""Train a translation model by a recipe: tokenizer, training, averaging, scoring, model card, in one command.

    python scripts/train_translation.py scripts/recipes/quickstart.yaml

Any key of the recipe can be set on the command line by its dotted name; values are YAML:

    python scripts/train_translation.py scripts/recipes/multi30k_en_de_mat.yaml \
        --data.root ../shared/data --training.learning_rate 1e-3 --training.output_dir runs/try

Several processes, each with its own GPU or share of the cores:

    accelerate launch --num_processes 8 scripts/train_translation.py scripts/recipes/wmt14_en_de_mat.yaml
    python -m torch.distributed.run --nproc_per_node 8 scripts/train_translation.py RECIPE.yaml

An interrupted run goes on where it was when the same command is given again, and ends with the same weights as
one that was left alone. A finished run is not touched unless --overwrite is given. The run's folder
(training.output_dir, by default runs/<name of the recipe>) holds what `from_pretrained` and `pipeline` load, and
README.md, results.json, translations.txt, plots/, recipe.yaml, run.json and the checkpoints.
"""

import logging
import os

from transformers.utils.logging import disable_progress_bar

from hf_deepwide.command_line import Parser
from hf_deepwide.errors import run_script
from hf_deepwide.training.process_group import leaving_process_group
from hf_deepwide.training.recipe import load_recipe, parse_script
from hf_deepwide.training.run import run_recipe


def main() -> None:
    """Read the recipe, run it, print the scores."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("recipe", help="the recipe, a YAML file")
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier run left in the folder")
    script, overrides = parse_script(parser)
    recipe = load_recipe(script.recipe, overrides)
    first = os.environ.get("RANK", "0") == "0"  # of several processes, one speaks
    disable_progress_bar()  # of loading and saving weights, which takes no time; training keeps its own
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_deepwide").setLevel(logging.INFO if first else logging.ERROR)
    with leaving_process_group():
        results = run_recipe(recipe, script.overwrite)
    if first:
        test = results.get("test", {})
        pairs = test.get("pairs", {"": test})
        groups = {"average": test["average"], **test.get("groups", {})} if "average" in test else {}
        width = max(map(len, [*pairs, *groups])) + 1
        for pair, scores in pairs.items():
            for metric, signature in scores.get("signature", {}).items():
                print(f"{pair:<{width}}{metric:<10} {scores[metric]:6.2f}   {signature}".strip())
        for group, means in groups.items():
            for metric, mean in means.items():
                print(f"{group:<{width}}{metric:<10} {mean:6.2f}")
        print(f"the model, its card and results.json are in {recipe.output_dir}")


if __name__ == "__main__":
    run_script(main)
