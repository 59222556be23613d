"""The section `data` of a recipe."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import UserError

Format = Literal["text", "tsv", "jsonl", "datasets", "phrases"]
Split = Literal["train", "validation", "test"]

ROOT_VARIABLE = "HF_DEEPWIDE_DATA"


@dataclass
class DataArguments:
    """The section `data` of a recipe: where the pairs come from and which of them are trained on.

    `train`, `validation` and `test` say where a split is: a prefix (format text: `{prefix}.{lang}`, else
    `{prefix}.{lang}.gz`), a file (tsv, jsonl; `.gz` too), the name of a split (datasets), nothing (phrases).
    Relative paths start at `root`, else at `$HF_DEEPWIDE_DATA`, else at the working directory.

    A TSV file has two columns, source and target, and no quoting; or a header that contains both fields.
    JSONL rows and `datasets` columns hold the fields themselves or within a dict `translation`. A field left
    None is called by its language code.

    The filters `max_length` (tokens with `</s>`, either side), `max_length_ratio` (tokens of the longer side
    over those of the shorter), `drop_duplicates` (equal pairs) and empty sides act on the training split
    only.
    """

    format: Format = "text"
    root: str | None = None
    source_lang: str = "en"
    target_lang: str = "de"
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    name: str | None = None
    config: str | None = None
    streaming: bool = False
    source_field: str | None = None
    target_field: str | None = None
    max_length: int = 256
    max_length_ratio: float | None = None
    drop_duplicates: bool = False
    seed: int = 1  # phrases: another seed is another corpus
    train_size: int = 25_000  # phrases: pairs to train on; 500 more are held out for each of validation and test

    def __post_init__(self):
        if self.format not in get_args(Format):
            raise UserError(f"data.format is {self.format!r}; accepted: {', '.join(get_args(Format))}")
        if self.source_lang == self.target_lang and self.format in ("text", "phrases"):
            raise UserError(f"data.source_lang and data.target_lang are both {self.source_lang!r}")
        if self.format == "datasets" and self.name is None:
            raise UserError("data.format is 'datasets' but data.name is not set: a Hub name or a local directory")
        if self.streaming and self.format != "datasets":
            raise UserError(f"data.streaming needs data.format 'datasets', not {self.format!r}")
        if self.streaming and self.drop_duplicates:
            raise UserError("data.drop_duplicates would have to remember a whole stream; turn one of the two off")
        if self.max_length < 2:
            raise UserError(f"data.max_length is {self.max_length}; accepted: 2 tokens (a word and </s>) or more")
        if self.max_length_ratio is not None and self.max_length_ratio < 1:
            raise UserError(f"data.max_length_ratio is {self.max_length_ratio}; accepted: 1 or more, or null")

    @property
    def source_name(self) -> str:
        """The field of the source text."""
        return self.source_field or self.source_lang

    @property
    def target_name(self) -> str:
        """The field of the target text."""
        return self.target_field or self.target_lang

    def resolve(self, path: str) -> Path:
        """`path` as given if absolute, else under `root`, `$HF_DEEPWIDE_DATA` or the working directory."""
        return Path(self.root or os.environ.get(ROOT_VARIABLE) or ".").expanduser() / path

    def location(self, split: Split) -> str:
        """Where `split` is, or a `UserError` if the recipe does not say."""
        value = getattr(self, split)
        if value is None:
            raise UserError(f"data.{split} is not set: the recipe names no {split} split")
        return value


def where_paths_start() -> str:
    """The end of each message about a file that was not found."""
    variable = os.environ.get(ROOT_VARIABLE) or "not set"
    return f"Relative paths start at data.root, else at ${ROOT_VARIABLE} ({variable}), else in the working directory"
