"""Batches by tokens: put pairs of similar length together, and pad them.

Shape legend: [sentences, source] and [sentences, target], lengths in tokens with `</s>`.

Lengths are rounded up to a multiple: 8 for tensor cores, 1 or 2 on CPUs, where padding costs more than it saves.
`training.arguments` chooses the multiple. The number of sentences in a batch is rounded down to the same multiple.
"""

import heapq
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..errors import UserError, number_of
from .sampling import Repeats

logger = logging.getLogger(__name__)

BatchBy = Literal["padded", "real"]
SPREAD = 8  # with `copies`, lengths are rounded up to this multiple at least; see `TokenBatchSampler`


class TokenBatchSampler:
    """Batches of pairs of similar length with at most `max_tokens` tokens, for `DataLoader(batch_sampler=…)`.

    As in the papers, a batch has sentences × max(longest source, longest target) tokens, padding included. With
    `batch_by="real"` padding does not count: the source tokens of a batch are at most `max_tokens`, and so are the
    target tokens. Every pair occurs exactly once an epoch, unless `copies` requires more.

    Pairs are sorted once, longest first, and cut into batches as large as `max_tokens` allows. In each epoch pairs are
    shuffled only among pairs with the same (rounded) lengths. So `set_epoch` changes which pairs share a batch, and
    the order of the batches. It never changes the number of batches or their shapes. The result depends only on `seed`
    and the epoch, and is the same on every rank. accelerate distributes the batches over the ranks.

    Args:
        source_lengths, target_lengths: tokens of each pair, `</s>` included.
        max_tokens: most tokens of a batch.
        seed: seed of the shuffling.
        batch_multiple: the number of batches is a multiple of this number (ranks × accumulation steps), so that every
            optimizer step has the same number of batches. To reach it, the largest batches are halved: nothing is
            repeated or dropped.
        length_multiple: lengths are rounded up to this multiple, as `TranslationCollator` pads them.
        batch_by: what `max_tokens` counts: "padded" or "real" tokens.
        shuffle: False gives the same batches in each epoch, longest first.
        copies: how often each pair is seen in an epoch on average, 1 or more; None: once. With 1.3, all pairs are seen
            once, and three in ten are seen twice; these are other pairs in each epoch. If a pair is seen more than
            once, lengths are rounded up to multiples of 8 or more. Without this rounding few pairs would have equal
            lengths, and the copies of a pair would share batches.

    Raises:
        UserError: a pair alone exceeds `max_tokens`, or there are too few pairs for a multiple of `batch_multiple`.
    """

    batch_size = None  # accelerate reads it: batch sizes vary, and accelerate must not change or drop batches
    drop_last = False

    def __init__(
        self,
        source_lengths: Sequence[int],
        target_lengths: Sequence[int],
        max_tokens: int,
        *,
        seed: int,
        batch_multiple: int = 1,
        length_multiple: int = 8,
        batch_by: BatchBy = "padded",
        shuffle: bool = True,
        copies: Sequence[float] | None = None,
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        multiple = counted_multiple(length_multiple, batch_by)
        source, target = (np.asarray(lengths, dtype=np.int64) for lengths in (source_lengths, target_lengths))
        width = round_up(np.maximum(source, target), multiple)
        if width.max() > max_tokens:
            row = int(width.argmax())
            longest = max(source_lengths[row], target_lengths[row])
            padded = f", {width[row]} when padded to a multiple of {multiple}" if width[row] > longest else ""
            raise UserError(
                f"the longest pair has {source_lengths[row]} source and {target_lengths[row]} target tokens{padded}: "
                f"more than training.max_tokens {max_tokens}. Raise max_tokens or lower data.max_length"
            )
        counted = multiple if copies is None or max(copies) == 1 else max(multiple, SPREAD)
        source, target = (np.minimum(round_up(lengths, counted), max_tokens) for lengths in (source, target))
        width = np.maximum(source, target)
        # Longest first. Pairs of one width are sorted from long source to long target, so that neighbours differ in
        # one side at a time and few batches mix lengths.
        self._order = np.lexsort((target - source, -width))
        self._repeats = None
        if copies is not None:
            self._repeats = Repeats(np.stack([source, target], axis=1), np.asarray(copies, dtype=np.float64))
            self._order = self._repeats.extend(self._order)
        source, target = source[self._order], target[self._order]
        self._cells = _runs(np.stack([source, target], axis=1))
        full = _full_by_padded if batch_by == "padded" else _full_by_real
        self._batches = _cut(full(source, target, max_tokens), batch_multiple, length_multiple)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the shuffle of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        if not self.shuffle:
            yield from (self._order[start:end].tolist() for start, end in self._batches)
            return
        random = np.random.default_rng([self.seed, self.epoch])
        order = self._order.copy() if self._repeats is None else self._repeats.draw(self._order, random)
        for start, end in self._cells:
            random.shuffle(order[start:end])
        for batch in random.permutation(len(self._batches)):
            start, end = self._batches[batch]
            yield order[start:end].tolist()


def round_up(lengths: np.ndarray | int, multiple: int) -> np.ndarray | int:
    """Round lengths up to a multiple, as they are padded."""
    return -(-lengths // multiple) * multiple


def counted_multiple(length_multiple: int, batch_by: BatchBy) -> int:
    """Return the multiple to which lengths are rounded up before they are counted."""
    return length_multiple if batch_by == "padded" else 1


def _full_by_padded(source: np.ndarray, target: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return for each pair the end of the largest batch that starts there. The longest pairs come first."""
    return np.arange(len(source)) + max_tokens // np.maximum(source, target)


def _full_by_real(source: np.ndarray, target: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return for each pair the end of the largest batch that starts there, where padding does not count.

    The end is the first pair with which one side exceeds `max_tokens`. The list is treated as if its last pair were
    repeated without end, so that the last batch is not rounded down to fewer sentences.
    """
    ends = []
    for lengths in (source, target):
        sums = np.cumsum(lengths)
        end = np.searchsorted(sums, sums - lengths + max_tokens, side="right")
        room = sums - lengths + max_tokens - sums[-1]
        ends.append(end + np.maximum(room, 0) // lengths[-1])
    return np.minimum(*ends)


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Return start and end of each run of equal rows."""
    cuts = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    return list(pairwise(bounds))


def _cut(full: np.ndarray, batch_multiple: int, sentence_multiple: int) -> list[tuple[int, int]]:
    """Cut pairs into batches (start, end); `full` has the end of the largest batch from each start.

    `TokenBatchSampler` describes the two multiples.
    """
    pairs, batches, start = len(full), [], 0
    while start < pairs:
        end = min(start + _round_down(int(full[start]) - start, sentence_multiple), pairs)
        batches.append((start, end))
        start = end
    missing = -len(batches) % batch_multiple
    if len(batches) + missing > pairs:
        raise UserError(
            f"{number_of(pairs, 'pair')} cannot make a multiple of {batch_multiple} batches, one for each process and "
            "accumulation step; give more data, or lower training.gradient_accumulation_steps or the number of "
            "processes"
        )
    heap = [(start - end, start, end) for start, end in batches]  # the largest first, then the longest sentences
    heapq.heapify(heap)
    for _ in range(missing):
        _, start, end = heapq.heappop(heap)
        middle = start + _round_down((end - start) // 2, sentence_multiple)
        heapq.heappush(heap, (start - middle, start, middle))
        heapq.heappush(heap, (middle - end, middle, end))
    return sorted((start, end) for _, start, end in heap)


def _round_down(sentences: int, multiple: int) -> int:
    """Round down to a multiple; leave a number below the multiple as it is."""
    return sentences - sentences % multiple if sentences > multiple else sentences


class TranslationCollator:
    """Pad encoded pairs on the right, and add the decoder's input.

    Returns `input_ids` and `attention_mask` [sentences, source]. Rows with labels also give `labels` and
    `decoder_input_ids` [sentences, target]. `labels` are padded with -100, which the loss ignores. `decoder_input_ids`
    are the labels shifted right by one. They begin with the row's `decoder_start`, else with `decoder_start_token_id`.
    Rows with a `posterior` give `posteriors` [sentences]. Other fields are left out.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, decoder_start_token_id: int, pad_to_multiple_of: int = 8
    ) -> None:
        self.pad_token_id = tokenizer.pad_token_id
        self.decoder_start_token_id = decoder_start_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict]) -> dict[str, torch.Tensor]:
        """Collate the rows of a batch."""
        sources = [row["input_ids"] for row in rows]
        lengths = torch.tensor([len(ids) for ids in sources])
        input_ids = self._pad(sources, self.pad_token_id)
        batch = {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        }
        if "labels" in rows[0]:
            targets = [row["labels"] for row in rows]
            starts = [row.get("decoder_start", self.decoder_start_token_id) for row in rows]
            shifted = [[start, *ids[:-1]] for start, ids in zip(starts, targets, strict=True)]
            batch["labels"] = self._pad(targets, -100)
            batch["decoder_input_ids"] = self._pad(shifted, self.pad_token_id)
        if "posterior" in rows[0]:
            batch["posteriors"] = torch.tensor([row["posterior"] for row in rows])
        return batch

    def _pad(self, lists: list[list[int]], value: int) -> torch.Tensor:
        width = round_up(max(map(len, lists)), self.pad_to_multiple_of)
        return torch.tensor([[*ids, *[value] * (width - len(ids))] for ids in lists])
