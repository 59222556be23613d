"""List, show or copy the packaged recipes.

hf-deepwide recipes                       list the names and what each recipe trains
hf-deepwide recipes quickstart            print a recipe, with the keys of the recipes that it extends
hf-deepwide recipes quickstart --copy .   copy it, as one file without `extends`, to begin a recipe of your own
hf-deepwide recipes multi30k_en_de_vanilla --fit my.de my.en --copy small.yaml
                                          fit vocabulary, batches, epochs and warm-up to the size of your two files
"""

import argparse
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", help="a packaged recipe, or a file")
    parser.add_argument("--copy", type=Path, metavar="PLACE", help="a folder or a file name")
    parser.add_argument(
        "--fit",
        type=Path,
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="two text files to train on, whose size the recipe is to fit",
    )


def run(args: argparse.Namespace) -> None:
    """List, print or copy."""
    from hf_deepwide.durable import check_output, write_whole
    from hf_deepwide.errors import UserError
    from hf_deepwide.runs.recipe import PACKAGED, find_recipe, packaged_recipes

    if args.name is None:
        if args.copy or args.fit:
            raise UserError(f"--{'copy' if args.copy else 'fit'}: name the recipe first: hf-deepwide recipes NAME …")
        names = packaged_recipes()
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {title((PACKAGED / f'{name}.yaml').read_text(encoding='utf-8'))}")
        return
    path = find_recipe(args.name)
    text = whole(path) if args.fit is None else fitted(path, *args.fit)
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
    return f"{comment(text)}\n{to_yaml(read_values(path, kind))}"


def fitted(path: Path, source: Path, target: Path) -> str:
    """A recipe as one file, with settings that fit the size of two text files; what to expect goes to stderr.

    Raises:
        UserError: a file that cannot be read, or files of different lengths.
    """
    from hf_deepwide.data.corpora import read_lines
    from hf_deepwide.errors import UserError
    from hf_deepwide.runs.recipe import read_values, to_yaml
    from hf_deepwide.runs.suggestions import measure, suggest_settings

    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(
            f"--fit: {source} has {len(sources):,} lines and {target} has {len(targets):,}; line 7 of the first must "
            "be what line 7 of the second translates"
        )
    suggested = suggest_settings(measure(sources, targets))
    values = read_values(path)
    values.setdefault("tokenizer", {})["vocab_size"] = suggested.vocab_size
    values.setdefault("training", {}).update(
        max_tokens=suggested.max_tokens,
        num_train_epochs=suggested.num_train_epochs,
        warmup_steps=suggested.warmup_steps,
    )
    if suggested.expectation:
        print(f"what to expect of {len(sources):,} pairs: {suggested.expectation}", file=sys.stderr)
    header = f"# Fitted to {len(sources):,} sentence pairs: vocab_size, max_tokens, num_train_epochs, warmup_steps.\n"
    return f"{comment(path.read_text(encoding='utf-8'))}{header}\n{to_yaml(values)}"


def comment(text: str) -> str:
    """The comment at the head of a recipe."""
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
