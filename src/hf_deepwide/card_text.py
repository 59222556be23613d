"""The text of model cards: foreign text, escaped so that it stays text, and the code lines that load a model.

Sentences of a corpus, names of files and values of a recipe may hold Markdown, HTML or line breaks. A card must show
them as they are, on one line, and must not turn them into links or tables.
"""

import html
import json
import re
from importlib.metadata import requires
from typing import Any

import yaml
from huggingface_hub import ModelCard

from .errors import UserError

CARD = "README.md"  # the name under which the Hub shows a card
UNNAMED = "REPOSITORY"
LONGEST = 500  # most characters that are shown of a foreign text
# Renderers turn these into links anywhere in plain text, and escaping does not prevent it.
_LINK = re.compile(r"://|\bwww\.|\w@\w", re.IGNORECASE)
_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|(?<!\w)#")
# Control characters, line ends, halves of surrogate pairs, and characters that change the direction of text.
_INVISIBLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_USE = re.compile(
    r"(?:import hf_deepwide [^\n]*\n)?from transformers import pipeline\n\n(?:# [^\n]*\n)*"
    r'\w+ = pipeline\("(?P<task>[\w-]+)", model=[^\n]*\)'
)
_USE_AND_EXAMPLE = re.compile(_USE.pattern + r"(?:\n+\w+\([^\n]*\)\n# \[[^\n]*)?(?P<end>\n```+\n)?")
# The sentences about the licence in the template, in older runs' cards, and in cards shared with another licence.
_UNCHOSEN = re.compile(
    r"No licence has been chosen\. Choose one when you share the model, and respect the licence of the training data"
    r"(?: and of the base)?\."
    r"|Its licence is for whoever trained it to\s+choose, with a view to the licence of that data\."
    r"|Its licence is `[^`\n]+`\."
)
# The template's words about the family, such as: of the family `mat` ([paper](address)) with 1,234 parameters.
_FAMILY = re.compile(
    r"of the family (?P<family>`(?P<name>\w+)`(?: \(\[[^\n]+?\]\([^)\n]+\)\))?)\s+with [\d,]+ parameters\."
)
PIPELINES = {"translation": "translator", "fill-mask": "fill_mask", "text-classification": "classifier"}  # variables
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")


def plain(value: Any) -> str:
    """Return a value as one line of text, without control characters, cut to `LONGEST` characters."""
    text = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", " ".join(str(value).split()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def text(value: Any) -> str:
    """Return a value as Markdown that shows it literally, also in a title or a table cell."""
    shown = plain(value)
    if _LINK.search(shown):
        return code(shown, cell=True)
    shown = _MARKUP.sub(lambda match: f"\\{match[0]}", shown)
    return html.escape(shown, quote=False)


def code(value: Any, cell: bool = False) -> str:
    """Return a value as inline code; `cell` escapes its vertical bars for a table cell."""
    shown = plain(value)
    ticks = "`" * (_longest_run(shown) + 1)
    space = " " if shown[:1] in ("`", "") or shown[-1:] == "`" else ""
    return f"{ticks}{space}{shown.replace('|', chr(92) + '|') if cell else shown}{space}{ticks}"


def block(content: str, language: str = "") -> str:
    """Return lines as a code block, whose fence is longer than every run of backticks in the lines."""
    ticks = "`" * max(3, _longest_run(content) + 1)
    return f"{ticks}{language}\n{content}\n{ticks}"


def literal(value: str) -> str:
    """Return a string as a Python literal, on one line."""
    quoted = json.dumps(value, ensure_ascii=False)
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)


def use_of_folder(folder: str, task: str = "translation") -> str:
    """The code lines that load a model from its author's folder with the pipeline of a task."""
    what = "the model family and the translation pipeline" if task == "translation" else "the model family"
    return (
        f"import hf_deepwide  # registers {what}\n"
        f'from transformers import pipeline\n\n{PIPELINES[task]} = pipeline("{task}", model={literal(folder)})'
    )


def use_of_share(repo_id: str | None, task: str = "translation") -> str:
    """The code lines that load a shared model with a task's pipeline; without `repo_id`, its name is `UNNAMED`."""
    unknown = "" if repo_id else f"# {UNNAMED}: the name of this repository on the Hub, or a folder with its files\n"
    return (
        "from transformers import pipeline\n\n"
        f"# needs: pip install {' '.join(map(repr, _needed()))}\n"
        "# trust_remote_code runs the code in this repository; after `import hf_deepwide` it is not needed\n"
        f"{unknown}"
        f'{PIPELINES[task]} = pipeline("{task}", model={literal(repo_id or UNNAMED)}, trust_remote_code=True)'
    )


