"""The main job on the embedded corpus: train a small MAT, score it, load it again, translate with it.

    python scripts/quickstart.py
    python scripts/quickstart.py --training.num_train_epochs 2      # any key of recipes/quickstart.yaml

Takes a few minutes on two cores, no download, no GPU. What it leaves is in runs/quickstart; each call starts afresh.
"""

import logging
import sys
import time
from pathlib import Path

from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

from hf_deepwide.data.corpora import load_parallel  # importing any part of the package registers the pipeline
from hf_deepwide.errors import run_script
from hf_deepwide.training.recipe import load_recipe
from hf_deepwide.training.run import run_recipe

SHOWN = 6  # held-out phrases that are printed


def main() -> None:
    """Run the recipe, then use its checkpoint as a user would."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_deepwide").setLevel(logging.INFO)
    disable_progress_bar()
    start = time.perf_counter()
    recipe = load_recipe(Path(__file__).parent / "recipes" / "quickstart.yaml", sys.argv[1:])
    results = run_recipe(recipe, overwrite=True)

    translator = pipeline("translation", model=str(recipe.output_dir))
    held_out = load_parallel(recipe.data, "test").select(range(SHOWN))
    for source, reference, output in zip(
        held_out["source"], held_out["target"], translator(held_out["source"][:]), strict=True
    ):
        print(f"\n  {source}\n= {output['translation_text']}\n  {reference}  (reference)")
    test = results["test"]
    print(f"\nBLEU {test['bleu']:.1f} on {len(load_parallel(recipe.data, 'test'))} held-out phrases")
    print(f"{test['signature']['bleu']}")
    print(f"{time.perf_counter() - start:.0f} s in all; the checkpoint is {recipe.output_dir}")


if __name__ == "__main__":
    run_script(main)
