"""Parallel corpora: from files, the Hub or the embedded generator to a dataset of `source` and `target`.

Line i of one language is the translation of line i of the other, so reading must not lose or gain a line:
only "\\n" ends one (`str.splitlines` would also split at U+2028, form feeds, …). Whatever is wrong is either
an error that names file and line or, on the training split only, a filter whose count is logged.
"""

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal, get_args

from datasets import Dataset, IterableDataset, concatenate_datasets, load_dataset, load_from_disk
from tqdm import tqdm

from ..errors import UserError

logger = logging.getLogger(__name__)

Format = Literal["text", "tsv", "jsonl", "datasets", "phrases"]
Split = Literal["train", "validation", "test"]
Pair = tuple[int, str, str]  # line (or row) counted from 1, source, target

ROOT_VARIABLE = "HF_DEEPWIDE_DATA"
CHUNK = 100_000  # pairs that live as Python strings at a time; the rest is Arrow, three times smaller


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
    train_size: int = (
        25_000  # phrases: pairs to train on; 500 more are held out for each of validation and test
    )

    def __post_init__(self):
        if self.format not in get_args(Format):
            raise UserError(f"data.format is {self.format!r}; accepted: {', '.join(get_args(Format))}")
        if self.source_lang == self.target_lang and self.format in ("text", "phrases"):
            raise UserError(f"data.source_lang and data.target_lang are both {self.source_lang!r}")
        if self.format == "datasets" and self.name is None:
            raise UserError(
                "data.format is 'datasets' but data.name is not set: a Hub name or a local directory"
            )
        if self.streaming and self.format != "datasets":
            raise UserError(f"data.streaming needs data.format 'datasets', not {self.format!r}")
        if self.streaming and self.drop_duplicates:
            raise UserError(
                "data.drop_duplicates would have to remember a whole stream; turn one of the two off"
            )
        if self.max_length < 2:
            raise UserError(
                f"data.max_length is {self.max_length}; accepted: 2 tokens (a word and </s>) or more"
            )
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


def load_parallel(args: DataArguments, split: Split) -> Dataset | IterableDataset:
    """Load one split as a dataset with the string columns `source` and `target`.

    Validation and test come back whole and in order. In training pairs with an empty side (white space only)
    are left out, and repeated pairs if `args.drop_duplicates`; the log says how many. Streams are filtered as
    they flow.

    Raises:
        UserError: a missing file, field or split; unequal line counts; bytes that are not UTF-8; a broken
            gzip or JSON line; an empty file; an empty side outside training. Names the file and the line.

    """
    if args.format == "phrases":
        return _phrases(args, split)
    if args.format == "datasets" and args.streaming:
        return _stream(args, split)
    readers: dict[str, Callable] = {
        "text": _read_text,
        "tsv": _read_tsv,
        "jsonl": _read_jsonl,
        "datasets": _read_rows,
    }
    files, pairs = readers[args.format](args, args.location(split))
    return _collect(pairs, PairFilter(split, files, args.drop_duplicates))


class PairFilter:
    """Says which pairs stay: all with two non-empty sides (and, if asked, only the first of equal ones).

    Outside training nothing may be left out, since scores on a part of a test set compare with nothing: there
    an empty side is an error. `files` are the names of source and target for that message.
    """

    def __init__(self, split: Split, files: tuple[str, str], drop_duplicates: bool = False):
        self.split = split
        self.files = files
        self.kept = 0
        self.empty = 0
        self.duplicates = 0
        self._seen: set[bytes] | None = set() if drop_duplicates and split == "train" else None

    def __call__(self, line: int, source: str, target: str) -> bool:
        """True if the pair stays; counts it either way."""
        for side, text, file in (("source", source, self.files[0]), ("target", target, self.files[1])):
            if text.strip():
                continue
            if self.split != "train":
                raise UserError(
                    f"{file}, line {line}: empty {side} in the {self.split} split. Only training pairs may "
                    "be left out; mend the line or remove the pair from both sides"
                )
            self.empty += 1
            return False
        if self._seen is not None:
            digest = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=16).digest()
            if digest in self._seen:
                self.duplicates += 1
                return False
            self._seen.add(digest)
        self.kept += 1
        return True

    def log(self) -> None:
        """Say in the log how many pairs were kept and left out."""
        logger.info(
            "%s: %d pairs kept, %d with an empty side and %d repeated pairs left out",
            self.split,
            self.kept,
            self.empty,
            self.duplicates,
        )


