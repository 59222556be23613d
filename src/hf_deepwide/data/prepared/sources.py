"""The rows of a corpus: from the Hub, from a copy of its data sets, or from the files that its authors released."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from sacrebleu.dataset import DATASETS
from sacrebleu.utils import SACREBLEU_DIR

from ...errors import UserError, one_line, quote
from ..corpora import refusing_data_sets
from ..text_files import aligned, read_lines
from .cleaning import Row
from .corpus import Languages, Part, SacreBleuSet

_SEGMENT = re.compile(r"<seg id=[^>]*>\s*(.*?)\s*</seg>")
_SEGMENT_BEGIN = re.compile(r"<seg\b")
_ABOUT = ("<url>", "<talkid>", "<keywords>")  # mark lines about a talk, which are not translated
_MARKS = re.compile("</?(?:title|description)>")
TABLES = ("dataset_dict.json", "*.parquet", "*.jsonl")  # the files of which a copy of a data set consists
COMMIT = re.compile(r"[0-9a-f]{40}")


def open_part(part: Part, copies: Path | None) -> Dataset:
    """Load a split from the Hub, or from a folder with copies of the data sets.

    A copy is a clone of the data set, or the output of `save_to_disk`. It lies in the subfolder with the data set's
    name, or is the folder itself.

    Raises:
        UserError: the split cannot be loaded, or is empty.
    """
    place, hint = "the Hub" if copies is None else one_line(copies), ""
    if copies is None:
        hint = "Give the command again with a connection, or with --source and a folder that holds the files"
    with refusing_data_sets(f"{part} could not be loaded from {place}", hint):
        dataset = _load(part, copies)
    if part.first is not None:
        dataset = dataset.select(range(min(part.first, len(dataset))))
    if not len(dataset):
        raise UserError(f"{part} is empty")
    return dataset


def holds_copy(source: Path) -> bool:
    """Return True if a folder is, or contains, a copy of a data set of the Hub.

    Such copies are tables in formats (`TABLES`) in which no corpus was released.
    """
    return any(next(source.rglob(kind), None) is not None for kind in TABLES)


def _load(part: Part, copies: Path | None) -> Dataset:
    files = {part.split: part.data_files} if part.data_files else None
    if copies is None:
        return load_dataset(part.name, part.config, split=part.split, revision=part.revision, data_files=files)
    places = [copies / part.name / (part.config or ""), copies / part.name, copies / (part.config or ""), copies]
    for place in places:
        if (place / "dataset_dict.json").is_file():
            saved = load_from_disk(str(place))
            if not isinstance(saved, DatasetDict) or part.split not in saved:
                raise ValueError(f"{place} has no split {part.split}")
            return saved[part.split]
    place = copies / part.name if (copies / part.name).is_dir() else copies
    return load_dataset(str(place), part.config, split=part.split, data_files=files)


def commit_of(dataset: Dataset) -> str | None:
    """The commit of the Hub from which a data set was downloaded; None if no path of its cache files contains it."""
    folders = (folder for file in dataset.cache_files for folder in Path(file["filename"]).parts)
    return next(filter(COMMIT.fullmatch, folders), None)


def rows_of(dataset: Dataset, part: Part, languages: Languages, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the texts of each row in the order of the languages; a missing translation is an empty text.

    Raises:
        UserError: a row has no field for a language, or a value that is not text.
    """
    for number, row in enumerate(dataset, start=1):
        talk = row.get("translations")
        if isinstance(talk, dict):
            row = dict(zip(talk["language"], talk["translation"], strict=True))
            texts = [row.get(columns.get(language, language)) or "" for language in languages]
        else:
            fields = row.get("translation") or row
            missing = [language for language in languages if language not in fields]
            if missing:
                raise UserError(
                    f"{part}, row {number}: no text in {missing[0]}; there is {one_line(', '.join(fields))}"
                )
            texts = [fields[language] or "" for language in languages]
        for language, text in zip(languages, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{part}, row {number}: {language} is {quote(text)}; accepted: text")
        yield tuple(" ".join(text.splitlines()) if "\n" in text or "\r" in text else text for text in texts)


def rows_of_test_set(test_set: SacreBleuSet) -> Iterator[Row]:
    """Yield the texts of each row of a test set, which sacreBLEU downloads once and keeps.

    Raises:
        UserError: the test set cannot be downloaded, or its sides are not aligned.
    """
    files = []
    for direction, side in (place.split("/") for place in test_set.sides):
        dataset = DATASETS[test_set.name]
        try:
            files.append(Path(dataset.get_files(direction)[dataset.fieldnames(direction).index(side)]))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{test_set} could not be fetched: {one_line(error)}; `sacrebleu -t {test_set.name} -l {direction} "
                "--echo src` fetches it, on another machine, too. If a download was interrupted, remove "
                f"{one_line(Path(SACREBLEU_DIR) / test_set.name)} before"
            ) from error
    yield from aligned(files, read_lines)


