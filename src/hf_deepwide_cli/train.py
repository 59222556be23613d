"""Train a model by a recipe: tokenizer, training, averaging, scoring, model card, in one command.

    hf-deepwide train quickstart
    hf-deepwide train my_recipe.yaml --data.root PATH --training.learning_rate 1e-3 --training.output_dir runs/try
    hf-deepwide train masked-lm masked_lm/multi30k_masked_lm --data.root PATH
    hf-deepwide train classification classification/mrpc --model.init_from PATH --tokenizer.path PATH

A recipe is a YAML file, or the name of a packaged recipe (`hf-deepwide recipes`). Any key can be set on the command
line by its dotted name; values are YAML. `masked-lm` trains a masked language model. `classification` fine-tunes a
trained encoder on labelled sentences.

Several processes, each with its own GPU or its share of the CPU cores:

    accelerate launch --num_processes 8 -m hf_deepwide.cli train wmt14_en_de_mat
    python -m torch.distributed.run --nproc_per_node 8 -m hf_deepwide.cli train RECIPE

The same command continues an interrupted run. On a CPU, the run then ends with the same weights as without the
interruption. A finished run is not changed without --overwrite. The run's folder (training.output_dir, by default
runs/RECIPE) holds the model for `from_pretrained` and `pipeline`, README.md, results.json, translations.txt, plots/,
recipe.yaml, run.json and the checkpoints.
"""

import argparse
import os
from typing import cast

TASKS = ("masked-lm", "classification")
TAKES_OVERRIDES = True


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("recipe", nargs="+", help="a file, or the name of a packaged recipe")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run left in the folder")


def run(args: argparse.Namespace, overrides: list[str]) -> None:
    """Train a model, and print the scores."""
    from hf_deepwide.errors import UserError, quote

    task, recipe = (args.recipe[0], args.recipe[1:]) if args.recipe[0] in TASKS else (None, args.recipe)
    if assigned := next((word for word in args.recipe[1:] if "." in word.partition("=")[0] and "=" in word), None):
        key, _, value = assigned.partition("=")
        raise UserError(f"{quote(assigned)} is no recipe; to set a key, write --{key} {value}")
    if len(recipe) == 2 and task is None:
        tasks = ", ".join(TASKS)
        raise UserError(f"there is no task {quote(recipe[0])}; accepted: {tasks}, or a recipe alone for translation")
    if len(recipe) != 1:
        raise UserError(f"one recipe is expected, not {quote(recipe)}")
    train = {None: train_translation, "masked-lm": train_masked_lm, "classification": train_classification}[task]
    train(recipe[0], overrides, args.overwrite)


def train_translation(recipe: str, overrides: list[str], overwrite: bool) -> None:
    """Train a translation model."""
    from hf_deepwide.runs.recipe import load_recipe
    from hf_deepwide.runs.run import run_recipe

    loaded = load_recipe(recipe, overrides)
    results = run_recipe(loaded, overwrite)
    if not _is_first():
        return
    test = results.get("test", {})
    pairs = test.get("pairs", {**test["sets"], "all together": test} if "sets" in test else {"": test})
    groups = {"average": test["average"], **test.get("groups", {})} if "average" in test else {}
    width = max(map(len, [*pairs, *groups])) + 1
    for pair, scores in pairs.items():
        for metric, signature in scores.get("signature", {}).items():
            print(f"{pair:<{width}}{metric:<10} {scores[metric]:6.2f}   {signature}".strip())
    for group, means in groups.items():
        for metric, mean in means.items():
            print(f"{group:<{width}}{metric:<10} {mean:6.2f}")
    print(f"the model, its card and results.json are in {loaded.output_dir}")


def train_masked_lm(recipe: str, overrides: list[str], overwrite: bool) -> None:
    """Train a masked language model."""
    from hf_deepwide.runs.masked_lm import MaskedLMRecipe, run_masked_lm
    from hf_deepwide.runs.recipe import load_recipe

    loaded = load_recipe(recipe, overrides, MaskedLMRecipe)
    results = run_masked_lm(cast(MaskedLMRecipe, loaded), overwrite)
    if not _is_first():
        return
    for split in ("validation", "test"):
        for name, value in results.get(split, {}).items():
            print(f"{split:<12}{name.replace('_', ' '):<16}{value:8.2f}")
    print(f"the model and results.json are in {loaded.output_dir}")


def train_classification(recipe: str, overrides: list[str], overwrite: bool) -> None:
    """Fine-tune a classifier with several seeds."""
    from hf_deepwide.runs.classification import METRICS, ClassificationRecipe, run_classification
    from hf_deepwide.runs.recipe import load_recipe

    loaded = load_recipe(recipe, overrides, ClassificationRecipe)
    results = run_classification(cast(ClassificationRecipe, loaded), overwrite)
    if not _is_first():
        return
    for split in ("validation", "test"):
        for name in METRICS if split in results else ():
            scores = [result[split][name] for result in results["seeds"]]
            listed = ", ".join(f"{score:.2f}" for score in scores)
            print(f"{split:<12}{name:<10} median {results[split][name]['median']:6.2f}   seeds {listed}")
    print(f"the model of seed {results['chosen_seed']} and results.json are in {loaded.output_dir}")


def _is_first() -> bool:
    """Return whether this process has rank 0, which alone prints."""
    return os.environ.get("RANK", "0") == "0"