def _collect(pairs: Iterator[Pair], keep: PairFilter) -> Dataset:
    """Filter the pairs into an Arrow table in memory, `CHUNK` pairs at a time."""
    chunks, source, target = [], [], []

    def close_chunk() -> None:
        chunks.append(Dataset.from_dict({"source": source, "target": target}))
        source.clear()
        target.clear()

    for line, source_text, target_text in tqdm(pairs, desc=f"read {keep.split}", unit=" pairs", leave=False):
        if keep(line, source_text, target_text):
            source.append(source_text)
            target.append(target_text)
        if len(source) == CHUNK:
            close_chunk()
    if source:
        close_chunk()
    keep.log()
    if not chunks:
        raise UserError(f"{keep.files[0]}, {keep.files[1]}: no pair of the {keep.split} split is left")
    return concatenate_datasets(chunks) if len(chunks) > 1 else chunks[0]


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file (`.gz`: compressed) without line ends and byte order mark."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):  # a binary file splits at b"\n" and nowhere else
                yield _decode(raw, path, number)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: not a complete gzip file ({error}; {number} lines were readable). Compress it again, "
            "or drop the .gz if it is plain text"
        ) from error
    if number == 0:
        raise UserError(f"{path} is empty; a split needs at least one line")


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8. Text "
            "must be UTF-8, plain or, in a file named .gz, compressed"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{path}, line {number}: a zero byte; this is not a UTF-8 text file (UTF-16? binary?)"
        )
    return text.removesuffix("\n").removesuffix("\r")


def _find(path: Path) -> Path:
    """`path`, or its `.gz` twin where only that exists; else a `UserError` that says what was looked for."""
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return candidate
    raise UserError(f"no file {path} or {path.name}.gz. {_where_from()}")


def _where_from() -> str:
    here = os.environ.get(ROOT_VARIABLE)
    return f"Relative paths start at data.root, else at ${ROOT_VARIABLE} ({here or 'not set'}), else here"


