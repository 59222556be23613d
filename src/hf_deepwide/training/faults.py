"""Non-finite numbers: a loss or gradient that is not finite is caught in its step, before the optimizer uses it.

Each optimizer step adds the losses of its batches and the norm of its gradient to one number, over all processes. If
this number is not finite, all processes detect it in the same step. The evidence is then written to the folder
`faults/step-<number>` of the run, and the run either stops or leaves the step out:

    fault.json              what was wrong: step, losses, parameters; the sentences of every batch as text
    rank-<r>.safetensors    the batches of each process, and the random generators before each of them
    model.safetensors, …    model and tokenizer as they were before the step, for `from_pretrained`

`replay.py` computes the step again from these files.

Under fp16, an overflow of scaled gradients is not a fault: the scaler leaves the step out and halves the scale. An
overflow is a fault if the loss scale is already below 1: the scale has collapsed.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from ..durable import Writing, discard, write_whole
from ..errors import UserError, number_of, quote
from ..models.word_tokenizer import WordTokenizer

if TYPE_CHECKING:
    from .trainer import TokenBatchTrainer

logger = logging.getLogger(__name__)

FAULTS, FAULT = "faults", "fault.json"
KEPT = 5  # faults that a run saves; later faults are only logged, except a fault that stops the run
NAMED = 3  # parameters that a message names
LOWEST_SCALE = 1.0  # below it the loss is scaled down, and if its gradients still overflow, the scale has collapsed
REPLAYED = ("label_smoothing_factor", "bf16", "fp16", "attn_implementation")  # arguments that a replay needs


class NonFiniteError(UserError):
    """Training stopped at a loss or gradient that is not finite, or at a collapsed loss scale."""

    status = 3  # the exit status, which distinguishes divergence from a user's mistake


@dataclass
class FaultArguments:
    """The training arguments that `FaultGuard` reads.

    Raises:
        ValueError: a value is out of range (raised by `check_faults`).
    """

    on_nonfinite: str = field(
        default="stop",
        metadata={
            "help": "What to do when a loss or gradient is not finite: stop, or skip the step. Either way its batches "
            "are saved to faults/ in the run's folder."
        },
    )
    max_skipped: int = field(
        default=10,
        metadata={"help": "With on_nonfinite: skip, stop nevertheless after so many skipped steps in a row."},
    )

    def check_faults(self) -> None:
        """Check that `on_nonfinite` is one of the two accepted values."""
        if self.on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite is {quote(self.on_nonfinite)}; accepted: stop, skip")


@dataclass
class Batch:
    """One batch of a step: the model's inputs, the states of the random generators before it, and its loss.

    A batch of more than `largest` tokens was computed in parts.
    """

    inputs: Mapping[str, torch.Tensor]
    generators: dict[str, torch.Tensor]
    loss: torch.Tensor | None = None
    largest: int | None = None


class FaultGuard:
    """The check that decides whether an optimizer step is made. Its arguments are `FaultArguments`.

    A step that is left out changes neither weights nor optimizer, but the schedule goes on. The log then shows the
    mean loss of the other steps, and the number of `skipped_steps`.

    Args:
        trainer: the trainer, whose model, arguments and state it looks at.
    """

    def __init__(self, trainer: "TokenBatchTrainer") -> None:
        self.trainer = trainer
        self._batches: list[Batch] = []  # of the current step
        self._steps = self._skipped = 0  # since the last log
        self._all_steps = self._all_skipped = 0  # since training began or was resumed
        self._in_a_row = 0

    def begin(self, inputs: Mapping[str, torch.Tensor]) -> Batch:
        """Record a batch before anything is computed from it. The caller sets its `loss` later."""
        return Batch(inputs, generator_states(self.trainer.args.device))

    def judge(self, batch: Batch, tokens: torch.Tensor | int | None) -> torch.Tensor:
        """Decide after the last batch of an optimizer step whether the step is made.

        Returns:
            The loss that the Trainer adds to its sum for the log. It is always finite, and 0 in sum over the batches
            of a step that is left out, because the sum cannot be corrected later.

        Raises:
            NonFiniteError: the step must not be made, and the run must stop.
        """
        self._batches.append(batch)
        counted = batch.loss.nan_to_num(0.0, 0.0, 0.0)
        if not self.trainer.accelerator.sync_gradients:
            return counted
        batches, self._batches = self._batches, []
        self._steps += 1
        self._all_steps += 1
        if self._is_finite(batches):
            self._in_a_row = 0
        elif self._is_fault(batches, tokens):
            self._leave_out()
            return -sum(other.loss.nan_to_num(0.0, 0.0, 0.0) for other in batches[:-1]) + 0 * counted
        return counted

    def amend(self, logs: dict[str, float]) -> None:
        """Turn `loss` (since the last log) and `train_loss` (whole training) into means over the steps made."""
        if "train_loss" in logs and self._all_skipped:
            made = self._all_steps - self._all_skipped
            logs["train_loss"] = logs["train_loss"] * self._all_steps / made if made else math.nan
        if "loss" not in logs:
            return
        if self._skipped:
            made = self._steps - self._skipped
            logs["loss"] = logs["loss"] * self._steps / made if made else math.nan
            logs["skipped_steps"] = self._skipped
        self._steps = self._skipped = 0

    def _is_finite(self, batches: Sequence[Batch]) -> bool:
        """Return True if this step's losses and gradients are finite on all processes. Wait for the device once."""
        trainer = self.trainer
        norm = torch.nn.utils.get_total_norm([gradient for _, gradient in gradients(trainer.model)])
        total = sum((batch.loss.float() for batch in batches), norm.to(trainer.args.device)).reshape(1)
        return math.isfinite(trainer.accelerator.reduce(total, "sum").item())

    def _is_fault(self, batches: Sequence[Batch], tokens: torch.Tensor | int | None) -> bool:
        """Return False if the scaler of fp16 handles the step. Otherwise report and save the step, and return True.

        All processes call this together, and get the same answer.
        """
        trainer, state, args = self.trainer, self.trainer.state, self.trainer.args
        scaler = trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        losses = gather_object([[batch.loss.item() for batch in batches]])
        collapsed = scaler is not None and all(math.isfinite(loss) for own in losses for loss in own)
        if collapsed and scale >= LOWEST_SCALE:
            return False
        self._in_a_row += 1
        names = nonfinite_gradients(trainer.model)
        step = state.global_step + 1
        stops = collapsed or args.on_nonfinite == "stop" or self._in_a_row > args.max_skipped
        if collapsed:
            what = f"the loss scale collapsed to {scale:g}: gradients overflow fp16 however little they are scaled"
        else:
            what = describe(losses, names, sum(1 for _ in trainer.model.parameters()))
        report = {
            "step": step,
            "epoch": state.epoch,
            "what": what,
            "loss_scale": scale,
            "parameters": names,
            "num_items_in_batch": None if tokens is None else int(tokens),
            "processes": args.world_size,
            "arguments": {name: getattr(args, name) for name in REPLAYED},
        }
        saved = self._save_fault(report, batches, stops)
        message = f"step {step} (epoch {state.epoch or 0:.2f}): {what}. {saved}"
        if not stops:
            logger.warning("%s The step is left out", message)
            return True
        if self._in_a_row > args.max_skipped:
            message += f" That makes {self._in_a_row} steps in a row; training.max_skipped is {args.max_skipped}."
        raise NonFiniteError(f"{message} {remedy(collapsed, args.on_nonfinite)}")

    def _leave_out(self) -> None:
        """Remove the gradients, so that the optimizer does nothing. A scaler needs some: set them to NaN."""
        self._skipped += 1
        self._all_skipped += 1
        for parameter in self.trainer.model.parameters():
            if self.trainer.accelerator.scaler is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.fill_(math.nan)

    def _save_fault(self, report: dict[str, Any], batches: Sequence[Batch], always: bool) -> str:
        """Write the fault to the run's folder, and return where, or why not, in words. All processes call this."""
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        folder = Path(args.output_dir, FAULTS, f"step-{report['step']}")
        own = [
            {
                "rank": args.process_index,
                "loss": str(batch.loss.item()),
                "largest_batch": batch.largest,
                "sentences": sentences,
            }
            for batch in batches
            for sentences in [texts(batch.inputs, trainer.processing_class)]
        ]
        report["batches"] = [batch for rank_batches in gather_object([own]) for batch in rank_batches]
        pairs = number_of(sum(len(batch["sentences"]) for batch in report["batches"]), "sentence pair")
        others = [path for path in folder.parent.glob("step-*") if path != folder]
        skip = gather_object([len(others) >= KEPT and not always])[0]
        if skip:
            return f"The batches ({pairs}) are not saved, as {folder.parent} holds {KEPT} faults already."
        if trainer.lora.begun:
            weights = trainer.lora.merged_weights()
        else:
            weights = accelerator.get_state_dict(trainer.model_wrapped)  # if sharded, a process has only a part
        with Writing(folder) as writing:
            if args.should_save:
                discard(folder)
        accelerator.wait_for_everyone()
        with writing:
            folder.mkdir(parents=True, exist_ok=True)
            save_batches(batches, folder / f"rank-{args.process_index}.safetensors")
            if args.should_save:
                accelerator.unwrap_model(trainer.model_wrapped).save_pretrained(folder, state_dict=weights)
                trainer.processing_class.save_pretrained(folder)
                text = json.dumps(report, indent=2, ensure_ascii=False)
                write_whole(folder / FAULT, text + "\n")  # last: a fault is whole if it has this file
        if writing.why is not None:  # no error is raised: the fault is more important than the failed saving
            return f"The batches ({pairs}) could not be saved to {folder} ({writing.why})."
        return f"The batches ({pairs}) are in {folder}; `hf-deepwide replay {folder}` shows where it begins."


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators that dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore(generators: Mapping[str, torch.Tensor], device: str) -> None:
    """Set the random generators to the given states."""
    torch.set_rng_state(generators["cpu"])
    if device == "cuda" and "cuda" in generators:
        torch.cuda.set_rng_state(generators["cuda"])


