"""Parallel corpora: read files, the Hub or the embedded generator into a dataset of `source` and `target`.

Line i of one language is the translation of line i of the other language. Each fault in a file is an error that names
the file and the line. In the training split, pairs with certain faults are left out instead, and the log counts them.
"""

import functools
import glob
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetsError
from tqdm import tqdm

from ..errors import UserError, need, one_line, quote
from ..models.quoting import QUOTED
from ..progress import bars_where_shown, shows_bars
from .arguments import DataArguments, Split, where_paths_start
from .pair_filter import PairFilter, StreamFilter
from .text_files import aligned, checked_characters, find_file, json_rows, read_lines

logger = logging.getLogger(__name__)

Pair = tuple[int, str, str]  # line (or row) counted from 1, source, target

# Usual names of a column of sentences in the first line of a file.
HEADERS = {"source", "target", "src", "tgt", "trg", "src_text", "tgt_text", "source_text", "target_text", "sentence"}
HEADERS |= {"translation", "input", "output", "english", "german", "french", "spanish", "russian", "chinese"}
CHUNK = 100_000  # pairs that are Python strings at a time; all others are in Arrow, which takes a third of the memory


def load_parallel(args: DataArguments, split: Split) -> Dataset | IterableDataset:
    """Load one split as a dataset with the string columns `source` and `target`.

    Validation and test splits are returned whole and in order. In training, pairs with an empty side (nothing but
    spaces and invisible characters) are left out. With `args.drop_duplicates`, repeated pairs are left out too. The
    log counts both. Streams are filtered while they are read.

    With several language pairs, the column `pair` is the index in `args.pairs`. The language pairs follow one another.
    Training streams take turns instead, and a shorter stream begins again until the longest has ended. With several
    test sets, the column `test_set` is the index in `args.test`. Synthetic pairs follow the real pairs. Then the
    column `synthetic` is 1 for synthetic and 0 for real pairs.

    Raises:
        UserError: a file, field or split is missing, line counts differ, bytes are not UTF-8, gzip or a JSON line is
            broken, a file is empty, a word is too long, or a side is empty outside training. The message names the
            file and the line.
    """
    if args.pairs is not None:
        return _load_pairs(args, split)
    if args.synthetic is not None and split == "train":
        kinds = [load_parallel(kind, split) for kind in args.kinds]
        logger.info("train: %d real and %d synthetic pairs", *map(len, kinds))
        return concatenate_datasets([_with_column(part, "synthetic", kind) for kind, part in enumerate(kinds)])
    if args.format == "phrases":
        return _phrases(args, split)
    if split == "test" and args.test_sets:
        parts = [load_parallel(one, split) for one in args.test_sets.values()]
        return concatenate_datasets([_with_column(part, "test_set", index) for index, part in enumerate(parts)])
    if args.format == "datasets" and args.streaming:
        return _stream(args, split)
    if args.streaming and split == "train":
        _say_once.cache_clear()  # the next run logs its counts again
        next(_kept_pairs(args, split), None)  # raise errors of the first lines now
        features = Features({"source": Value("string"), "target": Value("string")})
        return IterableDataset.from_generator(_kept_pairs, features, {"args": args, "split": split})
    files, pairs = _read(args, split)
    return _collect(pairs, PairFilter(split, files, args.drop_duplicates))


def load_whole(args: DataArguments, split: Split) -> Dataset:
    """Load a split for evaluation as `load_parallel` does, and read a stream to its end."""
    loaded = load_parallel(args, split)
    return Dataset.from_list(list(loaded)) if isinstance(loaded, IterableDataset) else loaded


def _read(args: DataArguments, split: Split) -> tuple[tuple[str, str], Iterator[Pair]]:
    """Return the names of source and target, for messages, and an iterator over all pairs of a split."""
    readers: dict[str, Callable] = {
        "text": _read_text,
        "tsv": _read_tsv,
        "jsonl": _read_jsonl,
        "datasets": _read_rows,
    }
    return readers[args.format](args, args.location(split))


def local_files(args: DataArguments, split: Split) -> list[Path]:
    """Return the files from which a split is read; [] for the formats `datasets` and `phrases`."""
    if args.pairs is not None:
        return [path for pair in args.pairs for path in local_files(args.for_pair(pair), split)]
    if args.synthetic is not None and split == "train":
        return [path for kind in args.kinds for path in local_files(kind, split)]
    if args.format in ("datasets", "phrases"):
        return []
    if split == "test" and args.test_sets:
        return [path for one in args.test_sets.values() for path in local_files(one, split)]
    return [Path(name) for name in dict.fromkeys(_read(args, split)[0])]


def _kept_pairs(args: DataArguments, split: Split) -> Iterator[dict[str, str]]:
    """Yield the pairs of local files that pass the filter, as rows of a stream."""
    files, pairs = _read(args, split)
    keep = PairFilter(split, files, streamed=True)
    for line, source, target in pairs:
        if keep(line, source, target):
            yield {"source": source, "target": target}
    _say_once(str(keep))


@functools.cache
def _say_once(counts: str) -> None:
    """Log the counts of a pass once; each further pass over a file has the same counts."""
    logger.info(counts)


