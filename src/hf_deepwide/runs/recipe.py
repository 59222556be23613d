"""A recipe: one YAML file with all settings of a run, and dotted overrides of its keys.

    model:      {family: mat, init_from: null, d_model: 256, …}     family and fields of its config
    data:       {format: text, train: multi30k/train, …}            `data.corpora.DataArguments`
    tokenizer:  {vocab_size: 8000, …}                               `data.tokenizer.TokenizerArguments`
    training:   {max_tokens: 4096, learning_rate: 1e-3, …}          `training.arguments.TranslationTrainingArguments`
    evaluation: {num_beams: 5, …}                                   `evaluation.arguments.EvaluationArguments`

All keys are checked before anything is read or trained. A recipe that loads can fail later only because of the files
or checkpoints that it names, not because of how it is written.
"""

import copy
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

from ..checkpoint_files import MARK
from ..data.corpora import DataArguments
from ..data.tokenizer import TRAINING_KEYS, TokenizerArguments
from ..durable import is_same
from ..errors import UserError, one_line, prefixed, quote
from ..evaluation.arguments import EvaluationArguments
from ..models.quoting import QUOTED
from ..reading import folder_or_hub_id, home_expanded, read_json, read_text
from ..redaction import hide, take_secrets, with_secrets
from ..training.arguments import REFUSED, TranslationTrainingArguments
from .recipe_checks import (
    check_evaluation,
    check_model,
    check_name,
    check_section,
    check_tokenizer_keys,
    taken_tokenizer,
)
from .yaml_values import LARGEST, parse_yaml

# Keys of the section training that do not change what is trained: a run may be resumed with other values.
NO_DIFFERENCE = {"output_dir", "on_nonfinite", "max_skipped"}
LINEAGE = 5  # how many recipes may extend one another

RECIPE = "recipe.yaml"  # in the folder of a run: the recipe that the run was started with
EXTENDS = "extends"  # the key that names the parent recipe, whose keys the recipe inherits
PACKAGED = Path(__file__).parents[1] / "recipes"


