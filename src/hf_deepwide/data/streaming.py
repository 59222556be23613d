"""Token batches from a corpus that does not fit into memory, and the position of a run in this corpus."""

import logging
from collections.abc import Iterable, Iterator
from itertools import count, islice, repeat
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset

from ..errors import UserError
from .batches import BatchBy, TokenBatchSampler, counted_multiple, round_up

logger = logging.getLogger(__name__)


class StreamBatches(torch.utils.data.IterableDataset):
    """Token batches from an encoded stream: fill a buffer, batch it like `TokenBatchSampler`, and repeat.

    Only the buffer is in memory, and only the buffer is shuffled: pairs change places within it, and its batches have
    a random order. In each pass the first buffer has another random size, so that other pairs share a buffer. The
    files or shards of a stream change their order with each pass, too.

    Yields lists of rows, to be collated: `DataLoader(StreamBatches(…), batch_size=None, collate_fn=collator)`. It has
    no length, so train with `max_steps`. Each of several processes reads the whole stream and keeps every
    `world_size`-th batch. So do not pass the loader to `accelerator.prepare`, which would distribute the batches
    again. The order depends only on the seed, the epoch (`set_epoch`) and the stream.

    Args:
        dataset: a stream that `encode` returned.
        max_tokens, seed, length_multiple, batch_by: as for `TokenBatchSampler`.
        buffer_size: pairs that are held and sorted at a time.
        rank, world_size: the rank of this process, and the number of processes.
        batch_multiple: batches of an optimizer step, over all processes. The number of batches of each buffer is a
            multiple of it. So N processes have the same steps as one process with N times as many accumulation steps.
            None: `world_size`.
        max_length: most tokens of a side in `dataset`, if this is known.

    Raises:
        UserError: a pair of `max_length` tokens would exceed `max_tokens`.
    """

    def __init__(
        self,
        dataset: Iterable[dict],
        max_tokens: int,
        *,
        seed: int,
        buffer_size: int = 20_000,
        length_multiple: int = 8,
        batch_by: BatchBy = "padded",
        rank: int = 0,
        world_size: int = 1,
        batch_multiple: int | None = None,
        max_length: int | None = None,
    ):
        multiple = counted_multiple(length_multiple, batch_by)
        if max_length is not None and (width := round_up(max_length, multiple)) > max_tokens:
            padded = f", {width} when padded to a multiple of {multiple}" if width > max_length else ""
            raise UserError(
                f"data.streaming: a pair can have data.max_length {max_length} tokens{padded}: more than "
                f"training.max_tokens {max_tokens}. Raise max_tokens or lower max_length"
            )
        self.dataset = dataset
        self.max_tokens = max_tokens
        self.seed = seed
        self.buffer_size = buffer_size
        self.length_multiple = length_multiple
        self.batch_by = batch_by
        self.rank = rank
        self.world_size = world_size
        self.batch_multiple = batch_multiple or world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the shuffle of the next pass over the stream."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[dict]]:
        for _, batches in self.windows():
            yield from batches

    def windows(self, start: dict[str, Any] | None = None) -> Iterator[tuple[dict[str, Any], Iterator[list[dict]]]]:
        """Yield for each buffer its position, which `start` accepts, and the batches of this process."""
        stateful = isinstance(self.dataset, IterableDataset)
        window, state = (start["window"], start["dataset"]) if start else (0, None)
        if stateful:
            self.dataset.set_epoch(self.epoch)  # a state can be loaded only in its own epoch
            if state is not None:
                self.dataset.load_state_dict(state)
        rows = iter(self.dataset)
        while buffer := list(islice(rows, self._size(window))):
            yield {"window": window, "dataset": state}, self._batches(buffer, window)
            window, state = window + 1, self.dataset.state_dict() if stateful else None

    def _size(self, window: int) -> int:
        """Return how many pairs to read into a buffer: a multiple of `batch_multiple`.

        So a buffer always gives a multiple of `batch_multiple` batches. In the worst case each batch is a single pair.
        """
        size = self.buffer_size
        if window == 0:
            size = int(np.random.default_rng([self.seed, self.epoch]).integers(size - size // 2, size + 1))
        return round_up(size, self.batch_multiple)

    def _batches(self, buffer: list[dict], window: int) -> Iterator[list[dict]]:
        multiple = self.batch_multiple
        rest = len(buffer) % multiple
        if rest and round_up(len(self._sampler(buffer, 1)), multiple) > len(buffer):
            logger.info("left out %d pairs at the end of the stream, which do not make %d batches", rest, multiple)
            buffer = buffer[: len(buffer) - rest]
        if not buffer:
            return
        sampler = self._sampler(buffer, multiple)
        # One number for epoch and window is the epoch of the sampler; no stream has 2^32 windows.
        sampler.set_epoch((self.epoch << 32) + window)
        for number, batch in enumerate(sampler):
            if number % self.world_size == self.rank:
                yield [buffer[row] for row in batch]

    def _sampler(self, buffer: list[dict], batch_multiple: int) -> TokenBatchSampler:
        return TokenBatchSampler(
            [row["source_length"] for row in buffer],
            [row["target_length"] for row in buffer],
            self.max_tokens,
            seed=self.seed,
            batch_multiple=batch_multiple,
            length_multiple=self.length_multiple,
            batch_by=self.batch_by,
        )


class EndlessStream(torch.utils.data.IterableDataset):
    """An endless sequence of passes over a stream, which is one long epoch for the Trainer.

    A Trainer that resumes requests all batches from the first batch on, and discards the batches that it has seen. If
    `start` is an earlier `position`, the batches before it are empty lists, and nothing is read for them. A run may
    resume from a position with another number of processes. For this, each position is the start of a buffer. All
    buffers before it gave whole optimizer steps.

    Raises:
        UserError: a whole pass gives no batch.
    """

    def __init__(self, stream: StreamBatches) -> None:
        self.stream = stream
        self.start: dict[str, Any] | None = None
        self.position: dict[str, Any] | None = None  # of the buffer of the last batch
        self.epochs = 0.0  # passes so far; 0 within the first pass, whose length is unknown

    @property
    def epoch(self) -> int:
        """The pass of the last batch, counted from 0."""
        return self.stream.epoch

    def __iter__(self) -> Iterator[list[dict]]:
        start, processes = self.start or {}, self.stream.world_size
        then = start.get("processes", processes)  # the counts in a position are batches of one process
        given, begun, length = (
            number and number * then // processes for number in map(start.get, ("given", "begun", "length"))
        )
        given = given or 0
        begun = given if begun is None else begun
        yield from repeat([], given)
        for epoch in count(start.get("epoch", 0)):
            first = given
            self.stream.set_epoch(epoch)
            for state, batches in self.stream.windows(start.get("stream")):
                self.position = {
                    "given": given,
                    "begun": begun,  # batches before this pass
                    "length": length,  # batches of the previous pass
                    "processes": processes,
                    "epoch": epoch,
                    "stream": state,
                }
                for batch in batches:
                    given += 1
                    self.epochs = epoch + min((given - begun) / length, 1.0) if length else 0.0
                    yield batch
            if given == first:  # the next pass would not give a batch either
                raise UserError(
                    "the streamed training data give no batch: they hold fewer pairs than an update has batches "
                    "(processes × training.gradient_accumulation_steps), or all are left out, as one side is empty or "
                    "longer than data.max_length or data.max_length_ratio allow"
                )
            length = given - begun
            begun, start = given, {}
