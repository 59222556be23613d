"""The cleaning steps that the papers name, each a small function.

A row is the same sentence in several languages. A step changes a row, or leaves it out.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import regex

from ...errors import need

Row = tuple[str, ...]
Change = Callable[[Row], Row | None]  # None: the row is left out

CONTROL = regex.compile(r"\p{C}")  # as in Moses' remove-non-printing-char.perl
NULL = ("__NULL__", "_ _ NULL _ _")  # marks a sentence without a translation in this language


class Step(NamedTuple):
    """One step: its description, and a function that returns the step's `Change` for the languages of the rows."""

    description: str
    made_for: Callable[[Sequence[str]], Change]
    leaves_out: bool = False


def _keep(description: str, stays: Callable[[Row], bool]) -> Step:
    return Step(description, lambda languages: lambda row: row if stays(row) else None, leaves_out=True)


def _moses(kind: str, languages: Sequence[str], **options: bool) -> list[Any]:
    """Return one instance of a sacremoses class for each language."""
    sacremoses = need("sacremoses", "corpora", "Moses' tokenisation")
    return [getattr(sacremoses, kind)(language, **options) for language in languages]


def _normalized(languages: Sequence[str]) -> Change:
    normalizers = _moses("MosesPunctNormalizer", languages, perl_parity=True)
    return lambda row: tuple(
        CONTROL.sub(" ", each.normalize(text)) for each, text in zip(normalizers, row, strict=True)
    )


def _tokenized(languages: Sequence[str], dashes: bool = False) -> Change:
    tokenizers = _moses("MosesTokenizer", languages)
    return lambda row: tuple(
        each.tokenize(text, return_str=True, aggressive_dash_splits=dashes)
        for each, text in zip(tokenizers, row, strict=True)
    )


NORMALIZED = Step("punctuation normalised by Moses' rules, control characters become spaces", _normalized)
TOKENIZED = Step("tokenised by Moses' rules", _tokenized)
DASHES_SPLIT = Step("tokenised by Moses' rules, dashes in words split", partial(_tokenized, dashes=True))
LOWERED = Step("lower-cased", lambda languages: lambda row: tuple(text.lower() for text in row))
STRAIGHT_APOSTROPHES = Step("’ becomes '", lambda languages: lambda row: tuple(text.replace("’", "'") for text in row))
ONE_SPACE = Step(
    "several spaces become one", lambda languages: lambda row: tuple(re.sub(" +", " ", text) for text in row)
)
WITHOUT_EMPTY = _keep("without pairs that have an empty side", lambda row: all(text.strip() for text in row))
WITHOUT_NULL = _keep(
    "without sentences that are not translated",
    lambda row: all(text.strip() and not any(mark in text for mark in NULL) for text in row),
)


def between(least: int, most: int) -> Step:
    """Keep rows that have `least` to `most` words in each language."""
    return _keep(
        f"{least} to {most} words on each side", lambda row: all(least <= len(text.split()) <= most for text in row)
    )


def ratio_at_most(most: float) -> Step:
    """Keep rows whose longest side has at most `most` times as many words as the shortest side."""

    def stays(row: Row) -> bool:
        words = [len(text.split()) for text in row]
        return max(words) <= most * min(words)

    return _keep(f"the longer side at most {most} times as many words as the shorter side", stays)