@dataclass
class Recipe:
    """A checked recipe.

    Args:
        name: name of the run, by default the file's name without its suffix.
        source: the file, for messages.
        values: section to keys, with overrides and without secrets. A run saves them as its `recipe.yaml`.
        data, tokenizer, evaluation: the sections as objects.
        secrets: the tokens, passwords and keys that are not in `values`, by section and key.

    Another kind of recipe is a subclass with its own `task`, `sections`, `families` and `refused`. `refused` maps each
    refused key to a reason or a replacement. `comments` explains keys, by section, that the reference recipe explains
    only for translation.
    """

    task: ClassVar[str] = "translation"
    sections: ClassVar[dict[str, type | None]] = {
        "model": None,
        "data": DataArguments,
        "tokenizer": TokenizerArguments,
        "training": TranslationTrainingArguments,
        "evaluation": EvaluationArguments,
    }
    refused: ClassVar[dict[str, str]] = REFUSED | {
        "bootstrap_samples": "a run compares no systems; give `hf-deepwide evaluate --bootstrap_samples` instead"
    }
    comments: ClassVar[dict[str, dict[str, str]]] = {}

    name: str
    source: str
    values: dict[str, dict[str, Any]]
    data: DataArguments
    tokenizer: TokenizerArguments
    evaluation: EvaluationArguments
    secrets: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def families(cls) -> list[str]:
        """Model types that can be trained: those of this library, and Transformers' own for control runs.

        Transformers' mapping also has models of speech. They are left out: their configs have no vocabulary size.
        """
        configs = [*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
        text_configs = [each for each in configs if hasattr(each, "vocab_size") or "vocab_size" in each.attribute_map]
        return sorted({each.model_type for each in text_configs if each.model_type})

    @property
    def family(self) -> str:
        """The model type."""
        return self.values["model"]["family"]

    @property
    def init_from(self) -> str | None:
        """The checkpoint that training starts from, if any."""
        name = self.values["model"].get("init_from")
        return name and folder_or_hub_id(name, f"{self.source}: model.init_from")

    @property
    def model_fields(self) -> dict[str, Any]:
        """Config fields that the recipe sets."""
        model = self.values["model"]
        return {key: value for key, value in model.items() if key not in ("family", "init_from")}

    @property
    def output_dir(self) -> Path:
        """The folder of the run: `training.output_dir`, else `runs/<name>`."""
        folder = self.values["training"].get("output_dir")
        if folder is None:
            folder = Path("runs", self.name)
        elif not str(folder).strip():
            raise UserError(f"{self.source}: training.output_dir is empty; give a folder (null: runs/{self.name})")
        return home_expanded(folder, f"{self.source}: training.output_dir")

    def training_arguments(self) -> TranslationTrainingArguments:
        """Make the section `training` as an object, on demand only, because this chooses and opens the devices."""
        fields = with_secrets(self.values["training"], self.secrets.get("training", {}))
        fields |= {"output_dir": str(self.output_dir)}
        try:
            return self.sections["training"](**fields)
        # ImportError: a package that an argument needs is not installed. OSError: a file that an argument names.
        # Transformers and Accelerate raise the others for mappings and lists with unexpected content.
        except (ValueError, ImportError, OSError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{self.source}: training: {one_line(hide(str(error), self.secrets))}") from error


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: type[Recipe] = Recipe) -> Recipe:
    """Read a recipe of a kind and apply overrides, given as on the command line: `--training.max_steps 100 …`.

    A `recipe.yaml` in the folder of a run belongs to that run: the recipe gets the run's name and folder.

    Args:
        path: a file, or the name of a packaged recipe, such as `quickstart` or `masked_lm/multi30k_masked_lm`.
        overrides: dotted keys and values.
        kind: the class of the recipe, which depends on what is trained.

    Raises:
        UserError: no such file; not YAML; an unknown section or key (names the nearest one); a value of a wrong
            type or out of range. Each message starts with the file (or the override) and the key's dotted path.
    """
    given, path = Path(path), find_recipe(path)
    if not given.is_absolute():
        refuse_hidden_copy(path, kind)
    values = read_values(path, kind)
    name, mark = path.stem, read_mark(path.parent) if path.name == RECIPE else None
    if mark is not None:
        name = mark.get("name", path.absolute().parent.name)
        values["training"]["output_dir"] = str(path.parent)
    changes = parse_overrides(overrides)
    asked: dict[str, Any] = {}
    for key, value in changes:
        section, _, field = key.partition(".")
        option = f"--{one_line(key, QUOTED)}"
        if not field or "." in field:
            owners = [name for name, cls in kind.sections.items() if cls and key in cls.__dataclass_fields__]
            meant = " or ".join(f"--{owner}.{key}" for owner in owners)
            example = f"here {meant}" if owners else "as in --training.max_steps 100"
            sections = ", ".join(kind.sections)
            raise UserError(f"{option}: an override names a section and a key, {example}; the sections are {sections}")
        check_name(option, "section", section, kind.sections)
        values[section][field] = value
        if section == "tokenizer":
            asked[field] = value
    try:
        check_tokenizer_keys(asked, values["tokenizer"], str(path))
        return check_recipe(values, name, str(path), kind)
    except UserError as error:
        named = [f"--{key}" for key, _ in changes if _is_named(key, str(error))]
        raise UserError(f"{error} (set by {', '.join(named)})" if named else str(error)) from None


def _is_named(key: str, message: str) -> bool:
    """Return whether a message is about a dotted key: `section.key`, or `section:` and the quoted key."""
    section, _, field = key.partition(".")
    return bool(re.search(rf"\b{re.escape(key)}\b|\b{re.escape(section)}: .*'{re.escape(field)}'", message))


def find_recipe(path: str | Path) -> Path:
    """The file of a recipe: `path` itself, or the packaged recipe of that name.

    Raises:
        UserError: there is neither.
    """
    name = Path(path)
    packaged = PACKAGED / f"{name}.yaml"
    if name.suffix or name.is_absolute() or name.is_file():
        return name
    if packaged.is_file():  # even if a folder has this name, such as the folder of its run
        return packaged
    if name.exists():
        return name
    known = packaged_recipes()
    near = difflib.get_close_matches(str(name), known, n=1) or [each for each in known if each.endswith(f"/{name}")]
    near = [file.name for file in [name.with_name(f"{name.name}.yaml")] if file.is_file()] or near
    hint = f"did you mean {near[0]!r}?" if near else "`hf-deepwide recipes` lists the packaged ones"
    raise UserError(f"there is no recipe {quote(str(path))}: no file, and no packaged recipe of this name; {hint}")


def refuse_hidden_copy(path: Path, kind: type[Recipe]) -> None:
    """Refuse a packaged recipe if the working directory holds a file of the same name with other content.

    Raises:
        UserError: there is such a file. It is an edited copy, and would not be used.
    """
    copy_here = Path(path.name)
    if not (path.is_relative_to(PACKAGED) and copy_here.is_file()):
        return
    if read_values(copy_here, kind) == read_values(path, kind):
        return
    raise UserError(
        f"{path.stem} is the name of a packaged recipe, and {copy_here}, which differs from it, lies in the working "
        f"directory. To use the file, write {copy_here}; to use the packaged recipe, give the file another name"
    )


def packaged_recipes() -> list[str]:
    """The names of the packaged recipes; the files in `base/` are only parts of others."""
    names = (file.relative_to(PACKAGED).with_suffix("").as_posix() for file in PACKAGED.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith("base/"))


def read_values(path: Path, kind: type[Recipe] = Recipe, children: tuple[Path, ...] = ()) -> dict[str, dict[str, Any]]:
    """Read the sections of a recipe, with their keys merged over the keys of the recipe that it `extends`.

    Args:
        path: the file. The path in its key `extends` is relative to the file's folder.
        kind: the class of the recipe, whose sections are accepted.
        children: the recipes that extend this one, for messages.

    Raises:
        UserError: not a recipe, or one that extends itself; the message names the file and its children.
    """
    source = " extended by ".join(map(str, (path, *reversed(children))))
    if any(is_same(path, child) for child in children):
        raise UserError(f"{source}: {EXTENDS}: a recipe cannot extend itself")
    if len(children) > LINEAGE:
        raise UserError(f"{children[0]}: {EXTENDS}: more than {LINEAGE} recipes that extend one another")
    if children and not path.is_file():
        raise UserError(f"{children[-1]}: {EXTENDS}: there is no file {path}{_instead(path)}")
    if not path.exists():
        raise UserError(f"there is no recipe {path}{_instead(path)}")
    values = parse_yaml(read_text(path, "recipe", LARGEST), source)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UserError(f"{source}: a recipe is a mapping of the sections {', '.join(kind.sections)}")
    parent = values.pop(EXTENDS, None)
    if not isinstance(parent, str | None):
        raise UserError(
            f"{source}: {EXTENDS}: {quote(parent)} is no file name; write the recipe that this one changes"
        )
    for section, keys in values.items():
        check_name(source, "section", section, kind.sections)
        if keys is not None and not isinstance(keys, dict):
            raise UserError(f"{source}: {section}: a section is a mapping of keys to values, not {quote(keys)}")
    inherited = read_values(path.parent / parent, kind, (*children, path)) if parent else {}
    merged = {section: {**inherited.get(section, {}), **(values.get(section) or {})} for section in kind.sections}
    if path.name != RECIPE or read_mark(path.parent) is None:  # the recipe in a run's folder is merged already
        check_tokenizer_keys(values.get("tokenizer") or {}, merged["tokenizer"], source)
    return merged


def _instead(path: Path) -> str:
    """Return a hint at the file that may have been meant, for a file that does not exist; '' without one."""
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.y*ml")], n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    packaged = path.stem in packaged_recipes()
    return f"; to extend the packaged recipe, copy it: hf-deepwide recipes {path.stem} --copy ." if packaged else ""


def used_values(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sections. Leave out keys for training a tokenizer if the recipe takes an existing tokenizer."""
    tokenizer = values.get("tokenizer") or {}
    if not taken_tokenizer(tokenizer):
        return values
    return {**values, "tokenizer": {key: value for key, value in tokenizer.items() if key not in TRAINING_KEYS}}


def check_recipe(values: dict[str, dict[str, Any]], name: str, source: str, kind: type[Recipe] = Recipe) -> Recipe:
    """Check every key and value, and make the recipe; error messages start with `source`."""
    check_model(values["model"], kind, source)
    if values["model"].get("init_from") and not values["tokenizer"].get("path"):
        raise UserError(
            f"{source}: model.init_from: the checkpoint knows only its own tokens, so tokenizer.path must be set "
            f"(to {one_line(values['model']['init_from'], QUOTED)}, if its tokenizer is beside it)"
        )
    if values["training"].get("lora_r") and not values["model"].get("init_from"):
        raise UserError(
            f"{source}: training.lora_r: LoRA adapts a trained model; set model.init_from, or leave it out"
        )
    sections = {}
    for section, cls in kind.sections.items():
        if cls is None:
            continue
        check_section(values[section], section, cls, kind.refused, source)
        if section == "training":
            continue
        with prefixed(f"{source}: "):
            sections[section] = cls(**copy.deepcopy(values[section]))
    if "evaluation" in sections:
        check_evaluation(sections["evaluation"], sections["data"], source)
    public, secrets = take_secrets(values)
    return kind(name, source, public, **sections, secrets=secrets)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """Return the content of a run's `run.json`, or None if the folder does not belong to a run."""
    try:
        mark = read_json(folder / MARK)
    except (OSError, ValueError):  # there is no such file, or no run wrote it
        return None
    return mark if isinstance(mark, dict) and "hf_deepwide" in mark else None


def parse_overrides(arguments: Sequence[str], form: str = "--section.key value") -> list[tuple[str, Any]]:
    """Parse `["--a.b", "1", "--c.d-e=x"]` to `[("a.b", 1), ("c.d_e", "x")]`: YAML values, dashes become underscores.

    Raises:
        UserError: a word is neither an option nor a value (the message shows `form`), or an option has no value.
    """
    pairs, rest = [], list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise UserError(f"{quote(option)} is no override; write {form}")
        key, equals, value = option[2:].partition("=")
        key = key.replace("-", "_")
        flag = f"--{one_line(key, QUOTED)}"
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(f"{flag} has no value; write {flag} VALUE (a switch: {flag} true)")
            value = rest.pop(0)
        if not value.strip():  # YAML reads it as null, and a shell passes it for a variable that is not set
            raise UserError(f"{flag} is empty; give a value, {flag} null to unset it, or {flag} \"''\" for no text")
        if value.lstrip().startswith("#"):
            raise UserError(f"{flag}: {quote(value)} begins a comment in YAML; quote it twice: {flag} \"'{value}'\"")
        pairs.append((key, parse_yaml(value, flag)))
    return pairs


def differences(
    ours: dict[str, dict], theirs: dict[str, dict], apart_from: Iterable[str] = NO_DIFFERENCE
) -> list[str]:
    """Return the dotted keys whose values differ in two recipes, with both values.

    Secrets, and the keys `apart_from` of the section training, are not compared.
    """
    lines = []
    ours, theirs = (take_secrets(values)[0] for values in (ours, theirs))
    for section in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(section, {}), theirs.get(section, {})
        for key in sorted({*a, *b} - ({*apart_from} if section == "training" else set())):
            if key not in a or key not in b or a[key] != b[key]:
                shown = [quote(side[key]) if key in side else "not set" for side in (a, b)]
                lines.append(f"{section}.{key}: {shown[0]}, now {shown[1]}")
    return lines
