"""List, show or copy the packaged recipes.

hf-deepwide recipes                       list the names and what each recipe trains
hf-deepwide recipes quickstart            print a recipe, with the keys of the recipes that it extends
hf-deepwide recipes quickstart --copy .   copy it, as one file without `extends`, to begin a recipe of your own
"""

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", help="a packaged recipe, or a file")
    parser.add_argument("--copy", type=Path, metavar="PLACE", help="a folder or a file name")


def run(args: argparse.Namespace) -> None:
    """List, print or copy."""
    from hf_deepwide.durable import check_output, write_whole
    from hf_deepwide.errors import UserError
    from hf_deepwide.runs.recipe import PACKAGED, find_recipe, packaged_recipes

    if args.name is None:
        if args.copy:
            raise UserError("--copy: name the recipe to copy")
        names = packaged_recipes()
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {title((PACKAGED / f'{name}.yaml').read_text(encoding='utf-8'))}")
        return
    path = find_recipe(args.name)
    text = whole(path)
    if args.copy is None:
        print(text, end="")
        return
    target = args.copy / path.name if args.copy.is_dir() else args.copy
    check_output(target)
    write_whole(target, text)
    print(target)


def title(text: str) -> str:
    """The first sentence of a recipe's comment."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).partition(". ")[0].rstrip(".")


def whole(path: Path) -> str:
    """A recipe as one file: the text itself, or its comment and the merged values where it extends another."""
    from hf_deepwide.runs.masked_lm import MaskedLMRecipe
    from hf_deepwide.runs.recipe import EXTENDS, Recipe, read_values, to_yaml

    text = path.read_text(encoding="utf-8")
    if not any(line.startswith(f"{EXTENDS}:") for line in text.splitlines()):
        return text
    kind = MaskedLMRecipe if path.parent.name == "masked_lm" else Recipe
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    return f"{comment}\n{to_yaml(read_values(path, kind))}"
