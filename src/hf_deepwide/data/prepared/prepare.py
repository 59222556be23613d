"""Prepare a corpus: read each split, clean it, check it, and write it in full or not at all.

Rows are streamed, so that memory does not grow with the corpus. Finished files are not made again.
"""

import gzip
import hashlib
import json
import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from datasets import Dataset
from tqdm import tqdm

from ...card_text import CARD
from ...durable import is_empty_folder, sha256_of, whole_file, whole_files
from ...errors import UserError, one_line, quote
from ...lock import locked
from ...progress import shows_bars
from ..bpe_learning import codes_text, learn_merges
from ..text_files import read_lines
from .cleaning import Row, Step
from .corpus import Corpus, Languages, Origin, Part, SacreBleuSet, pair_of
from .manifest import Entry, Manifest
from .sources import (
    commit_of,
    find_files,
    holds_copy,
    names_of,
    open_part,
    rows_of,
    rows_of_files,
    rows_of_test_set,
)
from .writing import Writer, content_digest, data_set_card

logger = logging.getLogger(__name__)

ENGLISH = ("en", "eng")
# The accepted relative difference from a published count, if steps leave rows out: papers round their counts, and
# sacremoses splits a few words in another way than Moses.
NEARLY = 0.01
VALID = "valid"
MOST = 1_000_000  # the largest accepted number of merges
FEW = 8  # up to this number, language pairs are listed by name


@dataclass(frozen=True)
class Task:
    """The files that one pass over a split writes.

    Args:
        languages: the languages of the rows.
        split: the split that is read.
        origin: the places and cleaning steps of the rows.
        sources: the original files of each place; empty if the places are not files.
        files: a written split to its files, relative to the corpus's folder.
    """

    languages: Languages
    split: str
    origin: Origin
    sources: list[list[Path]]
    files: dict[str, list[str]]

    @property
    def made_of(self) -> list[str]:
        """The places that are read, as text for messages and the manifest."""
        return [str(place) for place in self.origin.places]

    @property
    def steps(self) -> list[str]:
        """Descriptions of the cleaning steps."""
        description = [step.description for step in self.origin.steps]
        held = self.origin.held_out
        return [*description, f"of every {held} rows that are left the last goes to {VALID}"] if held else description

    @property
    def all_files(self) -> list[str]:
        """The files of all splits that are written."""
        return list(chain.from_iterable(self.files.values()))