def _needed() -> list[str]:
    """The packages that the code of a shared model imports, with the oldest versions that this package accepts."""
    return [line for line in requires("hf_deepwide") or () if re.match(r"(torch|transformers)\b", line)]


def use_of_stock(repo_id: str | None, shown: Any) -> str:
    """The code lines that load a shared model as a class of Transformers, and translate.

    Args:
        repo_id: the name of the repository, if it has one yet.
        shown: the language pair, an `exporting.shown_languages.Shown`.
    """
    forced = "".join(
        f", {name}=tokenizer.convert_tokens_to_ids({literal(token)})" for name, token in shown.settings.items()
    )
    first = f'inputs["input_ids"][0, 0] = tokenizer.convert_tokens_to_ids({literal(shown.source_token)})\n'
    return (
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        f"name = {literal(repo_id or UNNAMED)}  # this repository on the Hub, or a folder with its files\n"
        f"tokenizer = AutoTokenizer.from_pretrained(name{shown.arguments})\n"
        "model = AutoModelForSeq2SeqLM.from_pretrained(name)\n"
        f'inputs = tokenizer({literal(f"{shown.tag}A sentence in the source language.")}, return_tensors="pt")\n'
        f"{first if shown.source_token else ''}"
        f"ids = model.generate(**inputs{forced})\n"
        "print(tokenizer.decode(ids[0], skip_special_tokens=True))"
    )


def for_repository(card: str, repo_id: str | None, license: str | None, shown: Any = None, model: Any = None) -> str:
    """A card for the Hub: its code lines name the repository, and the card names the licence if one is given.

    `shown` is given if the model is saved as a class of Transformers. The code lines then need no code of ours (see
    `use_of_stock`), and the card names the class of `model` and its number of parameters.
    """
    renamed: dict[str, str] = {}  # tags
    if shown is not None:
        if (found := _FAMILY.search(card)) is not None:
            stock = model.config.model_type
            renamed[found["name"]] = stock
            same = f"\nIt computes what the trained model of the family {found['family']} computes."
            card = _FAMILY.sub(
                f"of Transformers' class {code(stock)} with {model.num_parameters():,} parameters."
                + same * (found["name"] != stock),
                card,
            )
        card = _USE_AND_EXAMPLE.sub(
            lambda found: use_of_stock(repo_id, shown) + (found["end"] + shown.note if found["end"] else ""), card
        )
        card = card if repo_id is None else card.replace(use_of_stock(None, shown), use_of_stock(repo_id, shown))
    else:
        card = _USE.sub(
            lambda found: found[0] if _is_named(found[0]) and not repo_id else use_of_share(repo_id, found["task"]),
            card,
        )
    if license is not None:
        card = _UNCHOSEN.sub(f"Its licence is {code(license)}.", card)
    return _with_metadata(card, license, renamed)


def _with_metadata(card: str, license: str | None, renamed: dict[str, str]) -> str:
    """Return the card with this licence in its metadata, if one is given, and with its tags `renamed` (old to new)."""
    if license is None and not renamed:
        return card
    try:
        parsed = ModelCard(card)
        if license is not None:
            parsed.data["license"] = license
        if renamed:
            parsed.data["tags"] = [renamed.get(tag, tag) for tag in parsed.data.to_dict().get("tags") or []]
        return str(parsed)
    except (ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"share: the metadata at the top of the model card cannot be read: {plain(error)}") from error


def _is_named(use: str) -> bool:
    """Return True if the code lines of a card already name a repository."""
    return "trust_remote_code=True" in use and literal(UNNAMED) not in use


def license_of(card: str) -> str | None:
    """The licence in a card's metadata; None if the metadata have no licence or cannot be read."""
    try:
        named = ModelCard(card, ignore_metadata_errors=True).data.to_dict().get("license")
    except (ValueError, TypeError, AttributeError, yaml.YAMLError):  # foreign text; `_with_metadata` reports it
        return None
    return named if isinstance(named, str) else None


def check_license(license: str) -> None:
    """Refuse a string that cannot be the Hub's identifier of a licence.

    Raises:
        UserError: the string cannot be an identifier.
    """
    if not isinstance(license, str) or not LICENSE.fullmatch(license):
        raise UserError(
            f"share: the licence {plain(license)[:80]!r} is no identifier of the Hub's; accepted are such as mit, "
            "apache-2.0, cc-by-4.0, or other"
        )


def _longest_run(shown: str) -> int:
    return max(map(len, re.findall("`+", shown)), default=0)
