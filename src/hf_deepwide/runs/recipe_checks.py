"""Checks of a recipe's keys and values, before anything is read or trained.

A message names the file, the section and the key, the given value, and the accepted values.
"""

import dataclasses
import difflib
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..data.arguments import DataArguments
from ..data.tokenizer import TRAINING_KEYS, TokenizerArguments
from ..errors import UserError, one_line, prefixed, quote
from ..evaluation.arguments import EvaluationArguments
from ..evaluation.averages import groups
from ..evaluation.metrics import build_metrics
from ..families import all_families
from ..limits import Range
from ..models.configuration_base import ENTRIES, LAYERS, WEIGHT, DeepWideConfig
from ..models.quoting import QUOTED
from ..redaction import is_secret, without_secrets

if TYPE_CHECKING:
    from .recipe import Recipe

# Names of keys and model types in other libraries, to their names here.
ALSO_CALLED = {"lr": "learning_rate", "batch_size": "max_tokens", "epochs": "num_train_epochs"}
ALSO_CALLED |= {"nllb": "m2m_100", "opus-mt": "marian", "mbart50": "mbart", "transformer": "vanilla_transformer"}


def check_model(fields: dict[str, Any], kind: "type[Recipe]", source: str) -> None:
    """Refuse a section `model` from which no model can be made, with any vocabulary."""
    family, accepted_families = fields.get("family"), kind.families()
    families = [name for name in all_families() if name in accepted_families]
    families += [name for name in accepted_families if name not in families]
    if family is None:
        for slip in difflib.get_close_matches("family", [*map(str, fields)]):
            check_name(f"{source}: model", "key", slip, ["family"])
    if not isinstance(family, str):
        raise UserError(f"{source}: model.family: give a model type, such as {families[0]} or {families[1]}")
    if family not in families and family in CONFIG_MAPPING:
        accepted = one_line(", ".join(map(repr, families)), 150)
        raise UserError(
            f"{source}: model.family: {quote(family)} is not for {kind.task}; accepted: {accepted}. `hf-deepwide "
            "train` trains translation models, `train masked-lm` and `train classification` the others"
        )
    check_name(f"{source}: model.family", "model type", family, families)
    init_from = fields.get("init_from")
    if init_from is not None and not isinstance(init_from, str):
        raise UserError(f"{source}: model.init_from: {quote(init_from)} is neither a folder, a Hub id, nor null")
    cls = CONFIG_MAPPING[family]
    if init_from is None and cls.sub_configs:
        raise UserError(
            f"{source}: model.family: a new {quote(family)} model cannot be made, as its parts have configs of their "
            "own; start from a checkpoint of this family (model.init_from)"
        )
    known = [field.name for field in dataclasses.fields(cls)]
    for key in fields:
        if key in kind.refused:
            raise UserError(f"{source}: model.{key} is not accepted here: {kind.refused[key]}")
        having = [name for name in all_families() if key in CONFIG_MAPPING[name].__dataclass_fields__]
        if key not in known and family in all_families() and having:
            raise UserError(
                f"{source}: model.{key} is no key of {family}; families with this key: {', '.join(having)}"
            )
        check_name(f"{source}: model", "key", key, ["family", "init_from", *known])
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
    """Return fields that can be checked without the base, which decides the width or the heads that they leave out."""
    heads = [name for name in ("encoder_attention_heads", "decoder_attention_heads") if name in known]
    if "d_model" in given:
        return {**dict.fromkeys(heads, 1), **given}
    return {key: value for key, value in given.items() if key not in heads}


def _check_sizes(cls: type[PreTrainedConfig], given: dict[str, Any], source: str) -> None:
    """Refuse numbers that no model can have, in Transformers' configs. This library's configs check their own."""
    for name, value in given.items():
        accepted = Range(-WEIGHT, LAYERS if "layers" in name else ENTRIES)
        if issubclass(cls, DeepWideConfig) or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not accepted.holds(value):
            raise UserError(f"{source}: model.{name} is {quote(value)}; accepted: {accepted}")