def _check_headers(args: DataArguments, split: Split) -> None:
    """Check that a TSV file of several language pairs has a header: a fixed order of columns fits one direction only.

    Raises:
        UserError: the header does not name all columns.
    """
    readers: dict[Path, list[DataArguments]] = {}
    for pair in args.evaluated_pairs if split != "train" else args.pairs:
        own = args.for_pair(pair)
        for path in local_files(own, split):
            readers.setdefault(path, []).append(own)
    for path, several in readers.items():
        header = next(read_lines(path), "").split("\t")
        names = sorted({name for own in several for name in (own.source_name, own.target_name)})
        if len(several) > 1 and not {*names} <= {*header}:
            raise UserError(
                f"{path}, line 1: {quote(header)} does not name the columns {quote(names)}; {len(several)} language "
                "pairs read this file, so write a header with these names"
            )


def _load_pairs(args: DataArguments, split: Split) -> Dataset | IterableDataset:
    parts = []
    if args.format == "tsv":
        _check_headers(args, split)
    for index, pair in enumerate(args.pairs):
        if split != "train" and pair in args.train_only_pairs:
            continue
        part = load_parallel(args.for_pair(pair), split)
        if isinstance(part, Dataset):
            logger.info("%s, %s: %d pairs", pair, split, len(part))
        parts.append(_with_column(part, "pair", index))
    if len(parts) == 1:
        return parts[0]
    if args.streaming and split == "train":
        return interleave_datasets(parts, stopping_strategy="all_exhausted")
    return concatenate_datasets(parts)


def _with_column(part: Dataset | IterableDataset, name: str, index: int) -> Dataset | IterableDataset:
    """Add a column to the rows that has the same value in each row."""
    if isinstance(part, IterableDataset):
        return part.map(lambda row: {**row, name: index})
    return part.add_column(name, [index] * len(part))


def _collect(pairs: Iterator[Pair], keep: PairFilter) -> Dataset:
    """Filter the pairs into an Arrow table in memory, `CHUNK` pairs at a time."""
    chunks, source, target = [], [], []

    def close_chunk() -> None:
        chunks.append(Dataset.from_dict({"source": source, "target": target}))
        source.clear()
        target.clear()

    bar = tqdm(pairs, desc=f"read {keep.split}", unit=" pairs", leave=False, delay=1, disable=not shows_bars())
    for line, source_text, target_text in bar:
        if keep(line, source_text, target_text):
            source.append(source_text)
            target.append(target_text)
        if len(source) == CHUNK:
            close_chunk()
    if source:
        close_chunk()
    logger.info(str(keep))
    if not chunks:
        raise UserError(f"{keep.files[0]}, {keep.files[1]}: no pair of the {keep.split} split is left")
    return concatenate_datasets(chunks) if len(chunks) > 1 else chunks[0]