class Preparation:
    """The work to prepare a corpus; `run` does the work.

    Attributes:
        corpus: the corpus's row of the catalogue.
        folder: the folder of the prepared files.
        source: a folder with original files, or with copies of data sets of the Hub; None: read from the Hub.
        groups: groups of languages that are prepared together.
        tasks: all tasks, in the order in which they run.
        finished: files that are finished already.
        merges: number of subword-nmt merges to learn; None: learn none.
        unchecked: whether counts and digests that differ from the published ones are accepted.
    """

    def __init__(
        self,
        corpus: Corpus,
        output: Path,
        source: Path | None = None,
        languages: Sequence[str] | None = None,
        merges: int | Literal[True] | None = None,
        unchecked: bool = False,
    ) -> None:
        """Check the arguments and the existing files; nothing is downloaded or written.

        If `merges` is True, the number of merges is that of the papers.

        Raises:
            UserError: the corpus has no such language or no merges, an original file is missing, or a file that would
                be written exists already and was not made by this command in the same way.
        """
        if source is not None and not source.is_dir():
            raise UserError(f"--source {one_line(source)}: there is no such folder")
        self.corpus, self.folder, self.source = corpus, output / corpus.folder, source
        if source is not None and self.folder.resolve().is_relative_to(source.resolve()):
            raise UserError(
                f"--output: {one_line(self.folder)} would lie in --source {one_line(source)}; name another"
            )
        self.merges, self.unchecked = checked_merges(corpus, merges), unchecked
        self.groups = chosen_groups(corpus, languages, on_hub=source is None)
        files = source if source is not None and (corpus.hub is None or not holds_copy(source)) else None
        origins_of = corpus.hub if files is None else corpus.files
        if origins_of is None and files is None:
            raise UserError(f"--source: {corpus.name} is not on the Hub; name a folder with {corpus.what}")
        if origins_of is None:
            raise UserError(
                f"--source {one_line(source)}: {corpus.name} is made of tables of the Hub, and there is no copy of "
                "them in or below this folder; leave --source out, or give a copy"
            )
        self.tasks = [task for group in self.groups for task in self._tasks(group, origins_of(group), files)]
        self._look()

    def _look(self) -> None:
        """Read the manifest, and find the finished files."""
        self.manifest = Manifest(self.folder, self.corpus.name, self.corpus.licence)
        if self.corpus.form == "jsonl" and not self.manifest.entries:
            self.manifest.state(CARD, (), ())
        wanted = {file: (task.made_of, task.steps) for task in self.tasks for file in task.all_files}
        if self.merges is not None:
            wanted |= {self._codes(group): self._learning(group) for group in self.groups}
        self.finished = {file for file, how in wanted.items() if self.manifest.state(file, *how) == "finished"}

    def _tasks(self, languages: Languages, origins: Mapping[str, Origin], files: Path | None) -> Iterator[Task]:
        for split, origin in origins.items():
            names = [split, VALID] if origin.held_out else [split]
            places = [place for place in origin.places if isinstance(place, str)]
            sources = [find_files(files, place, languages) for place in places] if files is not None else []
            yield Task(languages, split, origin, sources, {name: self._names(languages, name) for name in names})

    def _names(self, languages: Languages, split: str) -> list[str]:
        name = self.corpus.file.replace("{pair}", pair_of(languages)).replace("{split}", split)
        return list(dict.fromkeys(name.replace("{lang}", language) for language in languages))

    def describe(self) -> str:
        """Return a text for the user: the licence, the places to read, the cleaning steps, and the output folder."""
        corpus = self.corpus
        pairs: dict[str, list[str]] = {}  # description of a task: the language pairs that share it
        for task in self.tasks:
            made_of = ", ".join(task.made_of).replace(f"({pair_of(task.languages)}, ", "(")
            description = "; ".join([f"{task.split}: {made_of}", *task.steps])
            pairs.setdefault(description, []).append(pair_of(task.languages))
        whose = {
            description: ", ".join(alike) if len(alike) <= FEW else f"{len(alike)} pairs"
            for description, alike in pairs.items()
        }
        place = "the Hugging Face Hub" if self.source is None else one_line(self.source)
        lines = [
            f"{corpus.name}: {corpus.what}",
            f"licence: {corpus.licence}",
            f"from {place}:",
            *(f"  {whose[description]}, {description}" for description in pairs),
            f"to {one_line(self.folder)}",
        ]
        if self.merges is not None:
            lines.append(f"with {self.merges:,} joint merges of subword-nmt for each language pair: {corpus.codes}")
        return "\n".join(lines)

    @property
    def example(self) -> str | None:
        """A recipe, and the overrides with which it reads the prepared files; None without a validation set."""
        if all(task.split == "train" and task.origin.held_out is None for task in self.tasks):
            return None
        keys = dict(self.corpus.keys(self.groups))
        if self.merges is not None:
            keys["tokenizer.codes"] = f"{self.corpus.folder}/{self._codes(self.groups[0])}"
        return " ".join([self.corpus.example, *(f"--{key} {shlex.quote(value)}" for key, value in keys.items())])

    def run(self) -> None:
        """Check the finished files, and make the others.

        Raises:
            UserError: a source cannot be read, the rows differ from the published ones, or another process is
                preparing the corpus.
        """
        codes = [self._codes(group) for group in self.groups] if self.merges is not None else []
        wanted = [*codes, *(file for task in self.tasks for file in task.all_files)]
        if self.finished.issuperset(wanted) and self._new_card() is None:
            self._run()  # only checks: the folder may be another user's
            return
        with _empty_folders_removed(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder, "--output"):
                self._look()  # look again: another process may have made some files
                self._run()
                self._write_card()

    def _run(self) -> None:
        for task in self.tasks:
            if self.finished.issuperset(task.all_files):
                for split, files in task.files.items():
                    known = [file for file in files if Path(file).name in self.corpus.digests and not self.unchecked]
                    contents = {Path(file).name: content_digest(self.folder / file) for file in known}
                    self._check(task, split, self.manifest.entries[files[0]]["rows"], contents, finished=True)
                logger.info("%s: finished before", ", ".join(task.all_files))
            else:
                self._make(task)
        if self.merges is not None:
            for group in self.groups:
                self._learn(group)

    def _new_card(self) -> str | None:
        """The text of the data set's card, if it must be written; None if it exists already, or a user changed it."""
        if self.corpus.form != "jsonl":
            return None
        path, made = self.folder / CARD, self.manifest.entries.get(CARD)
        card = data_set_card(self.corpus.licence, (file for file in self.manifest.entries if file.endswith(".jsonl")))
        if not path.is_file():
            return card
        digest = sha256_of(path)
        if digest == hashlib.sha256(card.encode()).hexdigest():
            return None
        if made is None or digest != made["sha256"]:
            logger.warning("%s was changed and stays; remove it to have it written anew", one_line(path))
            return None
        return card

    def _write_card(self) -> None:
        if (card := self._new_card()) is None:
            return
        with whole_file(self.folder / CARD) as draft:
            draft.write_text(card, encoding="utf-8")
            entry = Entry(
                rows=card.count("\n"), sha256=sha256_of(draft), made_of=[], steps=[], left_out={}, commits=[]
            )
            self.manifest.add({CARD: entry})

    def _make(self, task: Task) -> None:
        left_out: Counter[str] = Counter()
        commits: set[str] = set()
        rows = cleaned(self._rows(task, commits), task.origin.steps, task.languages, left_out)
        folder = (self.folder / task.files[task.split][0]).parent
        with _empty_folders_removed(folder), whole_files(folder) as draft:
            with ExitStack() as opened:
                writers = {
                    split: opened.enter_context(Writer(draft, [Path(file).name for file in files], task.languages))
                    for split, files in task.files.items()
                }
                for number, row in enumerate(rows, start=1):
                    held_out = task.origin.held_out is not None and number % task.origin.held_out == 0
                    writers[VALID if held_out else task.split].add(row)
            entries = {}
            for split, files in task.files.items():
                self._check(task, split, writers[split].rows, writers[split].contents)
                for file in files:
                    entries[file] = Entry(
                        rows=writers[split].rows,
                        sha256=writers[split].digests[Path(file).name],
                        made_of=task.made_of,
                        steps=task.steps,
                        left_out=dict(left_out),
                        commits=sorted(commits),
                    )
            self._check_kept(entries)
            self._forget_codes(task, entries)
            self.manifest.add(entries)
        for split, files in task.files.items():
            logger.info("%s: %s rows", ", ".join(files), f"{writers[split].rows:,}")
        for description, count in left_out.items():
            logger.info("  %s left out: %s", f"{count:,}", description)

    def _check_kept(self, entries: dict[str, Entry]) -> None:
        """Refuse to replace a finished file by other text, because other files are aligned with it."""
        for file, entry in entries.items():
            if file in self.finished and entry["sha256"] != self.manifest.entries[file]["sha256"]:
                raise UserError(
                    f"{one_line(self.folder / file)} was made of other text than the source has now, and other files "
                    "are aligned with it; give another --output, or move the whole folder away"
                )

    def _forget_codes(self, task: Task, entries: dict[str, Entry]) -> None:
        """Delete the file of merges, if it was learnt on other text than that of the new training files."""
        codes, known = self._codes(task.languages), self.manifest.entries
        learnt_on = entries.keys() & {*self._names(task.languages, "train")}
        if codes not in known or all(
            file in known and known[file]["sha256"] == entries[file]["sha256"] for file in learnt_on
        ):
            return
        path = self.folder / codes
        if path.is_file() and sha256_of(path) == known[codes]["sha256"]:  # a file that a user changed stays
            path.unlink()
            logger.info("%s: removed, as its training files have changed", codes)
        del known[codes]
        self.finished.discard(codes)

    def _rows(self, task: Task, commits: set[str]) -> Iterator[Row]:
        """Yield the rows of all places of a task, with a progress bar; add the commits that are read to `commits`."""
        name = f"{pair_of(task.languages)}, {task.split}"
        with tqdm(desc=name, unit=" rows", leave=False, delay=1, disable=not shows_bars()) as bar:
            for files in task.sources:
                for row in rows_of_files(files, task.languages, self.corpus.columns):
                    bar.update()
                    yield row
            for part in task.origin.places:
                if isinstance(part, SacreBleuSet):
                    for row in rows_of_test_set(part):
                        bar.update()
                        yield row
                if not isinstance(part, Part):
                    continue
                dataset = self._open(part, task)
                commit = commit_of(dataset) if self.source is None else None
                commits |= {commit} if commit else set()
                bar.total = (bar.total or 0) + len(dataset)
                for row in rows_of(dataset, part, task.languages, self.corpus.columns):
                    bar.update()
                    yield row

    def _open(self, part: Part, task: Task) -> Dataset:
        """Open a split of a data set.

        Raises:
            UserError: it cannot be loaded. If `source` lacks the copy, the message also names an original file.
        """
        try:
            return open_part(part, self.source)
        except UserError as error:
            if self.source is None or self.corpus.files is None:
                raise
            origin = next(iter(self.corpus.files(task.languages).values()))
            file = names_of(str(origin.places[0]), task.languages)[0]
            raise UserError(
                f"{error}. The folder has tables, so it must hold a copy of this data set; for the files as released, "
                f"such as {file}, name a folder without other tables"
            ) from error

    def _check(self, task: Task, split: str, rows: int, contents: dict[str, str], finished: bool = False) -> None:
        """Refuse a number of rows or a text that differs from the published one.

        A file that was finished before may have been made with `--unchecked`.
        """
        where = f"{self.corpus.name}, {pair_of(task.languages)}, {split}"
        if not rows:
            raise UserError(f"{where}: no row is left of {', '.join(task.made_of)}")
        if self.unchecked:
            return
        or_not = "--unchecked accepts a part of the corpus, or another release"
        if finished:
            or_not = f"It was prepared with --unchecked before; remove {' and '.join(task.files[split])} from "
            or_not += f"{one_line(self.folder)} to make it again, or repeat --unchecked"
        counts = self.corpus.counts
        published = counts.get(f"{pair_of(task.languages)}/{split}", counts.get(split))
        exact = not any(step.leaves_out for step in task.origin.steps)
        if published is not None and abs(rows - published) > (0 if exact else NEARLY * published):
            raise UserError(f"{where}: {rows:,} rows; published: {published:,}. {or_not}")
        for file, digest in contents.items():
            known = self.corpus.digests.get(file, digest)
            if digest != known:
                raise UserError(
                    f"{where}: the text of {file} is not the published one (SHA-256 of its lines without white space "
                    f"at their ends {digest[:12]}…, published {known[:12]}…). {or_not}"
                )

    def _learn(self, languages: Languages) -> None:
        """Learn joint merges on the training files of a group, and write them, unless they are finished."""
        file, (train, steps) = self._codes(languages), self._learning(languages)
        if file in self.finished:
            logger.info("%s: finished before", file)
            return
        merges = learn_merges(chain.from_iterable(map(self._texts, train)), self.merges or 0)
        text = codes_text(merges)
        with whole_file(self.folder / file) as draft:
            draft.write_bytes(gzip.compress(text.encode(), mtime=0) if file.endswith(".gz") else text.encode())
            entry = Entry(
                rows=text.count("\n"), sha256=sha256_of(draft), made_of=train, steps=steps, left_out={}, commits=[]
            )
            self.manifest.add({file: entry})
        logger.info("%s: %s merges", file, f"{len(merges):,}")

    def _learning(self, languages: Languages) -> tuple[list[str], list[str]]:
        """The files from which merges are learnt, and the steps for the manifest."""
        return self._names(languages, "train"), [f"{self.merges} merges"]

    def _codes(self, languages: Languages) -> str:
        return (Path(self._names(languages, "train")[0]).parent / self.corpus.codes).as_posix()

    def _texts(self, file: str) -> Iterator[str]:
        """Yield the sentences of a prepared file."""
        lines = read_lines(self.folder / file)
        return lines if self.corpus.form == "text" else chain.from_iterable(map(_translations, lines))


