"""Files of prepared rows: text with a file for each language, or a data set that `load_dataset` opens."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from .cleaning import Row
from .corpus import Languages


class Writer:
    """A writer of a split's rows, which also computes the digests of the written files.

    Attributes:
        rows: number of rows written so far.
    """

    def __init__(self, folder: Path, names: Iterable[str], languages: Languages) -> None:
        """Open one file for each language, or one file whose lines hold all languages as JSON."""
        self.names = list(names)
        self.languages = languages
        self.rows = 0
        self._open = ExitStack()
        self._files = [self._open.enter_context((folder / name).open("wb")) for name in self.names]
        self._digests = [hashlib.sha256() for _ in self.names]
        self._contents = [hashlib.sha256() for _ in self.names]

    def __enter__(self) -> "Writer":
        """Return the writer itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        self._open.close()

    def add(self, row: Row) -> None:
        """Write a row to the files, and update the digests."""
        texts = row
        if self.names[0].endswith(".jsonl"):
            keyed = dict(zip(self.languages, row, strict=True))
            texts = (json.dumps({"translation": keyed}, ensure_ascii=False),)
        for text, file, digest, content in zip(texts, self._files, self._digests, self._contents, strict=True):
            line = f"{text}\n".encode()
            file.write(line)
            digest.update(line)
            content.update(f"{text.strip()}\n".encode())
        self.rows += 1

    @property
    def digests(self) -> dict[str, str]:
        """File to the SHA-256 of its bytes."""
        return {name: digest.hexdigest() for name, digest in zip(self.names, self._digests, strict=True)}

    @property
    def contents(self) -> dict[str, str]:
        """File to the SHA-256 of its lines without white space at their two ends."""
        return {name: digest.hexdigest() for name, digest in zip(self.names, self._contents, strict=True)}


def content_digest(file: Path) -> str:
    """Return the digest of an existing file, computed as in `Writer.contents`."""
    content = hashlib.sha256()
    with file.open("rb") as lines:
        for line in lines:
            content.update(f"{line.decode().strip()}\n".encode())
    return content.hexdigest()


def data_set_card(licence: str, files: Iterable[str]) -> str:
    """Return the text of the `README.md` that lets `load_dataset` find configs and splits in `config/split.jsonl`."""
    configs: dict[str, list[str]] = {}
    for file in sorted(files):
        config, _, _ = file.partition("/")
        configs.setdefault(config, []).append(file)
    lines = ["---", "configs:"]
    for config, places in configs.items():
        lines += [f"- config_name: {json.dumps(config)}", "  data_files:"]
        for place in places:
            lines += [f"  - split: {Path(place).stem}", f"    path: {place}"]
    return "\n".join([*lines, "---", "", f"Made by `hf-deepwide data`. Licence: {licence}.", ""])
