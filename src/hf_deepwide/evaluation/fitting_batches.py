"""Batches of sentences, the longest first. They become smaller if memory runs out."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache

from ..device_memory import is_out_of_memory
from ..errors import UserError
from ..models.plain_text import sorted_batches
from .arguments import EvaluationArguments

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def in_fitting_batches(
    compute: Callable[[list[int]], Result],
    lengths: Sequence[int],
    args: EvaluationArguments,
    limits: Sequence[int] | None = None,
) -> Iterator[tuple[list[int], Result]]:
    """Yield batches of sentences, each as a list of sentence indices, with the result of `compute`.

    If memory runs out, `args.max_tokens` is lowered to half the size of the batch that did not fit, with a warning.
    The lower value stays in `args`, so that a later call with the same `args` begins with it.

    Args:
        compute: a function that receives the indices of a batch's sentences. The result for a sentence must not depend
            on its batch.
        lengths: tokens of each sentence.
        args: its `max_tokens` is the most tokens of a batch, padding included. A longer sentence is a batch alone.
        limits: a number for each sentence. A batch only has sentences with the same number.

    Raises:
        UserError: a single sentence does not fit into memory.
    """
    left = list(range(len(lengths)))
    while left:
        done = set()
        their_limits = None if limits is None else [limits[number] for number in left]
        for places in sorted_batches([lengths[number] for number in left], args.max_tokens, limits=their_limits):
            batch = [left[place] for place in places]
            try:
                result = compute(batch)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                _lower(args, len(batch), lengths[batch[0]], error)
                break
            yield batch, result
            done.update(batch)
        else:
            return
        # after the `except` block: the error and its traceback no longer hold the tensors of the batch
        clear_device_cache(garbage_collection=True)
        left = [number for number in left if number not in done]


def _lower(args: EvaluationArguments, rows: int, width: int, error: RuntimeError) -> None:
    """Halve `args.max_tokens` relative to a batch of `rows` sentences of up to `width` tokens, and log a warning."""
    if rows == 1:
        raise UserError(
            f"memory ran out on one sentence of {width:,} tokens. Search with fewer beams (num_beams is "
            f"{args.num_beams}), shorten the sentence, take a smaller model, or compute on a CPU"
        ) from error
    args.max_tokens = rows * width // 2
    logger.warning(
        "memory ran out on a batch of %d sentences of up to %d tokens. From here on a batch has at most %d tokens "
        "(max_tokens)",
        *(rows, width, args.max_tokens),
    )
