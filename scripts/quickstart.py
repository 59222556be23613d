"""Run the whole workflow on the embedded corpus: train a small MAT, score it, load it again, translate with it.

    python scripts/quickstart.py
    python scripts/quickstart.py --training.num_train_epochs 2 --training.output_dir runs/shorter

No download, no GPU. Any key of recipes/quickstart.yaml can be set by its dotted name. The results are in
runs/quickstart. Each call trains from the beginning. A run with other settings is not replaced without --overwrite.
"""

import logging
import sys
import time

from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.errors import run_script
from hf_deepwide.runs.recipe import RECIPE, Recipe, differences, load_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide_cli.parser import Parser, split_overrides

SHOWN = 6  # held-out phrases that are printed
EXAMPLE = "Paula kommt am Mittwoch um 07:40 Uhr nach Hause."  # the README's first example, always shown


def main() -> None:
    """Run the recipe, then use its checkpoint as a user would."""
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--overwrite", action="store_true", help="replace what another run left in the folder")
    script, overrides = split_overrides(parser, sys.argv[1:])
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_deepwide").setLevel(logging.INFO)
    disable_progress_bar()
    start = time.perf_counter()
    recipe = load_recipe("quickstart", overrides)
    results = run_recipe(recipe, overwrite=script.overwrite or is_the_same(recipe))

    translator = pipeline("translation", model=str(recipe.output_dir))
    held_out = load_parallel(recipe.data, "test")
    examples = (row for row, source in enumerate(held_out["source"]) if source == EXAMPLE)
    phrases = held_out.select(list(dict.fromkeys([*range(SHOWN), *examples])))
    for source, reference, output in zip(
        phrases["source"], phrases["target"], translator(phrases["source"][:]), strict=True
    ):
        print(f"\n  {source}\n= {output['translation_text']}\n  {reference}  (reference)")
    test = results["test"]
    print(f"\nBLEU {test['bleu']:.1f} on {len(held_out)} held-out phrases")
    print(f"{test['signature']['bleu']}")
    print(f"{time.perf_counter() - start:.0f} s in all; the checkpoint is {recipe.output_dir}")


def is_the_same(recipe: Recipe) -> bool:
    """Return True if the run's folder holds an earlier run by the same recipe, so that replacing it loses nothing."""
    kept = recipe.output_dir / RECIPE
    return kept.is_file() and not differences(load_recipe(kept).values, recipe.values)


if __name__ == "__main__":
    run_script(main)
