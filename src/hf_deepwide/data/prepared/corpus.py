"""What a corpus is: its parts, where each comes from, the steps that clean it, and what is published about it."""

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
        name: the data set.
        split: its split.
        config: its config.
        first: only so many rows of the split.
        revision: its revision; None is the newest.
        data_files: the files of the split, where the revision has no configs.
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
    """A test set that sacreBLEU fetches.

    Args:
        name: its name there, such as wmt12.
        sides: of each language, a direction and its side in that direction, such as `de-en/src`.
    """

    name: str
    sides: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} of sacreBLEU ({', '.join(self.sides)})"


@dataclass(frozen=True)
class Origin:
    """What a split is made of, one place after the other, and the steps that clean it.

    Args:
        places: parts of data sets on the Hub, and test sets; or names of files. `{lang}` in a name stands for the
            language. A file without it is a table with a column for each language. `{side}` is `src` in the file of
            the first language, and `ref` in the file of the second.
        steps: what is done to each row.
        held_out: every so many rows one goes to the split `valid` instead.
    """

    places: tuple[Part | SacreBleuSet, ...] | tuple[str, ...]
    steps: tuple[Step, ...] = ()
    held_out: int | None = None


Origins = Callable[[Languages], Mapping[str, Origin]]


@dataclass(frozen=True)
class Corpus:
    """One corpus.

    Args:
        name: how the command line calls it.
        what: a description.
        licence: on what terms it may be used.
        folder: where it goes, below the place that relative paths of recipes start at.
        file: the name of a split's file in the folder, with `{pair}` and `{split}`. Text has a file for each `{lang}`;
            `.jsonl` is a data set that `data.name` names.
        groups: languages whose files are aligned with each other.
        hub: origins of the splits on the Hub, for a group; None: the Hub does not have them.
        files: origins of the splits in original files, for a group; None: only tables of the Hub are read.
        example: a recipe, and the overrides by which it reads the corpus.
        keys: the further overrides by which it reads no other groups than the given ones.
        counts: rows of the splits, by `split`, or by `pair/split` where there are several groups.
        digests: SHA-256 of published text, by file; white space at the ends of lines does not count.
        merges: merges of subword-nmt in the papers; None where one vocabulary serves many languages.
        codes: the file of the merges, beside the training files.
        on_hub: languages that the Hub has; None: all.
        columns: what the original data call a language, where that is not its code.
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
        """Files of text, or a data set."""
        return "jsonl" if self.file.endswith(".jsonl") else "text"


def pair_of(languages: Languages) -> str:
    """The name of a group of languages, such as de-en."""
    return "-".join(languages)
