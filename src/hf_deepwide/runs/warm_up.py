"""Refusal of a warm-up that is longer than its training."""

import inspect
from typing import Any

from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from ..errors import UserError


class WarmUpFits(TrainerCallback):
    """Refuse a warm-up that is longer than the training: the learning rate would never reach its peak.

    Args:
        source: the recipe's file, for the message.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the warm-up, now that the number of steps is known. A resumed run is not checked.

        Raises:
            UserError: the training has fewer steps than the warm-up.
        """
        if not state.global_step:
            refuse_long_warm_up(args, state.max_steps, self.source)


def refuse_long_warm_up(args: TrainingArguments, steps: int, source: str) -> None:
    """Refuse a warm-up that is longer than the whole training.

    Args:
        args: the arguments with the warm-up and the schedule.
        steps: optimizer steps of the training.
        source: start of the message.

    Raises:
        UserError: the warm-up is longer.
    """
    schedule = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(args.lr_scheduler_type)]
    warmup = args.get_warmup_steps(steps)
    if warmup > steps and "num_warmup_steps" in inspect.signature(schedule).parameters:
        raise UserError(
            f"{source}: training.warmup_steps is {warmup:,}, and the whole training has {steps:,} steps: the learning "
            "rate would never reach its peak. Set warmup_steps to 0.1, a tenth of the training, or train for longer "
            "(num_train_epochs, max_steps)"
        )
