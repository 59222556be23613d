"""BPE-dropout: training cuts a sentence into other pieces each time (Provilkov et al. 2020, arXiv 1910.13267).

BPE joins pairs of pieces, the most frequent pair first. With dropout, before each merge, each possible merge is left
out with a fixed probability (algorithm 1 of the paper). So the model sees several segmentations of a word, and sees
rare pieces more often. Validation, tests and inference cut words without dropout.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .subword_collator import WORD_STARTS, check_marks, subword_model, words_of


class BPEDropout:
    """Replace token ids by the ids of other pieces of the same words.

    Args:
        tokenizer: a fast tokenizer whose model is BPE.
        rate: p, the probability that a merge is left out: 0 returns the ids unchanged, 1 gives single characters.

    Raises:
        UserError: the tokenizer has no merges.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rate: float) -> None:
        model = subword_model(tokenizer)
        if model.get("type") != "BPE" or not model["merges"]:
            raise UserError(
                f"tokenizer.bpe_dropout is {rate:g}, and the tokenizer, a {type(tokenizer).__name__}, has no merges "
                "to leave out; accepted: BPE tokenizers of the library tokenizers. Set bpe_dropout: 0"
            )
        self.rate = rate
        vocabulary, suffix = model["vocab"], model["end_of_word_suffix"]
        prefix = len(model["continuing_subword_prefix"] or "")
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}  # pair: rank, result
        self._parts: dict[int, tuple[int, int]] = {}  # result: pair
        for rank, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            pair, whole = (vocabulary[left], vocabulary[right]), vocabulary[left + right[prefix:]]
            self._merges.setdefault(pair, (rank, whole))
            self._parts.setdefault(whole, pair)
        whole = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
        starts = {number for piece, number in vocabulary.items() if piece.startswith(WORD_STARTS)}
        ends = {number for piece, number in vocabulary.items() if suffix and piece.endswith(suffix)}
        check_marks(tokenizer, bool(starts or ends or prefix), "bpe_dropout")
        self._starts, self._ends = whole | starts, whole | ends

    def __call__(self, ids: Sequence[int], draws: random.Random) -> list[int]:
        """Cut a sentence into pieces again, with random numbers from `draws`."""
        words = words_of(ids, self._starts, self._ends)
        return [piece for word in words for piece in self._cut(word, draws)]

    def _cut(self, word: list[int], draws: random.Random) -> list[int]:
        pieces = [character for number in word for character in self._characters(number)]
        while len(pieces) > 1:
            possible = [
                (*self._merges[pair], place)
                for place, pair in enumerate(pairwise(pieces))
                if pair in self._merges and draws.random() >= self.rate
            ]
            if not possible:
                break
            _, whole, place = min(possible)
            pieces[place : place + 2] = [whole]
        return pieces

    def _characters(self, number: int) -> Iterator[int]:
        """Yield the smallest pieces from which a piece is merged."""
        if number not in self._parts:
            yield number
            return
        for part in self._parts[number]:
            yield from self._characters(part)
