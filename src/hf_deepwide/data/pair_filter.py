"""Which sentence pairs stay: both sides have text, no word is endless, and, if asked, no pair is repeated."""

import hashlib
import logging

from ..errors import UserError
from ..models.plain_text import is_blank
from .arguments import Split

logger = logging.getLogger(__name__)

WORD = 20_000  # characters without a space; the time to train a tokenizer grows with the square of a word's length


def endless_word(text: str) -> int:
    """Characters of the longest word, if it is longer than any word; else 0."""
    longest = max(map(len, text.split()), default=0) if len(text) > WORD else 0
    return longest if longest > WORD else 0


def check_words(text: str, where: str) -> None:
    """Refuse a text with a word that is longer than any word; `where` opens the message."""
    if longest := endless_word(text):
        raise UserError(
            f"{where}: a word of {longest:,} characters; accepted: {WORD:,} at most. Remove the line, and its partner "
            "in the other language"
        )


class PairFilter:
    """Says which pairs stay: all with two non-empty sides (and, if asked, only the first of equal ones).

    Outside training an empty side is an error: scores on a part of a test set compare with nothing. `files` are the
    names of source and target for that message. A word without end is an error, too, but for training pairs that are
    `streamed`. These are left out: a run that has begun could not go on with a file that was mended.
    """

    def __init__(
        self, split: Split, files: tuple[str, str], drop_duplicates: bool = False, streamed: bool = False
    ) -> None:
        self.split = split
        self.files = files
        self.streamed = streamed and split == "train"
        self.kept = 0
        self.empty = 0
        self.endless = 0
        self.duplicates = 0
        self._seen: set[bytes] | None = set() if drop_duplicates and split == "train" else None

    def __call__(self, line: int, source: str, target: str) -> bool:
        """True if the pair stays; counts it either way."""
        for side, text, file in (("source", source, self.files[0]), ("target", target, self.files[1])):
            if self.streamed and endless_word(text):
                self.endless += 1
                return False
            check_words(text, f"{file}, line {line}")
            if not is_blank(text):
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

    def __str__(self) -> str:
        """How many pairs were kept and left out."""
        repeated = "" if self._seen is None else f" and {self.duplicates} repeated pairs"
        endless = f" and {self.endless} with a word of more than {WORD:,} characters" if self.endless else ""
        return (
            f"{self.split}, {' and '.join(dict.fromkeys(self.files))}: {self.kept} pairs kept, {self.empty} with an "
            f"empty side{endless}{repeated} left out"
        )

    @property
    def left_out(self) -> int:
        """How many pairs did not stay."""
        return self.empty + self.endless + self.duplicates


class StreamFilter:
    """A `PairFilter` for `IterableDataset.filter`: logs as it goes, since a stream may have no end."""

    def __init__(self, split: Split, where: str) -> None:
        self.split, self.where = split, where
        self.keep = PairFilter(split, (where, where), streamed=True)

    def __call__(self, row: dict, index: int) -> bool:
        """True if the row stays, which is the `index`-th of this pass; counts begin anew with each pass."""
        if index == 0:
            self.keep = PairFilter(self.split, (self.where, self.where), streamed=True)
        stays = self.keep(index + 1, row["source"], row["target"])
        if not stays and self.keep.left_out & (self.keep.left_out - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            logger.info("%s, up to row %d", self.keep, index + 1)
        return stays
