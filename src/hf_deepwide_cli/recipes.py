"""List, show or copy the packaged recipes.

hf-deepwide recipes                       list the names and what each recipe trains
hf-deepwide recipes quickstart            print a recipe, with the keys of the recipes that it extends
hf-deepwide recipes quickstart --copy .   copy it, as one file without `extends`, to begin a recipe of your own
hf-deepwide recipes multi30k_en_de_vanilla --fit my.de my.en --copy small.yaml
                                          fit vocabulary, batches, epochs and warm-up to the size of your two files
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from . import packaged

# Fields of latent depth that count updates. In a fitted recipe, the longest of them ends after this share of training.
ANNEALED = ("temperature_anneal_steps", "soft_selection_steps", "kl_anneal_steps", "target_depth_anneal_steps")
ANNEALED_SHARE = 2 / 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", nargs="?", help="a packaged recipe, or a file")
    parser.add_argument("--copy", type=Path, metavar="PLACE", help="a folder or a file name")
    parser.add_argument(
        "--fit",
        type=Path,
        nargs=2,
        metavar=("SOURCE", "TARGET"),
        help="two text files to train on; the recipe is fitted to their size",
    )


def run_light(args: argparse.Namespace) -> bool:
    """List, print or copy packaged recipes without loading the library; return False for everything else.

    `run` then does the rest. If something fails here, it also fails in `run`, which reports the reason.
    """
    if args.fit is not None:
        return False
    if args.name is None:
        if args.copy:
            return False
        names = packaged.names()
        width = max(map(len, names))
        for name in names:
            text = (packaged.folder() / f"{name}.yaml").read_text(encoding="utf-8")
            print(f"{name:<{width}}  {packaged.title(text)}")
        return True
    if args.name not in packaged.names() or Path(args.name).is_file():
        return False
    text = packaged.whole(packaged.folder() / f"{args.name}.yaml")
    if args.copy is None:
        print(text, end="")
        return True
    target = _target(args.copy, f"{Path(args.name).name}.yaml")
    if not _write_new(target, text):
        return False
    print(target)
    return True


def run(args: argparse.Namespace) -> None:
    """Print or copy a recipe."""
    from hf_deepwide.durable import check_output, write_whole
    from hf_deepwide.errors import UserError
    from hf_deepwide.runs.recipe import find_recipe

    if args.name is None:
        raise UserError(f"--{'fit' if args.fit else 'copy'}: name the recipe first: hf-deepwide recipes NAME …")
    path = find_recipe(args.name)
    text = whole(path) if args.fit is None else fitted(path, *args.fit)
    if args.copy is None:
        print(text, end="")
        return
    target = _target(args.copy, path.name)
    check_output(target)
    write_whole(target, text)
    print(target)


def _target(place: Path, name: str) -> Path:
    """The file to write: `place`, or `name` in it if it is a folder."""
    return place / name if place.is_dir() else place


def _write_new(target: Path, text: str) -> bool:
    """Write a new file in full or not at all; return False if the file exists or cannot be written in this way."""
    draft = target.with_name(f".{target.name}")
    try:
        file = draft.open("x", encoding="utf-8")
    except (OSError, ValueError):
        return False
    try:
        with file:
            file.write(text)
        os.link(draft, target)  # refuses a target that exists
    except OSError:
        return False
    finally:
        draft.unlink()
    return True


def whole(path: Path) -> str:
    """A recipe as one file: its own text, or, if it extends another recipe, its comment and the merged values."""
    from hf_deepwide.runs.recipe import EXTENDS, PACKAGED, read_values

    text = path.read_text(encoding="utf-8-sig")
    if path.is_relative_to(PACKAGED):
        return packaged.whole(path)
    if not any(line.startswith(f"{EXTENDS}:") for line in text.splitlines()):
        return text
    return f"{packaged.header(text)}\n{_sections(read_values(path))}"


def _sections(values: dict[str, dict[str, Any]]) -> str:
    """The YAML text of the sections that have keys; only recipes for translation have a section `evaluation`."""
    from hf_deepwide.runs.recipe import used_values
    from hf_deepwide.runs.yaml_values import to_yaml

    return to_yaml({section: keys for section, keys in used_values(values).items() if keys})


def fitted(path: Path, source: Path, target: Path) -> str:
    """A recipe as one file, with settings that fit the size of two text files.

    Training is counted in epochs, so validation and checkpoints come once in each epoch, too. The vocabulary size is
    fitted only if the recipe learns subwords. A line about the results to expect is printed on stderr.

    Raises:
        UserError: the recipe does not train a translation model on two files; a file cannot be read; or the files have
            different numbers of lines.
    """
    from hf_deepwide.data.batches import round_up
    from hf_deepwide.data.text_files import read_lines
    from hf_deepwide.errors import UserError
    from hf_deepwide.runs.recipe import load_recipe, read_values
    from hf_deepwide.runs.suggestions import measure, suggest_settings

    try:
        recipe = load_recipe(path)
    except UserError as error:
        raise UserError(f"--fit: a recipe that trains a translation model is accepted, and {error}") from error
    reasons = {
        f"format: {recipe.data.format} does not read two files of text": recipe.data.format != "text",
        "pairs names several language pairs, and two files are of one": bool(recipe.data.pairs),
        "streaming: true needs training.max_steps, which is not fitted": recipe.data.streaming,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UserError(f"--fit: {path}: data.{reason}; choose another recipe, such as multi30k_en_de_vanilla")
    sources, targets = list(read_lines(source)), list(read_lines(target))
    if len(sources) != len(targets):
        raise UserError(
            f"--fit: {source} has {len(sources):,} lines and {target} has {len(targets):,}; line 7 of the first must "
            "be what line 7 of the second translates"
        )
    longest = int(round_up(recipe.data.max_length, 8))  # a batch holds the longest pair
    suggested = suggest_settings(measure(sources, targets), longest)
    values = read_values(path)
    tokenizer, training = values["tokenizer"], values["training"]
    learns = not (recipe.tokenizer.path or recipe.tokenizer.codes or recipe.tokenizer.words)
    fits = {name: getattr(suggested, name) for name in ("max_tokens", "num_train_epochs", "warmup_steps")}
    if learns:
        tokenizer["vocab_size"] = suggested.vocab_size
    for name in ("max_steps", "gradient_accumulation_steps", "eval_steps", "save_steps"):
        training.pop(name, None)
    if averaged := training.get("average_last"):  # the checkpoints are now one epoch apart
        training["average_last"] = min(averaged, suggested.num_train_epochs // 4)
    annealed = {name: steps for name, steps in values["model"].items() if name in ANNEALED and steps}
    longest_steps, end = max(annealed.values(), default=0), int(ANNEALED_SHARE * suggested.updates)
    if longest_steps > end:
        values["model"] |= {name: max(1, steps * end // longest_steps) for name, steps in annealed.items()}
    by_steps = [name for name in ("eval_strategy", "save_strategy") if training.get(name) == "steps"]
    training |= fits | dict.fromkeys(by_steps, "epoch")
    if suggested.expectation and recipe.init_from is None:
        print(f"what to expect of {len(sources):,} pairs: {suggested.expectation}", file=sys.stderr)
    settings = ", ".join(["vocab_size"] * learns + [*fits])
    header = (
        f"# {path.stem}, fitted to {len(sources):,} sentence pairs, for about {suggested.updates:,} updates:\n"
        f"# {settings}. A recipe that extends this one names your data.\n"
    )
    numbered = [*by_steps, "num_train_epochs"]  # their comments have numbers of the other corpus
    return f"{header}\n{packaged.with_comments(_sections(values), whole(path), numbered)}"
