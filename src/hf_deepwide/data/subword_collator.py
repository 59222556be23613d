"""Batches in which each epoch cuts the words of a sentence into other pieces."""

import json
import random
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from .batches import TranslationCollator

WORD_STARTS = ("▁", "Ġ")  # marks for a space in Metaspace and in byte-level BPE
Cut = Callable[[Sequence[int], random.Random], list[int]]  # (token ids, random numbers) -> other token ids


class SubwordCollator(TranslationCollator):
    """Cut the pairs of a batch into other pieces, and pad them.

    The pieces depend only on the batch, the seed and the epoch, and not on earlier random numbers. So a resumed run
    has the same pieces. A sentence that would become longer than `max_length` stays as it is.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        decoder_start_token_id: int,
        pad_to_multiple_of: int,
        *,
        cut: Cut,
        seed: int,
        max_length: int,
    ) -> None:
        super().__init__(tokenizer, decoder_start_token_id, pad_to_multiple_of)
        self.cut, self.seed, self.max_length = cut, seed, max_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; each epoch has other pieces."""
        self.epoch = epoch

    def __call__(self, rows: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Collate the rows of a batch."""
        content = json.dumps([[row["input_ids"], row["labels"]] for row in rows])
        draws = random.Random(zlib.crc32(content.encode(), zlib.crc32(f"{self.seed} {self.epoch}".encode())))
        return super().__call__(
            [{**row, **{side: self._cut(row[side], draws) for side in ("input_ids", "labels")}} for row in rows]
        )

    def _cut(self, ids: list[int], draws: random.Random) -> list[int]:
        pieces = self.cut(ids, draws)
        return pieces if len(pieces) <= self.max_length else ids


def check_marks(tokenizer: PreTrainedTokenizerBase, marked: bool, key: str) -> None:
    """Check that the tokenizer has pieces that mark where a word starts or ends: else pieces would join across words.

    Args:
        tokenizer: the tokenizer, for the message.
        marked: whether it has such pieces.
        key: the key of the recipe that needs them, for the message.

    Raises:
        UserError: the tokenizer has no such pieces.
    """
    if not marked:
        raise UserError(
            f"tokenizer.{key}: no piece of the tokenizer, a {type(tokenizer).__name__}, marks where a word starts or "
            f"ends; accepted: tokenizers that mark it (▁, Ġ, or an end such as </w>). Leave {key} out"
        )


def words_of(ids: Sequence[int], starts: Container[int], ends: Container[int]) -> Iterator[list[int]]:
    """Yield the ids of each word, given the ids with which a word can start or end."""
    word: list[int] = []
    for number in ids:
        if word and (number in starts or word[-1] in ends):
            yield word
            word = []
        word.append(number)
    if word:
        yield word


def subword_model(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the JSON of the model of a tokenizer from the library tokenizers; {} for any other tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {} if backend is None else json.loads(backend.to_str())["model"]
