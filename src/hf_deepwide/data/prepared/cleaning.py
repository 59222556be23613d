"""The steps of cleaning that the papers name, each a small function.

A row is the same sentence in several languages. A step changes a row, or leaves it out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...errors import UserError

Row = tuple[str, ...]
Change = Callable[[Row], Row | None]  # None: the row is left out

NULL = ("__NULL__", "_ _ NULL _ _")  # a sentence that a talk lacks in this language


class Step(NamedTuple):
    """One step: what it does in words, and a function that makes it for the languages of the rows."""

    told: str
    made_for: Callable[[Sequence[str]], Change]
    leaves_out: bool = False


def _keep(told: str, stays: Callable[[Row], bool]) -> Step:
    return Step(told, lambda languages: lambda row: row if stays(row) else None, leaves_out=True)


def _tokenized(languages: Sequence[str]) -> Change:
    try:
        from sacremoses import MosesTokenizer
    except ModuleNotFoundError as error:
        raise UserError(f"tokenising needs the package {error.name}: pip install 'hf_deepwide[corpora]'") from error
    tokenizers = [MosesTokenizer(language) for language in languages]
    return lambda row: tuple(
        tokenizer.tokenize(text, return_str=True) for tokenizer, text in zip(tokenizers, row, strict=True)
    )


TOKENIZED = Step("tokenised by Moses' rules", _tokenized)
LOWERED = Step("lower-cased", lambda languages: lambda row: tuple(text.lower() for text in row))
STRAIGHT_APOSTROPHES = Step("’ becomes '", lambda languages: lambda row: tuple(text.replace("’", "'") for text in row))
WITHOUT_EMPTY = _keep("without pairs that have an empty side", lambda row: all(text.strip() for text in row))
WITHOUT_NULL = _keep(
    "without sentences that are not translated",
    lambda row: all(text.strip() and not any(mark in text for mark in NULL) for text in row),
)


def between(least: int, most: int) -> Step:
    """Keep rows that have so many words in each language."""
    return _keep(
        f"{least} to {most} words on each side", lambda row: all(least <= len(text.split()) <= most for text in row)
    )


def ratio_at_most(most: float) -> Step:
    """Keep rows whose longest side has at most so many times the words of the shortest."""

    def stays(row: Row) -> bool:
        words = [len(text.split()) for text in row]
        return max(words) <= most * min(words)

    return _keep(f"the longer side at most {most} times as many words as the shorter side", stays)
