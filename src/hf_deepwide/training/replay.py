"""The replay of a step with non-finite numbers, from the files that `faults.py` saved."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedConfig

from ..errors import UserError, one_line, quote
from ..families import count_posteriors
from ..loading import auto_class, load_model, load_tokenizer
from ..models.plain_text import positions
from ..models.pretrained_model import DeepWidePreTrainedModel
from ..reading import read_json
from .arguments import TranslationTrainingArguments
from .faults import FAULT, REPLAYED, nonfinite_gradients, restore
from .out_of_memory import split
from .trainer import TokenBatchTrainer


@dataclass
class Replay:
    """The result of a replay.

    Args:
        losses: the loss of each batch, as the trainer summed them.
        parameters: the parameters whose gradient is not finite after the last batch.
        module: the first module of the model whose output is not finite, or None.
        sentences: (batch, row), both from 0, of each pair whose own loss, without dropout, is not finite.
    """

    losses: list[float]
    parameters: list[str]
    module: str | None
    sentences: list[tuple[int, int]]


def replay(folder: str | Path, rank: int = 0, device: str = "cpu") -> Replay:
    """Compute the batches of one process again: same weights, same random numbers, same precision, no update.

    Dropout draws the same numbers as in the run only on the same kind of device: a fault on a GPU needs `device` cuda.
    Even there it draws other numbers in two cases: with `lora_dropout`, and if memory ran out after a part of a batch
    was computed.

    Raises:
        UserError: the folder holds no fault or no batches of that process, or its files do not fit together.
    """
    folder = Path(folder)
    report = read_fault(folder)
    batches = read_batches(folder, rank, report)
    # None if the run computed no batch in parts, or if an older version saved the fault
    largest_batches = [batch.get("largest_batch") for batch in report["batches"] if batch["rank"] == rank]
    arguments = report["arguments"]
    args = TranslationTrainingArguments(
        output_dir=str(folder),
        use_cpu=device == "cpu",
        bf16=False,  # autocast is entered below, because a CPU can compute in fp16, too
        eval_strategy="no",
        load_best_model_at_end=False,
        label_smoothing_factor=arguments["label_smoothing_factor"],
    )
    options = {"attn_implementation": arguments["attn_implementation"], "accept_nonfinite": True}
    model = load_model(auto_class(folder), folder, **options)
    model.to(device).train()
    check_indices(folder, batches, model.config)
    for module in model.modules():
        if isinstance(module, DeepWidePreTrainedModel):
            module.training_step = report["step"] - 1
    trainer = TokenBatchTrainer(model, args, load_tokenizer(folder), data=None, data_collator=list)
    dtype = torch.float16 if arguments["fp16"] else torch.bfloat16
    autocast = torch.autocast(device, dtype, enabled=arguments["fp16"] or arguments["bf16"])
    tokens = report["num_items_in_batch"]  # of all processes; their gradients are averaged, hence the factor below

    losses, alone = [], []
    with torch.random.fork_rng([device] if device == "cuda" else []), first_nonfinite(model) as found:
        for (inputs, generators), largest in zip(batches, largest_batches, strict=True):
            restore(generators, device)
            loss = 0.0
            for part in split(inputs, largest):
                with autocast:
                    part_loss = (
                        trainer.compute_loss(model, dict(part), num_items_in_batch=tokens) * report["processes"]
                    )
                (part_loss * report["loss_scale"]).backward()
                loss += part_loss.item()
            losses.append(loss)
    names = nonfinite_gradients(model)
    model.eval()
    with torch.no_grad(), autocast:
        for number, (inputs, _) in enumerate(batches):
            for row in range(len(inputs["labels"])):
                one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
                if not trainer.compute_loss(model, one).isfinite():
                    alone.append((number, row))
    return Replay(losses, names, found[0] if found else None, alone)


def read_fault(folder: Path) -> dict[str, Any]:
    """Return the content of `fault.json`.

    Raises:
        UserError: the file is missing, or it is not what a run writes.
    """
    path = folder / FAULT
    if not path.is_file():
        raise UserError(f"{folder} holds no {FAULT}; give a folder faults/step-… of a run")
    try:
        report = read_json(path)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error
    if problem := _problem(report):
        raise UserError(f"{path} is not what a run writes at a fault: {problem}")
    return report


def _problem(report: Any) -> str | None:
    """Return what is wrong with the report of a fault, or None."""
    if not isinstance(report, dict):
        return f"it holds {quote(report)}, not an object with fields"
    arguments = report.get("arguments")
    values = {**(arguments if isinstance(arguments, dict) else {}), **report}
    for name, (is_right, expected) in FIELDS.items():
        if name not in values:
            return f"there is no {name}"
        if not is_right(values[name]):
            return f"{name} is {quote(values[name])}; expected is {expected}"
    for number, batch in enumerate(report["batches"], start=1):
        pairs = batch.get("sentences") if isinstance(batch, dict) and _is_count(batch.get("rank"), 0) else None
        if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
            return f"batch {number} has no rank, or no list of sentences with source and target"
        if (largest := batch.get("largest_batch")) is not None and not _is_count(largest, 1):
            return f"batch {number} has the largest_batch {quote(largest)}; expected is a whole number, or null"
    return None


def _is_pair(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(side), str) for side in ("source", "target"))


def _is_count(value: Any, smallest: int) -> bool:
    return type(value) is int and smallest <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN


# The fields of a report and of its `arguments` that a replay uses. Each has a test, and the accepted values in words.
FIELDS = {
    "step": (lambda value: _is_count(value, 1), "a whole number from 1"),
    "what": (lambda value: isinstance(value, str), "text"),
    "loss_scale": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "num_items_in_batch": (lambda value: value is None or _is_count(value, 1), "a whole number from 1, or null"),
    "processes": (lambda value: _is_count(value, 1), "a whole number from 1"),
    "arguments": (lambda value: isinstance(value, dict), f"an object with {', '.join(REPLAYED)}"),
    "batches": (lambda value: isinstance(value, list), "a list"),
    "label_smoothing_factor": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "bf16": (lambda value: isinstance(value, bool), "true or false"),
    "fp16": (lambda value: isinstance(value, bool), "true or false"),
    "attn_implementation": (lambda value: isinstance(value, str), "text"),
}


def read_batches(
    folder: Path, rank: int, report: dict[str, Any]
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return, in order, the inputs of each batch of a process and the generator states before the batch.

    Raises:
        UserError: there are no batches of that process, or the file is damaged or does not belong to the report.
    """
    path = folder / f"rank-{rank}.safetensors"
    if not path.is_file():
        known = ", ".join(sorted(other.stem.removeprefix("rank-") for other in folder.glob("rank-*.safetensors")))
        raise UserError(f"{folder} holds nothing of process {rank}; accepted: {known}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({one_line(error)})") from error
    batches: dict[int, tuple[dict, dict]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(r"([0-9]{1,9})\.(inputs|generators)\.(\w+)", key)
        if match is None:
            raise UserError(f"{path} is not what a run writes at a fault: it holds a tensor {quote(key)}")
        batches.setdefault(int(match[1]), ({}, {}))[match[2] == "generators"][match[3]] = tensor
    ordered = [batches[number] for number in sorted(batches)]
    rows = [len(batch["sentences"]) for batch in report["batches"] if batch["rank"] == rank]
    if len(rows) != len(ordered):
        raise UserError(f"{path} holds {len(ordered)} batches, and {folder / FAULT} tells of {len(rows)}")
    for number, ((inputs, generators), count) in enumerate(zip(ordered, rows, strict=True), start=1):
        if problem := _batch_problem(inputs, generators, count):
            raise UserError(f"{path}, batch {number}: {problem}")
    return ordered


def _batch_problem(inputs: dict[str, torch.Tensor], generators: dict[str, torch.Tensor], rows: int) -> str | None:
    """Return what is wrong with the tensors of a batch that should have `rows` rows, or None."""
    for name in ("input_ids", "attention_mask", "labels"):
        if name not in inputs:
            return f"there is no {name}"
    for name, tensor in inputs.items():
        dimensions = 1 if name == "posteriors" else 2
        if tensor.dtype != torch.int64 or tensor.ndim != dimensions or 0 in tensor.shape or len(tensor) != rows:
            return f"{name} is {tensor.dtype} of the shape {list(tensor.shape)}; expected are int64 in {rows} rows"
    for one, other in (("input_ids", "attention_mask"), ("labels", "decoder_input_ids")):
        if other in inputs and inputs[one].shape != inputs[other].shape:
            return f"{one} and {other} have different shapes"
    state = torch.get_rng_state()
    if "cpu" not in generators or generators["cpu"].shape != state.shape or generators["cpu"].dtype != state.dtype:
        return "there is no state of the random generator that torch knows"
    return None


def check_indices(folder: Path, batches: Sequence[tuple[dict, dict]], config: PreTrainedConfig) -> None:
    """Check that the saved model has the tokens of the batches, and accepts sentences of their lengths.

    Raises:
        UserError: the batches do not fit the model.
    """
    decoder_size = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    ranges = {  # the lowest index, and the first index that is too large
        "input_ids": (0, config.vocab_size),
        "labels": (-100, decoder_size),  # the loss ignores labels of -100
        "decoder_input_ids": (0, decoder_size),
        "posteriors": (0, count_posteriors(config)),
    }
    longest = positions(config) or math.inf
    for inputs, _ in batches:
        for name in inputs.keys() & ranges.keys():
            lowest, count = ranges[name]
            indices = inputs[name]
            if indices.min() < lowest or indices.max() >= count:
                raise UserError(
                    f"{folder}: its batches do not fit its model: {name} are from {indices.min()} to {indices.max()}, "
                    f"and the model knows {count}"
                )
            if indices.ndim == 2 and indices.shape[1] > longest:
                raise UserError(
                    f"{folder}: its batches do not fit its model: {name} are {indices.shape[1]} long, and the model "
                    f"reads {longest}"
                )


@contextmanager
def first_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """Collect in the block the modules whose output is not finite, in the order in which they finish.

    The hook is global. With a hook on each module, projections would be called one by one, and round differently.
    """
    found: list[str] = []
    names = {module: name for name, module in model.named_modules() if name}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if module in names and isinstance(first, torch.Tensor) and not first.isfinite().all():
            found.append(names[module])

    handle = register_module_forward_hook(look)
    try:
        yield found
    finally:
        handle.remove()
