"""A warm-up that is longer than its training is refused."""

import inspect
from typing import Any

from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from ..errors import UserError


class WarmUpFits(TrainerCallback):
    """Refuses a warm-up that is longer than the training, in which the learning rate would never reach its peak.

    Args:
        source: the recipe, for the message.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The number of steps is known now.

        Raises:
            UserError: they are fewer than those of the warm-up. A run that has begun goes on as it began.
        """
        if not state.global_step:
            refuse_long_warm_up(args, state.max_steps, self.source)


def refuse_long_warm_up(args: TrainingArguments, steps: int, source: str) -> None:
    """Refuse a warm-up that is longer than the whole training of so many steps; `source` opens the message.

    Raises:
        UserError: it is longer.
    """
    schedule = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(args.lr_scheduler_type)]
    warmup = args.get_warmup_steps(steps)
    if warmup > steps and "num_warmup_steps" in inspect.signature(schedule).parameters:
        raise UserError(
            f"{source}: training.warmup_steps is {warmup:,}, and the whole training has {steps:,} steps: the learning "
            "rate would never reach its peak. Set warmup_steps to 0.1, a tenth of the training, or train for longer "
            "(num_train_epochs, max_steps)"
        )