@contextmanager
def _empty_folders_removed(folder: Path) -> Iterator[None]:
    """Run a block that makes a folder. After an error, remove the empty folders that did not exist before."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except BaseException:
        for place in filter(is_empty_folder, missing):
            place.rmdir()
        raise


def _translations(line: str) -> Iterable[str]:
    return json.loads(line)["translation"].values()


def cleaned(rows: Iterable[Row], steps: Sequence[Step], languages: Languages, left_out: Counter[str]) -> Iterator[Row]:
    """Yield the rows that pass all steps; count in `left_out`, by step, the rows that a step left out."""
    changes = [(step.description, step.made_for(languages)) for step in steps]
    for row in rows:
        for description, change in changes:
            changed = change(row)
            if changed is None:
                left_out[description] += 1
                break
            row = changed
        else:
            yield row


def chosen_groups(corpus: Corpus, languages: Sequence[str] | None, *, on_hub: bool) -> list[Languages]:
    """Return the groups of languages to prepare.

    The wanted languages are the given ones (None: all) and English. A pair is prepared if both its languages are
    wanted. Of a larger group the wanted languages are prepared, if there are at least two.

    Raises:
        UserError: the corpus, or the Hub, does not have a language; or no group is left.
    """
    known = list(dict.fromkeys(language for group in corpus.groups for language in group))
    here = [language for language in known if not on_hub or corpus.on_hub is None or language in corpus.on_hub]
    for language in languages or []:
        if language not in known:
            raise UserError(f"--languages {quote(language)}; {corpus.name} has {', '.join(known)}")
        if language not in here:
            raise UserError(
                f"--languages {quote(language)}: the Hub has {', '.join(here)} of {corpus.name}; for others give "
                "--source, a folder with the files as released"
            )
    wanted = {*(languages or here), *ENGLISH}
    groups = []
    for group in corpus.groups:
        chosen = tuple(language for language in group if language in wanted)
        if len(chosen) == len(group) or (len(group) > 2 and len(chosen) > 1):
            groups.append(chosen)
    if not groups:
        alone = " and ".join(languages or here)
        raise UserError(f"--languages: name a language beside {alone}; {corpus.name} has {', '.join(known)}")
    return groups


def checked_merges(corpus: Corpus, merges: int | Literal[True] | None) -> int | None:
    """Return the number of merges to learn; True stands for the papers' number.

    Raises:
        UserError: the papers have none for the corpus, or the number is out of range.
    """
    if merges is None:
        return None
    if corpus.merges is None:
        raise UserError(f"--bpe: no merges go with {corpus.name}; its recipes train the vocabulary of a run")
    if merges is True:
        return corpus.merges
    if not 1 <= merges <= MOST:
        raise UserError(f"--bpe {merges}; accepted: 1 to {MOST:,}, or nothing for {corpus.merges:,} as in the papers")
    return merges