def _read_text(args: DataArguments, prefix: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    stem = args.resolve(prefix)
    paths = []
    for lang in (args.source_lang, args.target_lang):
        try:
            paths.append(_find(stem.with_name(f"{stem.name}.{lang}")))
        except UserError as error:
            found = {
                file.name[len(stem.name) + 1 :].removesuffix(".gz")
                for file in stem.parent.glob(f"{stem.name}.*")
            }
            languages = f"; languages found for this prefix: {', '.join(sorted(found))}" if found else ""
            raise UserError(f"{error}{languages}") from None
    source, target = paths

    def pairs() -> Iterator[Pair]:
        lines = enumerate(zip_longest(read_lines(source), read_lines(target)), start=1)
        for number, (source_text, target_text) in lines:
            if source_text is None or target_text is None:
                total = number + sum(1 for _ in lines)
                short, long = (source, target) if source_text is None else (target, source)
                raise UserError(
                    f"unequal line counts: {long} has {total} lines but {short} has {number - 1}, so line "
                    f"{number} of the longer file has no partner. Both files must be aligned line by line"
                )
            yield number, source_text, target_text

    return (str(source), str(target)), pairs()


def _read_tsv(args: DataArguments, file: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    path = _find(args.resolve(file))
    wanted = [args.source_name, args.target_name]

    def pairs() -> Iterator[Pair]:
        columns, width = (0, 1), 2
        for number, line in enumerate(read_lines(path), start=1):
            cells = line.split("\t")
            if number == 1:
                if all(name in cells for name in wanted):
                    columns, width = (cells.index(wanted[0]), cells.index(wanted[1])), len(cells)
                    continue
                if args.source_field or args.target_field:
                    raise UserError(f"{path}, line 1: no columns {wanted} in the header {cells}")
            if len(cells) != width:
                raise UserError(
                    f"{path}, line {number}: {len(cells)} tab-separated columns instead of {width}. Without "
                    f"a header that names {wanted[0]!r} and {wanted[1]!r} a line is source, tab, target"
                )
            yield number, cells[columns[0]], cells[columns[1]]

    return (str(path), str(path)), pairs()


def _read_jsonl(args: DataArguments, file: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    path = _find(args.resolve(file))

    def pairs() -> Iterator[Pair]:
        for number, line in enumerate(read_lines(path), start=1):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{where}: a JSON {type(row).__name__}; each line must be an object with the fields"
                )
            yield number, pick(row, args.source_name, where), pick(row, args.target_name, where)

    return (str(path), str(path)), pairs()


def pick(row: dict, name: str, where: str) -> str:
    """The text `row[name]` or `row["translation"][name]`; null counts as empty. `where` opens an error."""
    nested = row.get("translation")
    nested = nested if isinstance(nested, dict) else {}
    if name not in row and name not in nested:
        available = [
            *(field for field in row if field != "translation"),
            *(f"translation.{field}" for field in nested),
        ]
        raise UserError(
            f"{where}: no field {name!r}; available: {', '.join(available)}. Set data.source_field and "
            "data.target_field, or the language codes"
        )
    value = row[name] if name in row else nested[name]
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: field {name!r} holds {type(value).__name__}, not text")
    return value or ""


def _open_dataset(args: DataArguments, split_name: str) -> Dataset | IterableDataset:
    """Open a Hub name or a local directory (files, or what `save_to_disk` wrote)."""
    local = args.resolve(args.name)
    name = str(local) if local.is_dir() else args.name
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            saved = load_from_disk(name)
            if isinstance(saved, dict):
                if split_name not in saved:
                    raise UserError(f"{name}: no split {split_name!r}; available: {', '.join(saved)}")
                saved = saved[split_name]
            return saved.to_iterable_dataset() if args.streaming else saved
        return load_dataset(name, args.config, split=split_name, streaming=args.streaming)
    except UserError:
        raise
    except (
        ValueError,
        OSError,
    ) as error:  # unknown names, configs and splits; no connection; unreadable files
        raise UserError(
            f"data.name {args.name!r} (config {args.config!r}, split {split_name!r}) could not be "
            f"loaded: {error}. {_where_from()}"
        ) from error


def _read_rows(args: DataArguments, split_name: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    dataset = _open_dataset(args, split_name)
    where = f"{args.name} ({split_name})"

    def pairs() -> Iterator[Pair]:
        for number, row in enumerate(dataset, start=1):
            place = f"{where}, row {number}"
            yield number, pick(row, args.source_name, place), pick(row, args.target_name, place)

    return (where, where), pairs()


class StreamFilter(PairFilter):
    """A `PairFilter` for `IterableDataset.filter`: logs as it goes, since a stream may have no end."""

    def __call__(self, row: dict) -> bool:
        """True if the row stays."""
        stays = super().__call__(self.kept + self.empty + 1, row["source"], row["target"])
        if not stays and self.empty & (self.empty - 1) == 0:  # 1, 2, 4, 8, …
            self.log()
        return stays


def _stream(args: DataArguments, split: Split) -> IterableDataset:
    split_name = args.location(split)
    dataset = _open_dataset(args, split_name)
    where = f"{args.name} ({split_name})"

    def to_pair(row: dict) -> dict:
        return {
            "source": pick(row, args.source_name, where),
            "target": pick(row, args.target_name, where),
        }

    first = next(iter(dataset), None)
    if first is None:
        raise UserError(f"{where} is empty")
    to_pair(first)  # a wrong field should be told now, not within the training loop
    return dataset.map(to_pair, remove_columns=list(first)).filter(StreamFilter(split, (where, where)))


def _phrases(args: DataArguments, split: Split) -> Dataset:
    try:
        from .phrases import build_phrases
    except ModuleNotFoundError as error:
        raise UserError(
            f"data.format 'phrases' needs the package {error.name}: pip install 'hf_deepwide[phrases]'"
        ) from error
    return build_phrases(args.source_lang, args.target_lang, train_size=args.train_size, seed=args.seed)[
        split
    ]
