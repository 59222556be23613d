"""Labelled sentences and sentence pairs: read, check and encode them."""

import csv
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, one_line, prefixed, quote
from ..limits import Range, check_numbers
from .arguments import RANGES, Places, Split
from .corpora import load_texts, refusing_data_sets
from .text_files import checked_characters, find_file, json_rows, read_lines

logger = logging.getLogger(__name__)

KEYS = {"text": "sentence1", "pair": "sentence2", "label": "label"}  # part of a row: the key that gives its column
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
NUMBERS = {"max_length": RANGES["max_length"], "validation_size": Range(1, RANGES["train_size"].most)}


@dataclass
class ClassificationArguments(Places):
    """The section `data` of a recipe for classification.

    `train`, `validation` and `test` are files with a header, or names of splits. The formats of files are `tsv`
    (without quoting), `csv` and `jsonl`, all also as `.gz`. Splits have the format `datasets`, with `name` and
    `config`. Relative paths start at `root`, else at `$HF_DEEPWIDE_DATA`, else at the working directory. `sentence1`,
    `sentence2` and `label` are the names of columns. Without `sentence2`, single sentences are classified. `labels`
    lists the classes in the order of their numbers. If it is None, a data set may declare an order for its column;
    else the classes of the training split are sorted. With two classes, F1 takes the second class as the positive
    class.

    Without a `validation` split, `validation_size` rows of the training split are held out, the same for all seeds.
    Sequences of more than `max_length` tokens are cut. In a pair, the longer sentence is cut first.
    """

    format: Literal["tsv", "csv", "jsonl", "datasets"] = field(
        default="tsv", metadata={"help": "format of the files; datasets: a data set on the Hub"}
    )
    train: str | None = field(default=None, metadata={"help": "file with a header, or split, to train on"})
    validation: str | None = field(default=None, metadata={"help": "file or split that chooses the checkpoint"})
    test: str | None = field(default=None, metadata={"help": "file or split that is scored at the end"})
    name: str | None = field(default=None, metadata={"help": "the data set on the Hub (format datasets)"})
    config: str | None = field(default=None, metadata={"help": "configuration of the data set (format datasets)"})
    root: str | None = field(
        default=None, metadata={"help": "folder that relative paths start at; else $HF_DEEPWIDE_DATA"}
    )
    sentence1: str = field(default="sentence", metadata={"help": "column of the sentence, or of the first of a pair"})
    sentence2: str | None = field(default=None, metadata={"help": "column of the second sentence of a pair"})
    label: str = field(default="label", metadata={"help": "column of the class"})
    labels: list[str] | None = field(
        default=None, metadata={"help": "the classes in order; default: as the data set declares them, else sorted"}
    )
    validation_size: int | None = field(
        default=None, metadata={"help": "rows of the training split to hold out, without a validation split"}
    )
    max_length: int = field(default=128, metadata={"help": "longer sequences are cut to so many tokens"})

    def __post_init__(self) -> None:
        if self.train is None:
            raise UserError("data.train is not set; name the file, or the split, to train on")
        if (self.validation is None) == (self.validation_size is None):
            raise UserError("data.validation, data.validation_size: give exactly one of the two")
        if (self.format == "datasets") != (self.name is not None):
            raise UserError("data.name: the format datasets needs it, and no other format has it")
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise UserError(f"data.labels is {quote(self.labels)}; name two or more classes, each once")
        check_numbers(self, NUMBERS, "data.")


def read_splits(args: ClassificationArguments) -> dict[str, Dataset]:
    """Read the splits of a recipe as rows with `text`, the name of the class `label` and, for pairs, `pair`.

    Raises:
        UserError: a file or a column is missing or empty.
    """
    return {split: _read(args, split) for split in SPLITS if getattr(args, split) is not None}


