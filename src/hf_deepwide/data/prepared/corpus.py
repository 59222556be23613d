"""The description of a corpus: the origin of each split, its cleaning steps, and published facts to check it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from .cleaning import Step

Languages = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A split of a data set on the Hub.

    Args:
        name: the data set's name.
        split: the split's name.
        config: the data set's config.
        first: number of rows to read from the start of the split; None: all rows.
        revision: the data set's revision; None: the newest.
        data_files: the files of the split, if the revision has no configs.
    """

    name: str
    split: str
    config: str | None = None
    first: int | None = None
    revision: str | None = None
    data_files: str | None = None

    def __str__(self) -> str:
        rows = f"the first {self.first:,} rows" if self.first else None
        place = ", ".join(filter(None, (self.config, self.split, rows)))
        return f"{self.name} ({place})" + (f" at {self.revision}" if self.revision else "")


@dataclass(frozen=True)
class SacreBleuSet:
    """A test set that sacreBLEU downloads.

    Args:
        name: its name in sacreBLEU, such as wmt12.
        sides: for each language, a direction and the language's side in that direction, such as `de-en/src`.
    """

    name: str
    sides: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} of sacreBLEU ({', '.join(self.sides)})"


@dataclass(frozen=True)
class Origin:
    """The places whose rows make up a split, one after the other, and the steps that clean the rows.

    Args:
        places: parts of data sets on the Hub, and test sets; or names of files. `{lang}` in a name stands for the
            language. A file without `{lang}` is a table with a column for each language. `{side}` stands for `src` in
            the file of the first language, and for `ref` in the file of the second.
        steps: the cleaning steps, applied to each row.
        held_out: n: every n-th row goes to the split `valid` instead; None: no row does.
    """

    places: tuple[Part | SacreBleuSet, ...] | tuple[str, ...]
    steps: tuple[Step, ...] = ()
    held_out: int | None = None


Origins = Callable[[Languages], Mapping[str, Origin]]


@dataclass(frozen=True)
class Corpus:
    """One corpus.

    Args:
        name: its name on the command line.
        what: a description.
        licence: the terms of use.
        folder: its folder, relative to the place from which relative paths in recipes start.
        file: the name of a split's file in the folder, with `{pair}` and `{split}`. A text corpus has a file for each
            `{lang}`. A `.jsonl` file belongs to a data set, whose name goes into `data.name`.
        groups: groups of languages; the files of a group are aligned with each other.
        hub: a function that returns the origins of a group's splits on the Hub; None: the Hub does not have them.
        files: the same for original files; None: only tables of the Hub are read.
        example: a recipe, and the overrides with which it reads the corpus.
        keys: a function that returns the further overrides with which the recipe reads only the given groups.
        counts: published number of rows of each split, by `split`, or by `pair/split` if there are several groups.
        digests: SHA-256 of the published text, by file name; white space at both ends of a line does not count.
        merges: number of subword-nmt merges in the papers; None if one vocabulary serves many languages.
        codes: name of the file of merges, which lies beside the training files.
        on_hub: languages that the Hub has; None: all.
        columns: a language's name in the original data, if it differs from the language's code.
    """

    name: str
    what: str
    licence: str
    folder: str
    file: str
    groups: tuple[Languages, ...]
    hub: Origins | None
    files: Origins | None
    example: str
    keys: Callable[[Sequence[Languages]], Mapping[str, str]] = lambda groups: {}
    counts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    merges: int | None = None
    codes: str = "bpe.codes"
    on_hub: Languages | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def form(self) -> Literal["text", "jsonl"]:
        """`"text"` for files of text, `"jsonl"` for a data set."""
        return "jsonl" if self.file.endswith(".jsonl") else "text"


def pair_of(languages: Languages) -> str:
    """The name of a group of languages, such as de-en."""
    return "-".join(languages)
