"""A recipe: one YAML file that says everything about a run, and dotted overrides of its keys.

    model:      {family: mat, init_from: null, d_model: 256, …}     family and fields of its config
    data:       {format: text, train: multi30k/train, …}            `data.corpora.DataArguments`
    tokenizer:  {vocab_size: 8000, …}                               `data.tokenizer.TokenizerArguments`
    training:   {max_tokens: 4096, learning_rate: 1e-3, …}          `training.arguments.TranslationTrainingArguments`
    evaluation: {num_beams: 5, …}                                   `evaluation.translate.EvaluationArguments`

All keys are checked before anything is read or trained: a recipe that loads fails later only on what it names
(files, checkpoints), not on how it is written.
"""

import copy
import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, PreTrainedConfig

from ..checkpoint_files import MARK
from ..data.corpora import DataArguments
from ..data.tokenizer import TRAINING_KEYS, TokenizerArguments
from ..durable import is_same
from ..errors import UserError, one_line, quote
from ..evaluation.averages import groups
from ..evaluation.metrics import build_metrics
from ..evaluation.translate import EvaluationArguments
from ..families import all_families
from ..limits import Range
from ..models.configuration_base import ENTRIES, LAYERS, WEIGHT, DeepWideConfig
from ..models.quoting import QUOTED
from ..reading import home_expanded, read_text
from ..redaction import hide, is_secret, take_secrets, with_secrets, without_secrets
from ..training.arguments import REFUSED, TranslationTrainingArguments
from .yaml_values import LARGEST, parse_yaml, to_yaml

# Keys of the section training that say where and how a run is run, not what it is: it may go on with others.
NO_DIFFERENCE = {"output_dir", "on_nonfinite", "max_skipped"}
LINEAGE = 5  # how many recipes may extend one another

RECIPE = "recipe.yaml"  # in the folder of a run: what it was started with
# What keys and model types are called elsewhere.
ALSO_CALLED = {"lr": "learning_rate", "batch_size": "max_tokens", "epochs": "num_train_epochs"}
ALSO_CALLED |= {"nllb": "m2m_100", "opus-mt": "marian", "mbart50": "mbart", "transformer": "vanilla_transformer"}
EXTENDS = "extends"  # the key that names the recipe whose keys a recipe begins with
PACKAGED = Path(__file__).parents[1] / "recipes"