def hold_out(args: ClassificationArguments, splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """Return the splits; if there is no validation split, take `validation_size` training rows for it.

    Raises:
        UserError: the training split has too few rows.
    """
    if args.validation is not None:
        return dict(splits)
    size, rows = args.validation_size or 0, splits["train"].num_rows
    if size >= rows:
        raise UserError(f"data.validation_size is {size}; the training split has only {rows} rows")
    held = splits["train"].train_test_split(test_size=size, seed=0)
    return {**splits, "train": held["train"], "validation": held["test"]}


def class_names(args: ClassificationArguments, splits: Mapping[str, Dataset]) -> list[str]:
    """Return the classes in the order of their numbers.

    Raises:
        UserError: there is only one class, a split has another class, or the classes are numbers with fractions that
            `labels` does not list.
    """
    names = args.labels or _declared_names(args) or sorted(set(splits["train"]["label"][:]))
    if not args.labels and all(map(_is_number, names)) and (fractions := [name for name in names if "." in name]):
        raise UserError(
            f"data.label: the column {quote(args.label)} holds numbers such as {fractions[0]}, and a classifier "
            "learns classes; if they are classes, list them in data.labels"
        )
    if len(names) < 2:
        raise UserError(
            f"data.label: the column {quote(args.label)} of the training split has only the class {quote(names[0])}; "
            "name the column of the classes, or give rows of another class"
        )
    for split, rows in splits.items():
        for number, label in enumerate(rows["label"][:], start=1):
            if label not in names:
                known = one_line(", ".join(map(str, names)), 200)
                raise UserError(f"data.{split}, row {number}: the class {quote(label)} is not one of {known}")
    return names


def encode_rows(
    args: ClassificationArguments, rows: Dataset, names: list[str], tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """Encode rows as `input_ids`, `attention_mask` and `labels` (the class's number); log how many rows are cut."""
    numbers, cut = {name: number for number, name in enumerate(names)}, 0

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        nonlocal cut
        sides = [batch["text"]] + ([batch["pair"]] if "pair" in batch else [])
        ids = tokenizer(*sides, verbose=False)
        if long := sum(len(row) > args.max_length for row in ids["input_ids"]):
            cut += long
            ids = tokenizer(*sides, truncation=True, max_length=args.max_length)
        return {**ids, "labels": [numbers[label] for label in batch["label"]]}

    encoded = rows.map(encode, batched=True, remove_columns=rows.column_names, load_from_cache_file=False)
    if cut:
        logger.warning(
            "%d of %d rows have more than data.max_length %d tokens, and are cut", cut, len(rows), args.max_length
        )
    return encoded


def _read(args: ClassificationArguments, split: Split) -> Dataset:
    place = args.location(split)
    prefix = f"data.{split} {quote(place)}"
    columns = {role: column for role, key in KEYS.items() if (column := getattr(args, key)) is not None}
    if args.format == "datasets":
        taken = _read_data_set(args, place, columns, prefix)
    else:
        with prefixed(f"{prefix} could not be loaded: "):
            file = find_file(args.resolve(place))
            read = _read_objects(file, columns) if args.format == "jsonl" else _read_table(file, columns, args.format)
            taken = {role: [_text(cell) for cell in cells] for role, cells in read.items()}
    if not taken["text"]:
        raise UserError(f"{prefix}: there are no rows")
    for role in ("text", "label"):
        if "" in taken[role]:
            raise UserError(f"{prefix}, row {taken[role].index('') + 1}: the column {quote(columns[role])} is empty")
    return Dataset.from_dict(taken)


def _read_data_set(
    args: ClassificationArguments, place: str, columns: Mapping[str, str], prefix: str
) -> dict[str, list[str]]:
    """Return the wanted columns of a split on the Hub, or in a folder that `datasets` reads."""
    rows = _load(args, place, prefix)
    for role, column in columns.items():
        if column not in rows.column_names:
            raise UserError(f"{prefix}: {_no_column(role, column, rows.column_names)}")
    taken = {}
    for role, column in columns.items():
        values = rows[column][:]
        if kinds := {type(value) for value in values} & {list, dict}:
            raise UserError(f"{prefix}: {_is_no_text(column, kinds.pop())}")
        taken[role] = [_text(value) for value in values]
    if named := getattr(rows.features[args.label], "names", None):  # a column of class numbers
        taken["label"] = [
            "" if number is None else named[number] if 0 <= number < len(named) else str(number)
            for number in rows[args.label][:]
        ]
    return taken


def _load(args: ClassificationArguments, place: str, prefix: str) -> Dataset:
    with refusing_data_sets(f"{prefix} could not be loaded"):
        local = args.resolve(str(args.name))
        return load_texts(str(local) if local.is_dir() else str(args.name), args.config, place)


def _declared_names(args: ClassificationArguments) -> list[str] | None:
    """Return the classes that a data set declares for its column, in the order of their numbers; None without."""
    if args.format != "datasets":
        return None
    place = args.location("train")
    return getattr(_load(args, place, f"data.train {quote(place)}").features[args.label], "names", None)


def _read_table(file: Path, columns: Mapping[str, str], kind: str) -> dict[str, list[str]]:
    """Return the wanted columns of a table with a header. Text is never converted to a number or a date."""
    style: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if kind == "tsv" else {"strict": True}
    table = csv.reader((f"{line}\n" for line in read_lines(file)), **style)
    taken: dict[str, list[str]] = {role: [] for role in columns}
    try:
        header = next(table)
        for role, column in columns.items():
            if column not in header:
                raise UserError(f"{file}, line 1: {_no_column(role, column, header)}")
        places = {role: header.index(column) for role, column in columns.items()}
        for row in table:
            if row and len(row) != len(header):
                raise UserError(f"{file}, line {table.line_num}: {len(row)} columns; the header has {len(header)}")
            for role, place in places.items() if row else ():
                taken[role].append(row[place])
    except csv.Error as error:
        raise UserError(f"{file}, line {table.line_num}: {error}") from error
    return taken


def _read_objects(file: Path, columns: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the wanted fields of a file that has a JSON object on each line."""
    taken: dict[str, list[Any]] = {role: [] for role in columns}
    for where, row in json_rows(file):
        for role, column in columns.items():
            if column not in row:
                raise UserError(f"{where}: {_no_column(role, column, row)}")
            value = row[column]
            if isinstance(value, list | dict):
                raise UserError(f"{where}: {_is_no_text(column, type(value))}")
            taken[role].append(checked_characters(value, where) if isinstance(value, str) else value)
    return taken


def _no_column(role: str, column: str, names: Iterable[str]) -> str:
    unlabelled = " (a split without classes cannot be scored: leave it out)" if role == "label" else ""
    columns = one_line(", ".join(names))
    return f"data.{KEYS[role]}: there is no column {quote(column)}; the columns are {columns}{unlabelled}"


def _is_no_text(column: str, kind: type) -> str:
    return f"{quote(column)} holds a {kind.__name__}; accepted: text or a number"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    """Return a cell as text; None and NaN (which differs from itself) become the empty string."""
    return "" if value is None or value != value else str(value).strip()