def gradients(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return name and gradient of each parameter with a gradient. Of a sharded gradient: the part of this process."""
    return [
        (name, parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    ]


def nonfinite_gradients(model: nn.Module) -> list[str]:
    """Return the parameters whose gradient is not finite on at least one process, in the order of the model.

    A process whose gradients are all finite, but too large for a norm, adds the parameters with a non-finite norm.
    """
    named = gradients(model)
    own = [name for name, gradient in named if not gradient.isfinite().all()]
    own = own or [name for name, gradient in named if not gradient.norm().isfinite()]
    anywhere = {name for names in gather_object([own]) for name in names}
    return [name for name, _ in model.named_parameters() if name in anywhere]


def describe(losses: Sequence[Sequence[float]], names: Sequence[str], parameters: int) -> str:
    """Describe what is not finite: losses of batches (by process), and gradients, out of so many `parameters`."""
    parts = []
    for rank, own in enumerate(losses):
        process = f" of process {rank}" if len(losses) > 1 else ""
        for number, loss in enumerate(own, start=1):
            if not math.isfinite(loss):
                parts.append(f"the loss is {loss} in batch {number} of {len(own)}{process}")
    if names:
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        shown = ", ".join(names[:NAMED])
        parts.append(f"{len(names)} of {parameters} parameters have a gradient that is not finite: {shown}{more}")
    return "; ".join(parts)


def remedy(collapsed: bool, on_nonfinite: str) -> str:
    """Return advice on what to do about a fault."""
    if collapsed:
        return (
            "Set training.bf16: true in place of fp16, lower training.learning_rate, or train the pre-norm model "
            "(normalize_before: true)"
        )
    advice = "Lower training.learning_rate, raise warmup_steps, or look into the sentences"
    if on_nonfinite == "skip":
        return advice
    return f"{advice}; or set training.on_nonfinite: skip, with which the run goes on from its last checkpoint"


def texts(inputs: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """The sentences of a batch, as text."""
    labels = inputs["labels"].masked_fill(inputs["labels"] < 0, tokenizer.pad_token_id)
    targets = tokenizer.batch_decode(labels, skip_special_tokens=True)
    if isinstance(tokenizer, WordTokenizer):  # its other methods decode targets
        sources = [tokenizer.decode_source(ids) for ids in inputs["input_ids"].tolist()]
    else:
        sources = tokenizer.batch_decode(inputs["input_ids"], skip_special_tokens=True)
    return [{"source": source, "target": target} for source, target in zip(sources, targets, strict=True)]


def save_batches(batches: Sequence[Batch], path: Path) -> None:
    """Write batches as `<number>.inputs.<name>` and `<number>.generators.<device>`."""
    tensors = {}
    for number, batch in enumerate(batches):
        for part, values in (("inputs", batch.inputs), ("generators", batch.generators)):
            tensors |= {f"{number}.{part}.{name}": value.contiguous().cpu() for name, value in values.items()}
    save_file(tensors, path)