def _read_text(args: DataArguments, prefix: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    stem = args.resolve(prefix)
    if not stem.name:
        raise UserError(
            f"data: {quote(prefix)} is no prefix of files; give one such as corpus/train, for corpus/train.de"
        )
    paths = []
    for lang in (args.source_lang, args.target_lang):
        try:
            paths.append(find_file(stem.with_name(f"{stem.name}.{lang}")))
        except UserError as error:
            found = {
                file.name[len(stem.name) + 1 :].removesuffix(".gz")
                for file in stem.parent.glob(f"{glob.escape(stem.name)}.*")
            }
            languages = f"; languages found for this prefix: {one_line(', '.join(sorted(found)))}" if found else ""
            raise UserError(f"{error}{languages}") from None
    source, target = paths
    pairs = ((number, *texts) for number, texts in enumerate(aligned(paths), start=1))
    return (str(source), str(target)), pairs


def _read_tsv(args: DataArguments, file: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    path = find_file(args.resolve(file))
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
                    raise UserError(f"{path}, line 1: no columns {quote(wanted)} in the header {quote(cells)}")
                if looks_like_header(cells, args):
                    raise UserError(
                        f"{path}, line 1: {quote(cells)} looks like a header, and names no columns {quote(wanted)}; "
                        "set data.source_field and data.target_field to its names, or remove the line"
                    )
                logger.info(
                    "%s has no header: column 1 is %s and column 2 is %s, as in line 1: %s",
                    *(path, *wanted, quote(" → ".join(cells))),
                )
            if len(cells) != width:
                raise UserError(
                    f"{path}, line {number}: {len(cells)} tab-separated columns instead of {width}. All lines need "
                    "the same number of columns. Without a header that names "
                    f"{quote(wanted[0])} and {quote(wanted[1])}, each line needs two columns: source and target"
                )
            yield number, cells[columns[0]], cells[columns[1]]

    return (str(path), str(path)), pairs()


def looks_like_header(cells: list[str], args: DataArguments) -> bool:
    """Return whether a first line is a header: a wanted column, or only single words with one of `HEADERS`."""
    wanted = {args.source_name.lower(), args.target_name.lower()}
    names = [cell.strip(" '\"").lower() for cell in cells]
    are_words = all(len(name.split()) == 1 for name in names)
    return any(name in wanted for name in names) or (are_words and any(name in HEADERS for name in names))


def _read_jsonl(args: DataArguments, file: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    path = find_file(args.resolve(file))

    def pairs() -> Iterator[Pair]:
        for number, (where, row) in enumerate(json_rows(path), start=1):
            source, target = pick(row, args.source_name, where), pick(row, args.target_name, where)
            yield number, *(checked_characters(text, where) for text in (source, target))

    return (str(path), str(path)), pairs()


def pick(row: dict, name: str, where: str) -> str:
    """Return the text `row[name]` or `row["translation"][name]`; null becomes "". `where` opens error messages."""
    nested = row.get("translation")
    nested = nested if isinstance(nested, dict) else {}
    if name not in row and name not in nested:
        available = [
            *(field for field in row if field != "translation"),
            *(f"translation.{field}" for field in nested),
        ]
        raise UserError(
            f"{where}: no field {quote(name)}; available: {one_line(', '.join(available), QUOTED)}. Set "
            "data.source_field and data.target_field, or the language codes"
        )
    value = row[name] if name in row else nested[name]
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: field {quote(name)} holds {type(value).__name__}, not text")
    return value or ""


@contextmanager
def refusing_data_sets(message: str, hint: str = "") -> Iterator[None]:
    """Turn errors of `datasets` (unknown names, configs and splits, broken files) into a `UserError`.

    Args:
        message: beginning of the message: what could not be done. The reason follows.
        hint: end of the message: what the user can do.
    """
    try:
        with bars_where_shown():
            yield
    except UserError:
        raise
    except (ValueError, TypeError, RuntimeError, OSError, DatasetsError, pickle.UnpicklingError) as error:
        # for a broken file, the error of `datasets` gives no reason; the reason is its `__cause__`
        reason = error if error.__cause__ is None else f"{error}: {error.__cause__}"
        raise UserError(f"{message}: {one_line(reason)}{hint and f'. {hint}'}") from error


def _opening(args: DataArguments, split_name: str) -> AbstractContextManager[None]:
    asked = f"data.name {quote(args.name)} (config {quote(args.config)}, split {quote(split_name)})"
    return refusing_data_sets(f"{asked} could not be loaded", where_paths_start())


def load_texts(name: str, config: str | None, split_name: str, streaming: bool = False) -> Dataset | IterableDataset:
    """Call `datasets.load_dataset`, but keep the words None, NA and null in a table as text, not as missing values."""
    options = load_dataset_builder(name, config).config
    words = {"keep_default_na": False} if hasattr(options, "keep_default_na") else {}
    return load_dataset(name, config, split=split_name, streaming=streaming, **words)


def _open_dataset(args: DataArguments, split_name: str) -> Dataset | IterableDataset:
    """Open a data set of the Hub or a local directory (files, or the output of `save_to_disk`)."""
    local = args.resolve(args.name)
    name = str(local) if local.is_dir() else args.name
    if not any((local / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        return load_texts(name, args.config, split_name, streaming=args.streaming)
    saved = load_from_disk(name)
    if isinstance(saved, DatasetDict):
        if split_name not in saved:
            raise UserError(f"{name}: no split {quote(split_name)}; available: {one_line(', '.join(saved))}")
        saved = saved[split_name]
    elif split_name != (own := str(saved.split or "train")):
        raise UserError(
            f"{name} holds a single split, {quote(own)}, and not {quote(split_name)}; divide it "
            "(`Dataset.train_test_split`) and save the DatasetDict"
        )
    return saved.to_iterable_dataset() if args.streaming else saved


def _read_rows(args: DataArguments, split_name: str) -> tuple[tuple[str, str], Iterator[Pair]]:
    where = f"{args.name} ({split_name})"
    with _opening(args, split_name):
        dataset = _open_dataset(args, split_name)

    def pairs() -> Iterator[Pair]:
        for number, row in enumerate(dataset, start=1):
            place = f"{where}, row {number}"
            yield number, pick(row, args.source_name, place), pick(row, args.target_name, place)

    return (where, where), pairs()


def _stream(args: DataArguments, split: Split) -> IterableDataset:
    split_name = args.location(split)
    where = f"{args.name} ({split_name})"
    with _opening(args, split_name):
        dataset = _open_dataset(args, split_name)
        first = next(iter(dataset), None)
    if first is None:
        raise UserError(f"{where} is empty")

    def to_pair(row: dict, index: int) -> dict:
        place = f"{where}, row {index + 1}"
        return {"source": pick(row, args.source_name, place), "target": pick(row, args.target_name, place)}

    to_pair(first, 0)  # raise the error of a wrong field now, not within the training loop
    pairs = dataset.map(to_pair, with_indices=True, remove_columns=list(first))
    return pairs.filter(StreamFilter(split, where), with_indices=True)


def _phrases(args: DataArguments, split: Split) -> Dataset:
    for package in ("babel", "num2words"):
        need(package, "phrases", "data.format 'phrases'")
    from .phrases import build_phrases

    return build_phrases(args.source_lang, args.target_lang, train_size=args.train_size, seed=args.seed)[split]