def check_section(values: dict[str, Any], section: str, cls: type, refused: dict[str, str], source: str) -> None:
    """Refuse keys that a section does not have, keys that have no effect, and values of a wrong type."""
    hints = get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for key, value in values.items():
        if key in refused:
            raise UserError(f"{source}: {section}.{key} is not accepted here: {refused[key]}")
        check_name(f"{source}: {section}", "key", key, [name for name in known if name not in refused])
        _check_type(key, value, hints[key], f"{source}: {section}")


def check_tokenizer_keys(asked: dict[str, Any], tokenizer: dict[str, Any], source: str) -> None:
    """Refuse keys for training a tokenizer if the recipe takes an existing one, unless they have their defaults.

    Args:
        asked: the keys of one file, or the overrides. Keys that a parent sets for its own tokenizer are accepted.
        tokenizer: the section with the keys of all parents.
        source: start of the error messages.
    """
    taken = taken_tokenizer(tokenizer)
    for key in TRAINING_KEYS if taken else ():
        if asked.get(key, default := getattr(TokenizerArguments, key)) != default:
            raise UserError(
                f"{source}: tokenizer.{key} is {quote(asked[key])}, and has no effect beside tokenizer.{taken}, whose "
                f"tokenizer is taken as it is; leave it out, or set tokenizer.{taken} to null to train one"
            )


def taken_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """The key that names an existing tokenizer, or existing merges; None if a tokenizer is trained."""
    return next((key for key in ("path", "codes") if tokenizer.get(key)), None)


def check_evaluation(evaluation: EvaluationArguments, data: DataArguments, source: str) -> None:
    """Refuse averages that do not fit the language pairs, and sacreBLEU's tokenizers that are not installed."""
    if evaluation.average_languages:
        pairs = data.evaluated_pairs
        if not pairs:
            raise UserError(f"{source}: evaluation.average_languages: there is one language pair; set data.pairs")
        with prefixed(f"{source}: evaluation."):
            groups(pairs, evaluation.average_languages)
    scored = [pair for pair in data.language_pairs if "-".join(pair) not in data.train_only_pairs]
    for target_lang in dict.fromkeys(target for _, target in scored):
        with prefixed(f"{source}: evaluation."):  # a tokenizer may need a package that is not installed
            build_metrics(evaluation.metrics, tokenize=evaluation.tokenize, target_lang=target_lang)


def _check_type(key: str, value: Any, hint: Any, where: str) -> None:
    """Refuse a value whose type does not fit the annotation. The message does not show a secret."""
    if not _fits(value, hint):
        shown = "its value" if is_secret(key) else quote(without_secrets(value))
        lacks_brackets = isinstance(value, str) and not is_secret(key) and _fits([value], hint)
        accepted = f"a list, such as [{one_line(value, QUOTED)}]" if lacks_brackets else _describe(hint)
        raise UserError(f"{where}.{key}: {shown} is not accepted; give {accepted}")


def check_name(where: str, kind: str, name: Any, known: Iterable[str]) -> None:
    """Refuse a name that is not among the known ones, and say which of them may have been meant."""
    known = list(known)
    if name in known:
        return
    given = one_line(name, QUOTED)
    sides = [each for each in known if each.endswith(f"_{given}")]  # attention_heads: encoder's and decoder's
    near = sides[:2] or difflib.get_close_matches(ALSO_CALLED.get(given, given), known, n=1)
    all_of_them = "`hf-deepwide recipes reference` shows all" if kind == "key" else f"accepted: {', '.join(known)}"
    hint = f"the nearest is {' or '.join(map(repr, near))}" if near else one_line(all_of_them, 300)
    raise UserError(f"{where}: unknown {kind} {quote(name)}; {hint}")


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value read from YAML has the type that an annotation requires."""
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
