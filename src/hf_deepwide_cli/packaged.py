"""The packaged recipes as text, read without the library, whose import of PyTorch takes seconds."""

import itertools
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

SECTIONS = ("model", "data", "tokenizer", "training", "evaluation")
WIDEST = 44  # last column at which comments are aligned; after a longer value, a comment follows directly
_LINE = re.compile(r"  (\w+): ")
_COMMENT = re.compile(r"(  \w+: [^#]*?) +(# .*)")


def folder() -> Path:
    """The folder of the packaged recipes, found without importing the library."""
    spec = find_spec("hf_deepwide")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "recipes"


def names() -> list[str]:
    """The names of the packaged recipes, without the files in `base/`, which are only parts of other recipes."""
    files = (file.relative_to(folder()).with_suffix("").as_posix() for file in folder().rglob("*.yaml"))
    return sorted(name for name in files if not name.startswith("base/"))


def title(text: str) -> str:
    """The first sentence of a recipe's comment."""
    words = " ".join(line.removeprefix("#") for line in header(text).splitlines()).split()
    return re.split(r"\.(?= [A-Z`]|$)", " ".join(words))[0]  # "et al. 2020" does not end a sentence


def header(text: str) -> str:
    """The comment at the beginning of a recipe."""
    lines = text.splitlines(keepends=True)
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), lines))


def whole(path: Path) -> str:
    """A packaged recipe as one text, with the keys of the recipes that it extends and with all comments."""
    text = path.read_text(encoding="utf-8")
    if _parent(text) is None:
        return text
    sections = _sections(path)
    return "\n".join(
        [header(text), *(f"{name}:\n{_aligned(sections[name])}" for name in SECTIONS if name in sections)]
    )


def _parent(text: str) -> str | None:
    """The file that a recipe extends, or None."""
    found = re.search(r"^extends: (\S+)", text, flags=re.MULTILINE)
    return found and found[1]


def _sections(path: Path) -> dict[str, dict[str, str]]:
    """The lines of a recipe by section and key. The parent's keys come first; the recipe's lines replace theirs."""
    text = path.read_text(encoding="utf-8")
    parent = _parent(text)
    sections = _sections(path.parent / parent) if parent else {}
    for name, keys in _keys(text).items():
        sections[name] = sections.get(name, {}) | keys
    if "family" in sections["model"]:
        sections["model"] = {"family": "", **sections["model"]}
    return sections


def _keys(text: str) -> dict[str, dict[str, str]]:
    """The lines of one text by section and key, without the recipe that it extends."""
    sections: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    key = ""
    for line in text.removeprefix(header(text)).splitlines(keepends=True):
        if found := _LINE.match(line):
            key = found[1]
            keys[key] = line
        elif line.startswith(" "):
            keys[key] += line
        elif line.strip() and not line.startswith("extends:"):
            keys = sections.setdefault(line.partition(":")[0], {})
    return sections


def with_comments(text: str, other: str, without: Collection[str] = ()) -> str:
    """Return a recipe's text with the comments of the same keys in another text, except for the keys in `without`."""
    sections, theirs = _keys(text), _keys(other)
    for name, keys in sections.items():
        for key, lines in keys.items():
            found = _COMMENT.fullmatch(theirs.get(name, {}).get(key, "").rstrip("\n"))
            if found and key not in without:
                keys[key] = f"{lines.rstrip()} {found[2]}\n"
    return "\n".join(f"{name}:\n{_aligned(keys)}" for name, keys in sections.items())


def _aligned(keys: dict[str, str]) -> str:
    """Return the lines of a section, with the comments in one column."""
    parts = [_COMMENT.fullmatch(lines.rstrip("\n")) for lines in keys.values()]
    width = max((len(part[1]) for part in parts if part and len(part[1]) <= WIDEST), default=0)
    return "".join(
        f"{part[1]:<{width}} {part[2]}\n" if part else lines for part, lines in zip(parts, keys.values(), strict=True)
    )
