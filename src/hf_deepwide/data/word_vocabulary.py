"""Vocabularies of whole words from the training pairs, one vocabulary for each side.

Words are the strings between single spaces. The most frequent words are in the vocabulary, and all other words are
`<unk>`. Words of equal frequency are sorted by their letters, so that the same pairs always give the same
vocabularies.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tokenizers import normalizers

from ..errors import UserError
from ..models.word_tokenizer import SPACE, SPECIAL, WordTokenizer, text_steps
from .tokenizer import TokenizerArguments

logger = logging.getLogger(__name__)


def train_word_tokenizer(rows: Iterable[dict[str, Any]], args: TokenizerArguments) -> WordTokenizer:
    """Count the words of `source` and `target`, and make a tokenizer from the most frequent words.

    Args:
        rows: the training pairs.
        args: the section `tokenizer` of a recipe, with `words`.

    Raises:
        UserError: a side has no word that occurs often enough.
    """
    form = normalizers.Sequence(text_steps(args.lowercase, args.normalization))
    counts: dict[str, Counter[str]] = {"source": Counter(), "target": Counter()}
    for row in rows:
        for side, counter in counts.items():
            counter.update(form.normalize_str(row[side]).split(SPACE))
    sizes = {"source": args.vocab_size, "target": args.target_vocab_size or args.vocab_size}
    words = {side: _most_frequent(counts[side], side, size, args.min_frequency) for side, size in sizes.items()}
    return WordTokenizer(words["source"], words["target"], lowercase=args.lowercase, normalization=args.normalization)


def _most_frequent(counts: Counter[str], side: str, size: int, least: int) -> list[str]:
    """Return the words that get an id, the most frequent first."""
    often = [word for word, count in counts.items() if count >= least]
    if not often:
        raise UserError(
            f"tokenizer.min_frequency is {least}, and no {side} word occurs that often; lower it, or give more text"
        )
    known = sorted(often, key=lambda word: (-counts[word], word))[: size - len(SPECIAL)]
    share = sum(counts[word] for word in known) / counts.total()
    entries = len(SPECIAL) + len(known)
    logger.info(
        "%s: %d of %d distinct words are known, %.1f %% of the text", side, len(known), len(counts), 100 * share
    )
    if entries < size:
        logger.info("the %s text fills only %d of the %d entries asked for", side, entries, size)
    return known