def names_of(place: str, languages: Languages) -> list[str]:
    """The names of a place's files. `{lang}` is a language; `{side}` is `src` for the first language, else `ref`."""
    sides = ("src", *("ref",) * (len(languages) - 1))
    names = (
        place.replace("{side}", side).replace("{lang}", language)
        for side, language in zip(sides, languages, strict=True)
    )
    return list(dict.fromkeys(names))


def find_files(source: Path, place: str, languages: Languages) -> list[Path]:
    """The files of a place: one for each language, or one table.

    Raises:
        UserError: a file is missing, or several files have its name.
    """
    names = names_of(place, languages)
    files = [find_file(source, name) for name in names]
    for name, file in zip(names, files, strict=True):
        if file is None:
            raise UserError(
                f"--source {one_line(source)}: there is neither a file {name} or {name}.gz in or below this "
                "folder, nor a copy of a data set of the Hub"
            )
    return [file for file in files if file is not None]


def find_file(source: Path, name: str) -> Path | None:
    """Find a file of this name, or the same name with `.gz`, in a folder or anywhere below it; None if there is none.

    Raises:
        UserError: several files below the folder have this name.
    """
    for candidate in (source / name, source / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    found = sorted(path for pattern in (name, f"{name}.gz") for path in source.rglob(pattern) if path.is_file())
    if len(found) > 1:
        raise UserError(
            f"--source {one_line(source)}: both {one_line(found[0])} and {one_line(found[1])} could be meant; name "
            "the folder that holds one of them"
        )
    return found[0] if found else None


def rows_of_files(files: Sequence[Path], languages: Languages, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of aligned files, or of one table with a column for each language.

    Raises:
        UserError: the files cannot be read, or are not aligned; or the table lacks a column.
    """
    if len(files) == len(languages):
        yield from aligned(files, _sentences)
        return
    (table,) = files
    wanted = [columns.get(language, language) for language in languages]
    cells, places = 0, []
    for number, line in enumerate(read_lines(table), start=1):
        row = line.split("\t")
        if number == 1:
            missing = [column for column in wanted if column not in row]
            if missing:
                raise UserError(f"{table}, line 1: no column {quote(missing[0])} in the header {quote(row)}")
            cells, places = len(row), [row.index(column) for column in wanted]
            continue
        if len(row) != cells:
            raise UserError(f"{table}, line {number}: {len(row)} tab-separated columns; the header has {cells}")
        yield tuple(row[place] for place in places)


def _sentences(file: Path) -> Iterator[str]:
    """Yield the sentences of a file. Mark-up is removed from training files of WIT3 and test sets of IWSLT and WMT."""
    name = file.name.removesuffix(".gz")
    if name.endswith((".xml", ".sgm")):
        for number, line in enumerate(read_lines(file), start=1):
            match = _SEGMENT.search(line)
            if len(_SEGMENT_BEGIN.findall(line)) != (match is not None):
                raise UserError(f"{file}, line {number}: the release has each <seg>…</seg> on a line of its own")
            if match:
                yield match[1]
    elif name.startswith("train.tags."):
        yield from (_MARKS.sub("", line) for line in read_lines(file) if not any(mark in line for mark in _ABOUT))
    else:
        yield from read_lines(file)
