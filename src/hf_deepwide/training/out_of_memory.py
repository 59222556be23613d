"""Out of memory in a training step: the batch is halved, computed in parts, and training goes on.

The sentences of a batch are independent, and the loss is divided by the target tokens of the whole optimizer step.
The gradient of a batch is therefore the sum of the gradients of its parts, and the update is that of the whole batch.
Only dropout draws other numbers. Checkpoints store the new largest batch, so a resumed run computes the same parts.

Each process splits its batch alone. Under DistributedDataParallel (DDP) the other processes wait only for its
gradients. So each process must synchronize its gradients exactly once a step, however many parts it computes:

    memory runs out                          what follows
    before any gradient has been added       the parts; all but the last bypass DDP
    in the backward pass, on the way         the parts, but only for parameters whose gradient is still missing;
                                             each gradient is then handed over once, as a backward pass does
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..device_memory import is_out_of_memory
from ..errors import UserError, quote
from .faults import generator_states, restore
from .sharding import LAYER_DROP

if TYPE_CHECKING:
    from .trainer import TokenBatchTrainer

logger = logging.getLogger(__name__)

Inputs = Mapping[str, torch.Tensor]


class LargestBatch(TrainerCallback, ExportableState):
    """A callback that stores in checkpoints the most tokens of a batch that is computed at once. None: no limit.

    Args:
        tokens: the limit of this process, or a list of the limits of all processes. If the number of processes has
            changed, each process takes the smallest limit of the list.

    Raises:
        ValueError: a limit is not a number of tokens.
    """

    def __init__(self, tokens: int | list[int | None] | None = None) -> None:
        process, every = PartialState(), tokens if isinstance(tokens, list) else [tokens]
        for one in every:
            if one is not None and not (type(one) is int and one > 0):
                raise ValueError(f"the largest batch is {quote(one)} tokens; expected is a whole number, or none")
        if len(every) == process.num_processes:
            self.tokens = every[process.process_index]
        else:
            self.tokens = min((one for one in every if one is not None), default=None)
        self.tokens_by_process = every  # as of the last `gather`

    def gather(self) -> None:
        """Collect the limits of all processes. All processes must call this."""
        self.tokens_by_process = gather_object([self.tokens])

    def state(self) -> dict[str, Any]:
        """Return the limits that a checkpoint stores and the Trainer restores."""
        tokens = self.tokens_by_process if PartialState().num_processes > 1 else self.tokens
        return {"args": {"tokens": tokens}, "attributes": {}}


class BatchSplitter:
    """The part of a trainer that computes its batches, in parts if a batch does not fit in memory.

    Args:
        trainer: the trainer, whose model, arguments and state it looks at.
    """

    def __init__(self, trainer: "TokenBatchTrainer") -> None:
        self.trainer = trainer

    @property
    def largest(self) -> LargestBatch:
        """The callback with the limit. It is looked up each time, because resuming replaces the callback."""
        callbacks = self.trainer.callback_handler.callbacks
        return next(callback for callback in callbacks if isinstance(callback, LargestBatch))

    def step(
        self,
        compute: Callable[[nn.Module, Inputs, Any], torch.Tensor],
        model: nn.Module,
        inputs: Inputs,
        tokens: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """Compute the loss of a batch and add its gradients, in as many parts as memory requires.

        Args:
            compute: a function that does this in one pass, given a model, a part of the batch, and `tokens`.
            model: the model as the Trainer has wrapped it.
            inputs: the batch.
            tokens: the target tokens of the optimizer step, by which the loss is divided. None: the share of a part
                is unknown, and nothing is split.

        Raises:
            UserError: one row alone does not fit, the weights are sharded, or the backward pass cannot be repeated.
        """
        if tokens is None:
            return compute(model, inputs, tokens)
        alone = model.module if isinstance(model, DistributedDataParallel) else model
        losses, parts = [], [inputs]
        while parts:
            part = self._take(parts)
            target = alone if parts else model
            generators, progress = generator_states(self.trainer.args.device), Progress(target)
            with progress:
                loss = self._tried(lambda target=target, part=part: compute(target, part, tokens), part)
            if loss is not None:
                losses.append(loss)
                continue
            restore(generators, self.trainer.args.device.type)
            if progress.backward_has_begun:
                self._check_repeatable(model)
                losses.append(self._add_missing(alone, part, tokens, progress.missing()))
                continue
            parts.insert(0, part)
            if progress.forward_has_begun:
                model.require_forward_param_sync = False  # the pass that failed has synchronized the buffers
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _add_missing(
        self, model: nn.Module, inputs: Inputs, tokens: torch.Tensor | int, missing: list[nn.Parameter]
    ) -> torch.Tensor:
        """Add the gradients that an interrupted backward pass has not added, and return the loss of the batch.

        A backward pass adds the gradient of a parameter once, when the gradient is complete. So the added gradients
        stay. DDP is notified when a gradient is added, and therefore exactly once.
        """
        trainer, losses, parts = self.trainer, [], [inputs]
        sums: list[torch.Tensor | None] = [None] * len(missing)

        def compute(part: Inputs) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, trainer._prepare_inputs(part), num_items_in_batch=tokens)
            scaler = trainer.accelerator.scaler
            scaled = loss if scaler is None else scaler.scale(loss)
            return loss.detach(), torch.autograd.grad(scaled, missing, allow_unused=True)

        while parts:
            part = self._take(parts)
            generators = generator_states(trainer.args.device)
            done = self._tried(lambda part=part: compute(part), part)
            if done is None:
                restore(generators, trainer.args.device.type)
                parts.insert(0, part)
                continue
            losses.append(done[0])
            sums = [_sum(total, gradient) for total, gradient in zip(sums, done[1], strict=True)]
        used = [(parameter, total) for parameter, total in zip(missing, sums, strict=True) if total is not None]
        torch.autograd.backward(*map(list, zip(*used, strict=True)))
        return torch.stack(losses).sum()

    def _take(self, parts: list[Inputs]) -> Inputs:
        """Remove the next part, which is at most as large as the present limit, and return it."""
        part, *rest = split(parts[0], self.largest.tokens)
        parts[:1] = rest
        return part

    def _tried(self, compute: Callable[[], Any], part: Inputs) -> Any:
        """Return the result of `compute`. If memory runs out, set a limit smaller than `part`, and return None."""
        try:
            return compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._halve(part, error)
        # only here, after the error and its traceback are gone, nothing holds the activations any more
        clear_device_cache(garbage_collection=True)
        return None

    def _halve(self, part: Inputs, error: RuntimeError) -> None:
        """Halve the limit until it is smaller than the part that did not fit, and log the new limit."""
        trainer = self.trainer
        rows, width = shape(part)
        what = f"step {trainer.state.global_step + 1}: memory ran out on a batch of {rows} × {width} tokens"
        if trainer.sharding.enabled:
            raise UserError(
                f"{what}. Processes with sharded weights compute each layer together, and none can split its batch "
                f"alone. Halve training.max_tokens ({trainer.args.max_tokens}) and double "
                "training.gradient_accumulation_steps"
            ) from error
        if rows == 1:
            raise UserError(
                f"{what}, and one row cannot be split. Lower data.max_length, set training.gradient_checkpointing: "
                "true, or take a smaller model"
            ) from error
        limit = (self.largest.tokens or trainer.args.max_tokens) // 2
        while limit >= rows * width:
            limit //= 2
        self.largest.tokens = limit
        logger.warning(
            "%s. The largest batch that is computed at once is now %d tokens (training.max_tokens is %d). A larger "
            "batch is computed in parts whose gradients are added, so the effective batch is unchanged",
            *(what, limit, trainer.args.max_tokens),
        )

    def _check_repeatable(self, model: nn.Module) -> None:
        """Refuse to repeat a backward pass that may reach other parameters, or that adds a gradient in pieces."""
        args, config = self.trainer.args, self.trainer.model.config
        drops = [name for name in LAYER_DROP if getattr(config, name, 0) > 0]
        looks_for_unused = isinstance(model, DistributedDataParallel) and model.find_unused_parameters
        reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        why = f"model.{drops[0]} draws the layers anew" if drops and looks_for_unused else "of use_reentrant: true"
        if (drops and looks_for_unused) or reentrant:
            raise UserError(
                f"memory ran out within a backward pass, which cannot be finished in parts because {why}. Halve "
                f"training.max_tokens ({args.max_tokens}) and double training.gradient_accumulation_steps"
            )


class Progress:
    """The progress of the forward and backward pass in a `with` block, readable in the block and afterwards.

    Args:
        model: the model that computes, with or without the wrapper of DDP.

    Attributes:
        forward_has_begun: whether the forward pass of the model in the DDP wrapper has begun.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = [(each, _version(each)) for each in model.parameters() if each.requires_grad]
        self._reducing = self.forward_has_begun = False

    def __enter__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        if isinstance(self._model, DistributedDataParallel):
            self._hooks.append(self._model.module.register_forward_pre_hook(self._before_forward))
            self._hooks.append(self._model.register_forward_hook(self._after_forward))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, *_: Any) -> None:
        """Note that the forward pass has begun: by now DDP has synchronized the buffers of all processes."""
        self.forward_has_begun = True

    def _after_forward(self, model: DistributedDataParallel, *_: Any) -> None:
        """Note whether DDP waits for the gradient of each parameter from here on."""
        self._reducing = model.require_backward_grad_sync

    def missing(self) -> list[nn.Parameter]:
        """The parameters to which no gradient has been added."""
        return [parameter for parameter, version in self._before if _version(parameter) == version]

    @property
    def backward_has_begun(self) -> bool:
        """True if the pass cannot simply be repeated: gradients were added, or DDP waits for them."""
        return self._reducing or len(self.missing()) < len(self._before)


def _version(parameter: nn.Parameter) -> int | None:
    """Return a number that changes when a gradient is added."""
    return None if parameter.grad is None else parameter.grad._version


def _sum(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients. None stands for a missing gradient."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


def shape(inputs: Inputs) -> tuple[int, int]:
    """Return the rows of a batch, and the tokens of a row on the longer side, padding included."""
    width = max(value.shape[1] for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim == 2)
    return len(inputs["labels"]), width


def split(inputs: Inputs, largest: int | None) -> list[Inputs]:
    """Split a batch into parts of at most `largest` tokens, each of at least one row. None: do not split."""
    rows, width = shape(inputs)
    if largest is None or rows * width <= largest:
        return [inputs]
    a_part = max(largest // width, 1)
    return [
        {name: value[start : start + a_part] for name, value in inputs.items()} for start in range(0, rows, a_part)
    ]
