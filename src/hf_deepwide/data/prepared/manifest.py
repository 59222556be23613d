"""The record of prepared files: their rows, digests, origins and steps, in `manifest.json` beside the files.

An entry is written before its file gets its final name. So a file without an entry was not made by this library. A
file whose digest differs from its entry was changed.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypedDict

from ...durable import sha256_of, write_whole
from ...errors import UserError, one_line
from ...reading import read_text

NAME, LARGEST = "manifest.json", 16_000_000


class Entry(TypedDict):
    """The record of one file.

    Attributes:
        rows: number of its lines.
        sha256: the digest of its bytes.
        made_of: the places from which it was read.
        steps: descriptions of the steps that cleaned it.
        left_out: description of a step to the number of rows that the step left out.
        commits: commits of the Hub from which it was read.
    """

    rows: int
    sha256: str
    made_of: list[str]
    steps: list[str]
    left_out: dict[str, int]
    commits: list[str]


class Manifest:
    """The manifest of a corpus in a folder.

    Attributes:
        folder: the folder of the files.
        entries: path of a file, relative to the folder, to its entry.
    """

    def __init__(self, folder: Path, corpus: str, licence: str) -> None:
        """Read the manifest, if there is one.

        Raises:
            UserError: it is broken, belongs to another corpus, or has entries with other fields.
        """
        self.folder = folder
        self.corpus = corpus
        self.licence = licence
        self.entries: dict[str, Entry] = {}
        path = folder / NAME
        if not path.exists():
            return
        text = read_text(path, "manifest", LARGEST)
        try:
            content: dict[str, Any] = json.loads(text)
            of, self.entries = content["corpus"], content["files"]
            known = all(set(entry) == set(Entry.__annotations__) for entry in self.entries.values())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"{one_line(path)} is damaged ({one_line(error)}); {self._another_folder()}") from error
        if of != corpus or not known:
            raise UserError(
                f"{one_line(path)} belongs to another corpus than {corpus}, or another version wrote it; "
                f"{self._another_folder()}"
            )

    def state(self, file: str, made_of: Iterable[str], steps: Iterable[str]) -> Literal["finished", "missing"]:
        """Return "finished" if a file exists, made of these places by these steps, and unchanged; else "missing".

        Raises:
            UserError: the file exists, but has no entry, was changed, or was made of other places or by other steps.
        """
        path, entry = self.folder / file, self.entries.get(file)
        there = path.is_symlink() or path.exists()
        if entry is None:
            if there:
                raise UserError(f"{one_line(path)} is there, but was not made by this command; {self._instead()}")
            return "missing"
        if not there:
            return "missing"
        if (entry["made_of"], entry["steps"]) != (list(made_of), list(steps)):
            raise UserError(
                f"{one_line(path)} was made of {one_line(', '.join(entry['made_of']))}, in another way than asked for "
                f"now; {self._instead()}"
            )
        if sha256_of(path) != entry["sha256"]:
            raise UserError(
                f"{one_line(path)} was changed since it was made: its SHA-256 is not the one in {NAME}. Remove "
                "the file to make it again"
            )
        return "finished"

    def add(self, entries: dict[str, Entry]) -> None:
        """Add entries, and write the manifest."""
        self.entries |= entries
        content = {
            "corpus": self.corpus,
            "licence": self.licence,
            "files": dict(sorted(self.entries.items())),
        }
        write_whole(self.folder / NAME, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def _instead(self) -> str:
        return "give another --output, or move it away"

    def _another_folder(self) -> str:
        return f"give another --output, or move the whole folder {one_line(self.folder)} away"
