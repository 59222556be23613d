"""Warnings before the training about data that are allowed, but probably a mistake."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pyarrow
import pyarrow.compute as compute
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .recipe import Recipe

logger = logging.getLogger(__name__)

SAMPLE = 100_000  # encoded pairs that are searched for unknown tokens
SENTENCES = 5_000  # that are searched for letters without a token
UNKNOWN = 0.005  # share of unknown tokens above which something is wrong
LISTED = 10  # letters in a message
SIDES = ("source", "target")


def warn_of_capitals(references: Sequence[str], recipe: Recipe) -> None:
    """Warn if translations without capitals are compared with references that have capitals."""
    lowers = recipe.tokenizer.path is None and recipe.tokenizer.lowercase and not recipe.evaluation.lowercase
    if lowers and any(reference != reference.lower() for reference in references):
        logger.warning(
            "%s: tokenizer.lowercase is true, so translations have no capitals, and the references of data.test have "
            "some: scores are too low; set evaluation.lowercase: true",
            recipe.source,
        )


def warn_of_overlap(seen: Dataset, held_out: Dataset, split: str, other: str = "training") -> None:
    """Warn if pairs of a held-out split are also in `seen`, the set that trains the model or selects it."""
    if overlap := count_overlap(seen, held_out):
        logger.warning(
            "%d of %d pairs of the %s split are also in the %s set, so its scores may be too high for new text; "
            "remove these pairs from one of the two",
            overlap,
            len(held_out),
            split,
            other,
        )


def count_overlap(train: Dataset, held_out: Dataset) -> int:
    """Count the pairs of `held_out` that the training set also has, without regard to spaces and Unicode form.

    With several language pairs, one pair may hold the sentences of another with the sides swapped. These count, too.
    """
    ours, theirs = ([_plain(rows.with_format("arrow")[:][side]) for side in SIDES] for rows in (train, held_out))
    seen = _found(ours, theirs)
    if "pair" in train.column_names:
        seen |= _found(ours[::-1], theirs)
    return sum(pair in seen for pair in zip(*(texts.to_pylist() for texts in theirs), strict=True))


def _found(ours: list[pyarrow.ChunkedArray], theirs: list[pyarrow.ChunkedArray]) -> set[tuple[str, ...]]:
    """The pairs of `ours` whose first text is on the first side of `theirs`, and whose second is on the second."""
    found = [compute.is_in(texts, value_set=compute.unique(held)) for texts, held in zip(ours, theirs, strict=True)]
    both = compute.and_(*found)
    return set(zip(*(compute.filter(texts, both).to_pylist() for texts in ours), strict=True))


def _plain(texts: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Texts in the form that tokenizers give them: NFKC, and single spaces."""
    words = compute.utf8_split_whitespace(compute.utf8_trim_whitespace(compute.utf8_normalize(texts, form="NFKC")))
    return compute.binary_join(words, " ")


def warn_of_unknown_tokens(texts: Dataset, encoded: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn for each side of the training set if many of its tokens are unknown, and name letters without a token.

    Args:
        texts: the training set.
        encoded: the encoded training set.
        tokenizer: the tokenizer that encoded it.
    """
    if tokenizer.unk_token_id is None:
        return
    table = encoded.select(range(min(len(encoded), SAMPLE))).with_format("arrow")[:]
    for side, column in (("source", "input_ids"), ("target", "labels")):
        tokens = compute.list_flatten(table[column])
        unknown = compute.sum(compute.equal(tokens, tokenizer.unk_token_id)).as_py() or 0
        if unknown > UNKNOWN * len(tokens):
            letters = letters_without_token(islice(texts[side], SENTENCES), tokenizer)
            logger.warning(
                "%.1f %% of the %s tokens are %s: the tokenizer lacks letters%s, and the model cannot learn these "
                "letters. Replace them in all files, and restore them in the translations. Or train from scratch with "
                "a new tokenizer (remove tokenizer.path and model.init_from)",
                100 * unknown / len(tokens),
                side,
                tokenizer.unk_token,
                f", such as {' '.join(letters)}" if letters else "",
            )


def letters_without_token(sentences: islice, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The most frequent letters that become the unknown token. A letter and its mark are one if NFC joins them."""
    counts = Counter(letter for sentence in sentences for letter in unicodedata.normalize("NFC", sentence))
    unknown = tokenizer.unk_token_id
    lacking = (
        letter
        for letter, _ in counts.most_common()
        if unknown in tokenizer(letter, add_special_tokens=False)["input_ids"]
    )
    return list(islice(lacking, LISTED))
