"""A step in which numbers went wrong, computed again from what `faults.py` saved."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from ..errors import UserError
from ..loading import load_config, load_model, load_tokenizer
from ..models.modeling_base import DeepWidePreTrainedModel
from .arguments import TranslationTrainingArguments
from .faults import FAULT, nonfinite_gradients
from .trainer import TranslationTrainer


@dataclass
class Replay:
    """What came out.

    Args:
        losses: of each batch, as the trainer summed them.
        parameters: those whose gradient is not finite after the last batch.
        module: the first module of the model whose output is not finite, or None.
        sentences: number of the batch and the row in it of each pair whose own loss, without dropout, is not finite.
    """

    losses: list[float]
    parameters: list[str]
    module: str | None
    sentences: list[tuple[int, int]]


def replay(folder: str | Path, rank: int = 0, device: str = "cpu") -> Replay:
    """Compute the batches of one process again: same weights, same random numbers, same precision, no update.

    Raises:
        UserError: the folder holds no fault, or nothing of that process.
    """
    folder = Path(folder)
    report = read_fault(folder)
    batches = read_batches(folder, rank)
    told = report["arguments"]
    args = TranslationTrainingArguments(
        output_dir=str(folder),
        use_cpu=device == "cpu",
        bf16=False,  # autocast is entered below, as a CPU can compute in fp16, too
        eval_strategy="no",
        load_best_model_at_end=False,
        label_smoothing_factor=told["label_smoothing_factor"],
    )
    masked = load_config(folder).architectures[0].endswith("ForMaskedLM")
    model_class = AutoModelForMaskedLM if masked else AutoModelForSeq2SeqLM
    model = load_model(model_class, folder, attn_implementation=told["attn_implementation"], accept_nonfinite=True)
    model.to(device).train()
    for module in model.modules():
        if isinstance(module, DeepWidePreTrainedModel):
            module.training_step = report["step"] - 1
    trainer = TranslationTrainer(model, args, load_tokenizer(folder), data_collator=list)
    dtype = torch.float16 if told["fp16"] else torch.bfloat16
    autocast = torch.autocast(device, dtype, enabled=told["fp16"] or told["bf16"])
    tokens = report["num_items_in_batch"]  # of all processes, whose gradients are averaged: hence the factor below

    losses, alone = [], []
    with torch.random.fork_rng([device] if device == "cuda" else []), first_nonfinite(model) as found:
        for inputs, generators in batches:
            restore(generators, device)
            with autocast:
                loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=tokens) * report["processes"]
            (loss * report["loss_scale"]).backward()
            losses.append(loss.item())
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
    """`fault.json`."""
    if not (folder / FAULT).is_file():
        raise UserError(f"{folder} holds no {FAULT}; give a folder faults/step-… of a run")
    return json.loads((folder / FAULT).read_text(encoding="utf-8"))


def read_batches(folder: Path, rank: int) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Inputs of each batch of a process, and the generators before it, in order."""
    path = folder / f"rank-{rank}.safetensors"
    if not path.is_file():
        known = ", ".join(sorted(other.stem.removeprefix("rank-") for other in folder.glob("rank-*.safetensors")))
        raise UserError(f"{folder} holds nothing of process {rank}; accepted: {known}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error})") from error
    batches: dict[int, tuple[dict, dict]] = {}
    for key, tensor in tensors.items():
        number, part, name = key.split(".", 2)
        batches.setdefault(int(number), ({}, {}))[part == "generators"][name] = tensor
    return [batches[number] for number in sorted(batches)]


def restore(generators: dict[str, torch.Tensor], device: str) -> None:
    """Put the random generators where they were."""
    torch.set_rng_state(generators["cpu"])
    if device == "cuda" and "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])


@contextmanager
def first_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """While it is open, collects the modules whose output is not finite, in the order in which they end."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and not first.isfinite().all():
                found.append(name)

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
