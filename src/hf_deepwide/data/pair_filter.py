"""Filters for sentence pairs: both sides need text, no word may be too long, and repeated pairs can be left out."""

import hashlib
import logging

from ..errors import UserError
from ..models.plain_text import is_blank
from .arguments import Split

logger = logging.getLogger(__name__)

WORD = 20_000  # characters without a space; the time to train a tokenizer grows with the square of a word's length


def endless_word(text: str) -> int:
    """Return the length of the longest word if it has more than `WORD` characters, else 0."""
    longest = max(map(len, text.split()), default=0) if len(text) > WORD else 0
    return longest if longest > WORD else 0


def check_words(text: str, where: str) -> None:
    """Raise a `UserError` if a word has more than `WORD` characters; the message begins with `where`."""
    if longest := endless_word(text):
        raise UserError(
            f"{where}: a word of {longest:,} characters; accepted: {WORD:,} at most. Remove the line, and its partner "
            "in the other language"
        )


class PairFilter:
    """Decide which pairs stay: pairs with two non-empty sides; with `drop_duplicates` only the first of equal pairs.

    Outside training an empty side is an error: the score on a part of a test set is comparable with no other score.
    `files` are the names of source and target for error messages. A word of more than `WORD` characters is also an
    error. Only `streamed` training pairs with such a word are left out: a run that has begun could not resume after
    the file was corrected.
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
        """Return whether the pair stays, and count it as kept or left out."""
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
        """Return a text with the numbers of pairs that were kept and left out."""
        repeated = "" if self._seen is None else f" and {self.duplicates} repeated pairs"
        endless = f" and {self.endless} with a word of more than {WORD:,} characters" if self.endless else ""
        return (
            f"{self.split}, {' and '.join(dict.fromkeys(self.files))}: {self.kept} pairs kept, {self.empty} with an "
            f"empty side{endless}{repeated} left out"
        )

    @property
    def left_out(self) -> int:
        """The number of pairs that were left out."""
        return self.empty + self.endless + self.duplicates


class StreamFilter:
    """A `PairFilter` for `IterableDataset.filter` that logs during the pass, because a stream may have no end."""

    def __init__(self, split: Split, where: str) -> None:
        self.split, self.where = split, where
        self.keep = PairFilter(split, (where, where), streamed=True)

    def __call__(self, row: dict, index: int) -> bool:
        """Return whether the row with the number `index` in this pass stays; each pass has its own counts."""
        if index == 0:
            self.keep = PairFilter(self.split, (self.where, self.where), streamed=True)
        stays = self.keep(index + 1, row["source"], row["target"])
        if not stays and self.keep.left_out & (self.keep.left_out - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            logger.info("%s, up to row %d", self.keep, index + 1)
        return stays
