"""The JSON schema of a recipe, so that editors complete and explain its keys."""

import dataclasses
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from transformers import Seq2SeqTrainingArguments

from ..families import all_families
from .recipe import EXTENDS, PACKAGED, Recipe

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", type(None): "null"}


def recipe_schema(kind: type[Recipe] = Recipe) -> dict[str, Any]:
    """Describe every section and key of a kind of recipe (JSON Schema 2020-12).

    A key's description is its field's help, if this library wrote the help. Otherwise it is the comment of the kind,
    else the comment in the reference recipe, else the help of Transformers. The section `model` lists the fields of
    all families. It also accepts the fields of other libraries' models.
    """
    comments = reference_comments()
    for section, own in kind.comments.items():
        comments[section] |= own
    sections = {
        section: _section(cls, comments.get(section, {}), kind.refused)
        for section, cls in kind.sections.items()
        if cls is not None
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of hf_deepwide",
        "type": "object",
        "properties": {
            EXTENDS: {"type": "string", "description": "the recipe whose keys this one begins with"},
            "model": _model(kind, comments.get("model", {})),
            **sections,
        },
        "additionalProperties": False,
    }


def reference_comments() -> dict[str, dict[str, str]]:
    """Map each section to its keys, and each key to its comment in the reference recipe."""
    comments: dict[str, dict[str, str]] = {}
    section = ""
    for line in (PACKAGED / "reference.yaml").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"(\w+):", line):
            section = match[1]
        elif match := re.match(r"  (?:# )?(\w+): .*?\s# (.+)", line):
            comments.setdefault(section, {})[match[1]] = match[2]
    return comments


def _section(cls: type, comments: dict[str, str], refused: dict[str, str]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    theirs = {field.name: field.metadata.get("help") for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    properties = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name not in refused:
            help_text = str(field.metadata.get("help", ""))
            explained = help_text if help_text != theirs.get(field.name, "") else comments.get(field.name, help_text)
            properties[field.name] = _typed(hints[field.name]) | ({"description": explained} if explained else {})
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _model(kind: type[Recipe], comments: dict[str, str]) -> dict[str, Any]:
    families = {name: family for name, family in all_families().items() if name in kind.families()}
    properties: dict[str, Any] = {
        "family": {
            "type": "string",
            "examples": sorted(families),
            "description": comments.get("family", ""),
        },
        "init_from": {"type": ["string", "null"], "description": comments.get("init_from", "")},
    }
    for family in families.values():
        for field in (field for field in dataclasses.fields(family.config) if field.name not in kind.refused):
            explained = {"description": comments[field.name]} if field.name in comments else {}
            properties.setdefault(field.name, _typed(field.type) | explained)
    return {"type": "object", "properties": properties}


def _typed(hint: Any) -> dict[str, Any]:
    """An annotation as a schema; {} accepts anything."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [_typed(option) for option in inner]
        return {} if {} in options else {"anyOf": options}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (list, tuple):
        return {"type": "array", "items": _typed(inner[0]) if inner else {}}
    if origin is dict:
        return {"type": "object"}
    return {"type": _TYPES[hint]} if hint in _TYPES else {}
