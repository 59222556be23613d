"""BPE-dropout: in training a sentence is cut into other pieces each time (Provilkov et al. 2020, arXiv 1910.13267).

BPE joins pieces, the most frequent pair first. With dropout each possible merge is left out with a probability, anew
before each merge (algorithm 1 there). So the model sees a word in several segmentations, and its rarer pieces more
often. Validation, tests and all use of the model cut words without dropout.
"""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .batches import TranslationCollator

WORD_STARTS = ("▁", "Ġ")  # marks of a space, of Metaspace and of byte-level BPE


class BPEDropout:
    """Cuts token ids into other pieces of the same words.

    Args:
        tokenizer: a fast tokenizer whose model is BPE.
        rate: p, the probability that a merge is left out: 0 gives back all ids, 1 gives single characters.

    Raises:
        UserError: the tokenizer has no merges.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rate: float) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        model = {} if backend is None else json.loads(backend.to_str())["model"]
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
        self._starts = whole | {number for piece, number in vocabulary.items() if piece.startswith(WORD_STARTS)}
        self._ends = whole | {number for piece, number in vocabulary.items() if suffix and piece.endswith(suffix)}

    def __call__(self, ids: Sequence[int], draws: random.Random) -> list[int]:
        """Cut a sentence anew, with random numbers from `draws`."""
        return [piece for word in self._words(ids) for piece in self._cut(word, draws)]

    def _words(self, ids: Sequence[int]) -> Iterator[list[int]]:
        """The ids of each word; a special token is a word."""
        word: list[int] = []
        for number in ids:
            if word and (number in self._starts or word[-1] in self._ends):
                yield word
                word = []
            word.append(number)
        if word:
            yield word

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
        """The smallest pieces that a piece is merged from."""
        if number not in self._parts:
            yield number
            return
        for part in self._parts[number]:
            yield from self._characters(part)


class BPEDropoutCollator(TranslationCollator):
    """Cuts the pairs of a batch anew, and pads them.

    How follows from the batch, the seed and the epoch, and not from random numbers drawn before: a run that is resumed
    sees the same pieces. A sentence that would get longer than `max_length` stays as it is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        decoder_start_token_id: int,
        pad_to_multiple_of: int,
        *,
        rate: float,
        seed: int,
        max_length: int,
    ) -> None:
        super().__init__(tokenizer, decoder_start_token_id, pad_to_multiple_of)
        self.dropout = BPEDropout(tokenizer, rate)
        self.seed, self.max_length = seed, max_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Other pieces in each epoch."""
        self.epoch = epoch

    def __call__(self, rows: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Collate the rows of a batch."""
        content = json.dumps([[row["input_ids"], row["labels"]] for row in rows])
        draws = random.Random(zlib.crc32(content.encode(), zlib.crc32(f"{self.seed} {self.epoch}".encode())))
        return super().__call__(
            [{**row, **{side: self._cut(row[side], draws) for side in ("input_ids", "labels")}} for row in rows]
        )

    def _cut(self, ids: list[int], draws: random.Random) -> list[int]:
        pieces = self.dropout(ids, draws)
        return pieces if len(pieces) <= self.max_length else ids
