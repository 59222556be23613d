"""The card of a shared model: the card beside the model, or the card of an earlier share, or a minimal card."""

import logging
import os
import re
import shutil
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import card_text
from ..card_text import CARD
from ..checkpoint_files import CONFIG, read_config
from ..durable import sha256_of
from ..errors import UserError, prefixed
from ..exporting.shown_languages import Shown, shown_languages
from ..families import all_families
from ..models.language_pairs import Languages

logger = logging.getLogger(__name__)

LINKED = {".png", ".svg", ".jpg", ".jpeg", ".gif", ".json", ".yaml", ".yml", ".txt", ".md"}  # copied with a card
OF_THE_FILE = {"auto_map", "dtype", "transformers_version"}  # config fields that say nothing about the model itself
KINDS = {  # the description of a model in its card, by task
    "translation": "A translation model",
    "fill-mask": "A masked language model",
    "text-classification": "A model that classifies texts",
}


def task_of(model: PreTrainedModel) -> str:
    """Return the pipeline's task of a model. Models of Transformers' own classes that `share` writes all translate."""
    family = all_families().get(model.config.model_type)
    return "translation" if family is None else family.tasks[type(model)]


def minimal_card(
    model: PreTrainedModel, name: str, shown: Shown, repo_id: str | None = None, stock: bool = False
) -> ModelCard:
    """Return a model card that says what the model is and how to load it from its repository.

    For a class of Transformers (`stock`), the lines of code in the card do not need this package's code.
    """
    model_type = model.config.model_type
    task = task_of(model)
    use = card_text.use_of_stock(repo_id, shown) if stock else card_text.use_of_share(repo_id, task)
    named = zip(("src_lang", "tgt_lang"), shown.languages, strict=True)
    if not stock and (asked := "".join(f", {name}={card_text.literal(code)}" for name, code in named if code)):
        use += f"\n{card_text.PIPELINES[task]}({card_text.literal('A sentence in the source language.')}{asked})"
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=[task, "hf_deepwide", model_type])
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {card_text.text(name)}\n\n"
        f"{KINDS[task]} of the family `{model_type}`, {model.num_parameters():,} parameters.\n\n"
        f"{card_text.block(use, 'python')}\n{shown.note if stock else ''}"
    )


class Transfer(NamedTuple):
    """The places from which a model comes and to which it goes, on which its card depends."""

    source: Path | None  # the model's folder
    folder: Path | None  # the folder passed to `share`; None: only a repository, or a Space
    earlier: dict[str, list[str]]  # unchanged files in `folder` that `share` wrote earlier
    repo_id: str | None
    license: str | None


def write_card(staged: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, transfer: Transfer) -> None:
    """Write the model card, and copy the files that it refers to.

    A card in the target folder that a user wrote or edited stays. Otherwise the card is the first of these that
    exists: the card beside the model, the card of an earlier share of the same weights and class, a minimal card.

    Raises:
        UserError: the edited card is of another model, or a licence is given for it; or a card is not UTF-8 text.
    """
    source, folder, earlier, repo_id, license = transfer
    beside = None
    if source is not None and (source / CARD).is_file():
        if _is_inside(source / CARD, source):
            beside = source / CARD
        else:
            logger.warning("share: %s is a link to elsewhere, so it is left out", source / CARD)
    there = None if folder is None or not (folder / CARD).is_file() else folder / CARD
    if there is not None and CARD not in earlier:
        if license is not None:
            raise UserError(
                f"share: --license: {there} was edited, so it stays as it is; write `license: {license}` into it, or "
                "remove it to have it written anew"
            )
        if other := _other_fields(staged, there.parent):
            raise UserError(
                f"share: {there} was edited, and is of another model ({', '.join(other)} in {CONFIG} differ); give "
                "another folder, or remove the card to have it written anew"
            )
        logger.warning("share: %s was edited, so it is kept; remove it to get a new card", there)
        _copy_linked(there, staged, earlier)
        return
    named = None if there is None else card_text.license_of(there.read_text(encoding="utf-8"))
    if there is not None and not _is_same_model(staged, there.parent, earlier):
        there = None
    card, stock = beside or there, model.config.model_type not in all_families()
    shown = Shown({})
    if task_of(model) == "translation":
        shown = shown_languages(Languages(model.config, model.generation_config, tokenizer), tokenizer)
    if card is None:
        name = (repo_id or (folder or staged).resolve().as_posix()).rpartition("/")[2]
        text = str(minimal_card(model, name, shown, repo_id, stock))
    else:
        try:
            text = card.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"share: {card}: byte {error.start + 1} is not UTF-8 text") from error
        _copy_linked(card, staged, None if card == beside else earlier)
    text = card_text.for_repository(text, repo_id, license, shown if stock else None, model)
    if named is not None and card_text.license_of(text) is None:
        logger.warning("share: the earlier card named the licence %s, and this card names none; see --license", named)
    (staged / CARD).write_text(text, encoding="utf-8")


def _other_fields(staged: Path, folder: Path) -> list[str]:
    """Return the config fields that differ from those in a folder. A model that was only trained anew differs in none.

    A folder without a config holds no earlier share, and gives [].
    """
    if not (folder / CONFIG).is_file():
        return []
    with prefixed("share: "):
        ours, theirs = read_config(staged), read_config(folder)
    differ = [key for key in sorted({*ours, *theirs} - OF_THE_FILE) if ours.get(key) != theirs.get(key)]
    return ["model_type"] if "model_type" in differ else differ


def _is_same_model(staged: Path, folder: Path, earlier: dict[str, list[str]]) -> bool:
    """Return True if an earlier share wrote the same weights for the same class, so that its card fits this model.

    The class matters because a MAT with one branch has the weights of a vanilla model.
    """
    with prefixed("share: "):
        ours, theirs = (read_config(place).get("architectures") for place in (staged, folder))
    weights = staged.glob("*.safetensors")
    return ours == theirs and all(sha256_of(file) in earlier.get(file.name, ()) for file in weights)


def _copy_linked(card: Path, staged: Path, among: Container[str] | None) -> None:
    """Copy the files that a card refers to: all of them, or only those whose names are in `among`."""
    for name in linked(card):
        if (among is None or name in among) and not (staged / name).exists():
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(card.parent / name, staged / name)


def linked(card: Path) -> set[str]:
    """Return the paths of the pictures and small text files beside a card to which the card refers.

    JSON and TXT files at the top level are excluded, except results.json: Transformers reads such files (tokenizers,
    configs, adapters).
    """
    names: set[str] = set()
    if not card.is_file():
        return names
    for target in re.findall(r"\]\(([^)\s#]+)", card.read_text(encoding="utf-8", errors="replace")):
        path = Path(os.path.normpath(target))
        file = card.parent / path
        readable = len(path.parts) > 1 or path.suffix not in (".json", ".txt") or path.name == "results.json"
        plain = not path.is_absolute() and not any(part.startswith(".") for part in path.parts) and "\0" not in target
        if plain and readable and path.suffix in LINKED and _is_file_inside(file, card.parent):
            names.add(path.as_posix())
    return names - {CARD}


def _is_file_inside(path: Path, folder: Path) -> bool:
    """Return True if a path leads to a file in a folder. A path that the system refuses, as too long, gives False."""
    try:
        return _is_inside(path, folder) and path.is_file()
    except OSError:
        return False


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