@dataclass
class Recipe:
    """A checked recipe.

    Args:
        name: the file's name without its suffix; what the run is called.
        source: the file, for messages.
        values: section to keys, as written and overridden, without secrets: what a run keeps as its `recipe.yaml`.
        data, tokenizer, evaluation: the sections as objects.
        secrets: the tokens, passwords and keys that are not in `values`, by section and key.

    Another kind of recipe is a subclass with its own `task`, `sections`, `families`, and `refused` keys, each with
    what to use instead. `comments` explain keys, by section, where the reference recipe does so for translation alone.
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
        """Model types that can be trained: ours, and Transformers' own for control runs.

        Transformers counts models of speech among them; their configs have no vocabulary of their own.
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
        return self.values["model"].get("init_from")

    @property
    def model_fields(self) -> dict[str, Any]:
        """Config fields that the recipe sets."""
        model = self.values["model"]
        return {key: value for key, value in model.items() if key not in ("family", "init_from")}

    @property
    def output_dir(self) -> Path:
        """Where the run lives: `training.output_dir`, else `runs/<name>`."""
        folder = self.values["training"].get("output_dir")
        if folder is None:
            folder = Path("runs", self.name)
        elif not str(folder).strip():
            raise UserError(f"{self.source}: training.output_dir is empty; give a folder (null: runs/{self.name})")
        return home_expanded(folder, f"{self.source}: training.output_dir")

    def training_arguments(self) -> TranslationTrainingArguments:
        """The section `training` as an object. Made on demand: making it chooses and opens the devices."""
        fields = with_secrets(self.values["training"], self.secrets.get("training", {}))
        fields |= {"output_dir": str(self.output_dir)}
        try:
            return self.sections["training"](**fields)
        # ImportError: what an argument asks for is not installed; OSError: a file that an argument names; the others:
        # what Transformers and Accelerate raise for mappings and lists that hold what they do not expect
        except (ValueError, ImportError, OSError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise UserError(f"{self.source}: training: {one_line(hide(str(error), self.secrets))}") from error


def load_recipe(path: str | Path, overrides: Sequence[str] = (), kind: type[Recipe] = Recipe) -> Recipe:
    """Read a recipe of a kind and apply overrides, given as on the command line: `--training.max_steps 100 …`.

    The one that a run has kept is of that run: it has its name, and goes on where it lies.

    Args:
        path: a file, or the name of a packaged recipe, such as `quickstart` or `masked_lm/multi30k_masked_lm`.
        overrides: dotted keys and values.
        kind: what is trained.

    Raises:
        UserError: no such file; not YAML; an unknown section or key (names the nearest one); a value of a wrong
            type or out of range. Each message starts with the file (or the override) and the key's dotted path.
    """
    path = find_recipe(path)
    values = read_values(path, kind)
    name, mark = path.stem, read_mark(path.parent) if path.name == RECIPE else None
    if mark is not None:
        name = mark.get("name", path.absolute().parent.name)
        values["training"]["output_dir"] = str(path.parent)
    given = parse_overrides(overrides)
    asked: dict[str, Any] = {}
    for key, value in given:
        section, _, field = key.partition(".")
        option = f"--{one_line(key, QUOTED)}"
        if not field or "." in field:
            owners = [name for name, cls in kind.sections.items() if cls and key in cls.__dataclass_fields__]
            meant = " or ".join(f"--{owner}.{key}" for owner in owners)
            example = f"here {meant}" if owners else "as in --training.max_steps 100"
            sections = ", ".join(kind.sections)
            raise UserError(f"{option}: an override names a section and a key, {example}; the sections are {sections}")
        _check_name(option, "section", section, kind.sections)
        values[section][field] = value
        if section == "tokenizer":
            asked[field] = value
    try:
        _check_tokenizer_keys(asked, values["tokenizer"], str(path))
        return check_recipe(values, name, str(path), kind)
    except UserError as error:
        named = [f"--{key}" for key, _ in given if _is_named(key, str(error))]
        raise UserError(f"{error} (set by {', '.join(named)})" if named else str(error)) from None


def _is_named(key: str, message: str) -> bool:
    """Whether a message is about a dotted key: `section.key`, or `section:` and the quoted key."""
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
    if packaged.is_file():  # a folder of this name, such as that of its run, does not hide it
        return packaged
    if name.exists():
        return name
    known = packaged_recipes()
    near = difflib.get_close_matches(str(name), known, n=1) or [each for each in known if each.endswith(f"/{name}")]
    hint = f"did you mean {near[0]!r}?" if near else "`hf-deepwide recipes` lists the packaged ones"
    raise UserError(f"there is no recipe {quote(str(path))}: no file, and no packaged recipe of this name; {hint}")


def packaged_recipes() -> list[str]:
    """The names of the packaged recipes; the files in `base/` are only parts of others."""
    names = (file.relative_to(PACKAGED).with_suffix("").as_posix() for file in PACKAGED.rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith("base/"))


def read_values(path: Path, kind: type[Recipe] = Recipe, children: tuple[Path, ...] = ()) -> dict[str, dict[str, Any]]:
    """Section to keys of a recipe, merged over those of the recipe that it `extends`.

    Args:
        path: the file; what it extends is looked for in the same folder.
        kind: whose sections are accepted.
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
        raise UserError(f"{children[-1]}: {EXTENDS}: there is no file {path}")
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
        _check_name(source, "section", section, kind.sections)
        if keys is not None and not isinstance(keys, dict):
            raise UserError(f"{source}: {section}: a section is a mapping of keys to values, not {quote(keys)}")
    inherited = read_values(path.parent / parent, kind, (*children, path)) if parent else {}
    merged = {section: {**inherited.get(section, {}), **(values.get(section) or {})} for section in kind.sections}
    if path.name != RECIPE or read_mark(path.parent) is None:  # what a run has kept is merged
        _check_tokenizer_keys(values.get("tokenizer") or {}, merged["tokenizer"], source)
    return merged


def _check_tokenizer_keys(asked: dict[str, Any], tokenizer: dict[str, Any], source: str) -> None:
    """Refuse keys that say how a tokenizer is trained where one is taken as it is, unless they have their defaults.

    Args:
        asked: the keys of one file, or the overrides. What a parent says of its own tokenizer may stay behind.
        tokenizer: the section with the keys of all parents.
        source: how messages begin.
    """
    taken = _taken_tokenizer(tokenizer)
    for key in TRAINING_KEYS if taken else ():
        if asked.get(key, default := getattr(TokenizerArguments, key)) != default:
            raise UserError(
                f"{source}: tokenizer.{key} is {quote(asked[key])}, and has no effect beside tokenizer.{taken}, whose "
                f"tokenizer is taken as it is; leave it out, or set tokenizer.{taken} to null to train one"
            )


def _taken_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """The key that names a tokenizer, or merges, which are taken as they are; None where one is trained."""
    return next((key for key in ("path", "codes") if tokenizer.get(key)), None)


def used_values(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The sections without what a parent says of a new tokenizer, where a child takes another as it is."""
    tokenizer = values.get("tokenizer") or {}
    if not _taken_tokenizer(tokenizer):
        return values
    return {**values, "tokenizer": {key: value for key, value in tokenizer.items() if key not in TRAINING_KEYS}}


def check_recipe(values: dict[str, dict[str, Any]], name: str, source: str, kind: type[Recipe] = Recipe) -> Recipe:
    """Check every key and value and make the sections; `source` opens the messages."""
    _check_model(values["model"], kind, source)
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
        _check_fields(values[section], section, cls, kind.refused, source)
        if section == "training":
            continue
        try:
            sections[section] = cls(**copy.deepcopy(values[section]))
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
    evaluation = sections.get("evaluation")
    if evaluation and evaluation.average_languages:
        pairs = sections["data"].evaluated_pairs
        if not pairs:
            raise UserError(f"{source}: evaluation.average_languages: there is one language pair; set data.pairs")
        try:
            groups(pairs, evaluation.average_languages)
        except UserError as error:
            raise UserError(f"{source}: evaluation.{error}") from None
    if evaluation:
        data = sections["data"]
        scored = [pair for pair in data.language_pairs if "-".join(pair) not in data.train_only_pairs]
        for target_lang in dict.fromkeys(target for _, target in scored):
            try:  # a tokenizer may need a package that is not installed
                build_metrics(evaluation.metrics, tokenize=evaluation.tokenize, target_lang=target_lang)
            except UserError as error:
                raise UserError(f"{source}: evaluation.{error}") from None
    public, secrets = take_secrets(values)
    return kind(name, source, public, **sections, secrets=secrets)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What a run says of itself in `run.json`, or None if the folder is no run's.

    {} if an older version made the run. It left no mark, but a recipe without a comment beside checkpoints or results.
    """
    try:
        if (folder / MARK).is_file():
            mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
            return mark if isinstance(mark, dict) and "hf_deepwide" in mark else None
        if (folder / "results.json").is_file() or any(folder.glob("checkpoint-*/trainer_state.json")):
            text = read_text(folder / RECIPE, "recipe", LARGEST)
            return {} if to_yaml(parse_yaml(text, RECIPE)) == text else None
    except (OSError, ValueError, RecursionError):  # what is there is not ours
        pass
    return None


def parse_overrides(arguments: Sequence[str], form: str = "--section.key value") -> list[tuple[str, Any]]:
    """`["--a.b", "1", "--c.d-e=x"]` to `[("a.b", 1), ("c.d_e", "x")]`; values are YAML, dashes underscores.

    Raises:
        UserError: a word that is neither an option nor its value (write `form`), or an option without one.
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
        if not value.strip():  # YAML takes it for null, and a shell makes it of a variable that is not set
            raise UserError(f"{flag} is empty; give a value, {flag} null to unset it, or {flag} \"''\" for no text")
        if value.lstrip().startswith("#"):
            raise UserError(f"{flag}: {quote(value)} begins a comment in YAML; quote it twice: {flag} \"'{value}'\"")
        pairs.append((key, parse_yaml(value, flag)))
    return pairs


def differences(
    ours: dict[str, dict], theirs: dict[str, dict], apart_from: Iterable[str] = NO_DIFFERENCE
) -> list[str]:
    """Dotted keys in which two recipes' values differ, with both values, apart from some of the section training.

    Secrets make no difference.
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


def config_class(family: str) -> type[PreTrainedConfig]:
    """The config class of a model type."""
    return CONFIG_MAPPING[family]


def _check_model(fields: dict[str, Any], kind: type[Recipe], source: str) -> None:
    family, families = fields.get("family"), kind.families()
    if not isinstance(family, str):
        examples = "latent_depth" if len(families) == 1 else "vanilla_transformer or mat"
        raise UserError(f"{source}: model.family: give a model type, such as {examples}")
    if family not in families and family in CONFIG_MAPPING:
        accepted = one_line(", ".join(map(repr, families)), 150)
        raise UserError(
            f"{source}: model.family: {quote(family)} is not for {kind.task}; accepted: {accepted}. `hf-deepwide "
            "train` trains translation models, `train masked-lm` and `train classification` the others"
        )
    _check_name(f"{source}: model.family", "model type", family, families)
    init_from = fields.get("init_from")
    if init_from is not None and not isinstance(init_from, str):
        raise UserError(f"{source}: model.init_from: {quote(init_from)} is neither a folder, a Hub id, nor null")
    cls = config_class(family)
    if init_from is None and cls.sub_configs:
        raise UserError(
            f"{source}: model.family: a new {quote(family)} model cannot be made, as its parts have configs of their "
            "own; start from a checkpoint of this family (model.init_from)"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key in kind.refused:
            raise UserError(f"{source}: model.{key} has no effect here: {kind.refused[key]}")
        having = [name for name in all_families() if key in config_class(name).__dataclass_fields__]
        if key not in known and family in all_families() and having:
            raise UserError(
                f"{source}: model.{key} is no key of {family}; families with this key: {', '.join(having)}"
            )
        _check_name(f"{source}: model", "key", key, ["family", "init_from", *known])
    given = {key: value for key, value in fields.items() if key not in ("family", "init_from")}
    if given.get("dtype") not in (None, "float32"):
        raise UserError(
            f"{source}: model.dtype: {quote(given['dtype'])} is not accepted; weights are trained in float32, and "
            "training.bf16 says how they are multiplied"
        )
    hints = get_type_hints(cls, localns={"torch": torch})  # Transformers imports torch for type checkers alone
    for key, value in given.items():
        _check_type(key, value, hints[key], f"{source}: model")
    _check_sizes(cls, given, source)
    for key in ("is_encoder_decoder", "return_dict"):
        value = given.get(key)
        if value is not None and value != (needed := getattr(cls(), key)):
            raise UserError(f"{source}: model.{key}: {quote(value)} is not accepted; the family needs {needed}")
    if init_from is not None:
        given = _without_base(given, known)
    try:
        cls(**given)
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:  # AttributeError: no such dtype
        raise UserError(f"{source}: model: {one_line(error, 400)}") from error


def _without_base(given: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Fields of a model that starts from a base, which has the width or the heads that they leave out."""
    heads = [name for name in ("encoder_attention_heads", "decoder_attention_heads") if name in known]
    if "d_model" in given:
        return {**dict.fromkeys(heads, 1), **given}
    return {key: value for key, value in given.items() if key not in heads}


def _check_sizes(cls: type[PreTrainedConfig], given: dict[str, Any], source: str) -> None:
    """Refuse numbers that no model can have; configs of our own know better, those of Transformers know no limit."""
    for name, value in given.items():
        accepted = Range(-WEIGHT, LAYERS if "layers" in name else ENTRIES)
        if issubclass(cls, DeepWideConfig) or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not accepted.holds(value):
            raise UserError(f"{source}: model.{name} is {quote(value)}; accepted: {accepted}")


def _check_fields(values: dict[str, Any], section: str, cls: type, refused: dict[str, str], source: str) -> None:
    hints = get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for key, value in values.items():
        if key in refused:
            raise UserError(f"{source}: {section}.{key} has no effect here: {refused[key]}")
        _check_name(f"{source}: {section}", "key", key, [name for name in known if name not in refused])
        _check_type(key, value, hints[key], f"{source}: {section}")


def _check_type(key: str, value: Any, hint: Any, where: str) -> None:
    """Refuse a value of another type than an annotation says; a secret is not shown."""
    if not _fits(value, hint):
        shown = "its value" if is_secret(key) else quote(without_secrets(value))
        raise UserError(f"{where}.{key}: {shown} is not accepted; give {_describe(hint)}")


def _check_name(where: str, kind: str, name: Any, known: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones, and say which of them may have been meant."""
    known = list(known)
    if name in known:
        return
    given = one_line(name, QUOTED)
    near = difflib.get_close_matches(ALSO_CALLED.get(given, given), known, n=1)
    all_of_them = "`hf-deepwide recipes reference` shows all" if kind == "key" else f"accepted: {', '.join(known)}"
    hint = f"the nearest is {near[0]!r}" if near else one_line(all_of_them, 300)
    raise UserError(f"{where}: unknown {kind} {quote(name)}; {hint}")


def _fits(value: Any, hint: Any) -> bool:
    """True if a value read from YAML is of the type that an annotation asks for."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(element, inner[0]) for element in value)
    if origin in (dict, tuple):  # YAML has no tuples, but lists
        return isinstance(value, dict if origin is dict else list)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    """An annotation in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_describe, inner)))
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is list:
        return f"a list of {_describe(inner[0])}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        dict: "a mapping",
        type(None): "null",
    }
    return names.get(origin or hint, getattr(hint, "__name__", str(hint)))
