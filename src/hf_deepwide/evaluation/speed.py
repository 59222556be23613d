"""How fast a model translates and trains: medians of repeated runs, after a warm-up."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UserError
from .translate import EvaluationArguments, generate_ids


def median_seconds(
    run: Callable[[], object], *, repeats: int = 5, warmup: int = 1, device: torch.device | str = "cpu"
) -> float:
    """Median wall-clock seconds of one call of `run`, its work on `device` included.

    The median, because a run that another process disturbs is only ever slower.
    """
    if repeats < 1:
        raise UserError(f"repeats: {repeats}; accepted: 1 or more")
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def translation_speed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    args: EvaluationArguments,
    *,
    repeats: int = 3,
    warmup: int = 1,
) -> dict[str, float]:
    """Speed of `translate` on these sources, tokenisation and batching included.

    Returns:
        `{"seconds", "sentences_per_second", "tokens_per_second"}`: the median time for all sources, and what
        it makes; tokens are generated ones, the end of sentence included.
    """
    if not sources:
        raise UserError("translation speed: no sentences were given")
    outputs: list[list[int]] = []

    def run() -> None:
        outputs[:] = generate_ids(model, tokenizer, sources, args)

    seconds = median_seconds(run, repeats=repeats, warmup=warmup, device=model.device)
    return {
        "seconds": seconds,
        "sentences_per_second": len(sources) / seconds,
        "tokens_per_second": sum(map(len, outputs)) / seconds,
    }


def training_step_seconds(
    model: PreTrainedModel,
    batch: Mapping[str, torch.Tensor],
    *,
    repeats: int = 5,
    warmup: int = 2,
    autocast: torch.dtype | None = None,
) -> float:
    """Median seconds of forward and backward pass on one batch, without the optimiser.

    Args:
        model: a model whose forward returns a loss for this batch. It is measured in training mode; weights
            stay as they are and gradients are cleared.
        batch: input_ids [batch, source], labels [batch, target] and whatever else the model's forward takes.
        repeats: measured steps.
        warmup: steps before them.
        autocast: the dtype of an autocast, None for none.
    """
    training = model.training
    on_device = {name: value.to(model.device) for name, value in batch.items()}

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            loss = model(**on_device).loss
        loss.backward()

    model.train()
    try:
        return median_seconds(run, repeats=repeats, warmup=warmup, device=model.device)
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)


def _synchronize(device: torch.device | str) -> None:
    """Wait for the device's queue: without it a GPU's time is that of launching the work."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)
