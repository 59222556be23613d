"""Subword regularisation: training cuts a sentence into other pieces each time (Kudo 2018, arXiv 1804.10959).

A Unigram tokenizer has a probability p for each piece. The probability of a segmentation is the product over its
pieces, and the tokenizer takes the most probable segmentation. Training draws a segmentation x instead, among all
segmentations of a word (l = ∞ in the paper):

    P(x) is proportional to (p(x_1) ··· p(x_n)) ** alpha

With a small alpha all segmentations are almost equally likely. Validation, tests and inference take the most probable
segmentation.
"""

import math
import random
import re
from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .subword_collator import WORD_STARTS, check_marks, subword_model, words_of

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece that stands for a byte
KEPT = 2**17  # most words in the cache of lattices
LETTERS = 24  # longer words are not cached: a sentence without spaces is one word, and it rarely occurs again

# For each position in a word: cumulative probabilities of the pieces that end there, and their starts and ids.
Lattice = list[tuple[list[float], list[tuple[int, int]]]]


class UnigramSampling:
    """Replace token ids by the ids of other pieces of the same words.

    Args:
        tokenizer: a fast tokenizer whose model is Unigram.
        alpha: the power of the probabilities.

    Raises:
        UserError: the tokenizer has no probabilities of pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, alpha: float) -> None:
        model = subword_model(tokenizer)
        if model.get("type") != "Unigram":
            raise UserError(
                f"tokenizer.unigram_alpha is {alpha:g}, and the tokenizer, a {type(tokenizer).__name__}, has no "
                "probabilities of pieces; accepted: Unigram tokenizers of the library tokenizers, such as mBART's. "
                "For others set tokenizer.bpe_dropout"
            )
        vocabulary = model["vocab"]
        self._names = [piece for piece, _ in vocabulary]
        whole = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), model["unk_id"]}
        self._whole = whole | {number for number, piece in enumerate(self._names) if BYTE.fullmatch(piece)}
        starts = {number for number, piece in enumerate(self._names) if piece.startswith(WORD_STARTS)}
        check_marks(tokenizer, bool(starts), "unigram_alpha")
        self._starts = self._whole | starts
        self._pieces = {
            piece: (number, alpha * score)
            for number, (piece, score) in enumerate(vocabulary)
            if number not in self._whole
        }
        self._longest = max(map(len, self._pieces), default=0)
        self._lattices: dict[str, Lattice] = {}

    def __call__(self, ids: Sequence[int], draws: random.Random) -> list[int]:
        """Cut a sentence into pieces again, with random numbers from `draws`."""
        words = words_of(ids, self._starts, self._whole)
        return [piece for word in words for piece in self._cut(word, draws)]

    def _cut(self, word: list[int], draws: random.Random) -> list[int]:
        """Draw the last piece, then the piece before it, and so on."""
        if word[0] in self._whole:
            return word
        text = "".join(self._names[number] for number in word)
        lattice = self._lattices.get(text)
        if lattice is None:
            lattice = self._lattice(text)
            if len(self._lattices) >= KEPT:
                self._lattices.clear()
            if len(text) <= LETTERS:
                self._lattices[text] = lattice
        end, pieces = len(text), []
        while end:
            (end, number), *_ = draws.choices(lattice[end][1], cum_weights=lattice[end][0])
            pieces.append(number)
        return pieces[::-1]

    def _lattice(self, text: str) -> Lattice:
        """Return for each position the pieces that can end there, with cumulative probabilities.

        The probability of a piece is the sum over all segmentations up to its end that have it as their last piece.
        """
        logs, lattice = [0.0], [([], [])]  # logs: of the sums over all segmentations up to each end
        for end in range(1, len(text) + 1):
            pieces, scores = [], []
            for start in range(max(0, end - self._longest), end):
                found = self._pieces.get(text[start:end])
                if found is not None and logs[start] > -math.inf:
                    pieces.append((start, found[0]))
                    scores.append(logs[start] + found[1])
            largest = max(scores, default=-math.inf)
            cumulative = list(accumulate(math.exp(score - largest) for score in scores))
            logs.append(largest + math.log(cumulative[-1]) if cumulative else -math.inf)
            lattice.append((cumulative, pieces))
        return lattice
