"""Print the JSON schema of a recipe. Editors use it to complete and explain the keys.

    hf-deepwide schema > recipe.schema.json
    hf-deepwide schema masked-lm > masked_lm.schema.json

Name this file in the first line of a recipe: `# yaml-language-server: $schema=recipe.schema.json`.
"""

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "task", nargs="?", default="translation", choices=("translation", "masked-lm", "classification")
    )


def run(args: argparse.Namespace) -> None:
    """Print the schema."""
    import json

    from hf_deepwide.runs.classification import ClassificationRecipe
    from hf_deepwide.runs.masked_lm import MaskedLMRecipe
    from hf_deepwide.runs.recipe import Recipe
    from hf_deepwide.runs.schema import recipe_schema

    kinds = {"translation": Recipe, "masked-lm": MaskedLMRecipe, "classification": ClassificationRecipe}
    print(json.dumps(recipe_schema(kinds[args.task]), indent=1))
