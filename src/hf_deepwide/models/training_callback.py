"""Callbacks that other Trainers than this package's need for a model whose loss changes over training."""

from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from .pretrained_model import DeepWidePreTrainedModel


class TrainingStep(TrainerCallback):
    """A callback that sets the number of optimizer steps (`training_step`), for losses that change over training."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the modules that need the number: the model and its stacks, also inside an adapter."""
        self._told = [module for module in model.modules() if isinstance(module, DeepWidePreTrainedModel)]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the number before the first batch of each optimizer step; it is 0 before the first step of a new run."""
        for module in self._told:
            module.training_step = state.global_step


class LatentDepthCallback(TrainingStep):
    """A callback for Transformers' `Trainer` and `Seq2SeqTrainer`: the loss of latent depth (Li et al. 2020, Eq. 8).

        trainer = Seq2SeqTrainer(model, args, callbacks=[LatentDepthCallback(label_smoothing=0.1)], …)

    The trainers of this package need no callback. Without this package, `model.training_callback()` returns the
    callback. Gradient accumulation, several processes and resuming work with it: the Trainer counts optimizer steps,
    and restores its count from a checkpoint.

    Args:
        label_smoothing: epsilon, in place of the Trainer's `label_smoothing_factor`. With `label_smoothing_factor` the
            Trainer does not pass the labels to the model, and computes only the cross-entropy.
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not (isinstance(label_smoothing, float | int) and 0 <= label_smoothing < 1):
            raise ValueError(f"`label_smoothing` must be in [0, 1), got {str(label_smoothing)[:40]!r}")
        self.label_smoothing = label_smoothing

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Do the same as the parent, and set the model's label smoothing; refuse the Trainer's.

        Raises:
            ValueError: `label_smoothing_factor` is set.
        """
        if args.label_smoothing_factor:
            raise ValueError(
                f"`label_smoothing_factor` is {args.label_smoothing_factor}: with it the Trainer keeps the labels "
                "from the model, and KL and target depth are not trained. Set it to 0, and give LatentDepthCallback("
                f"label_smoothing={args.label_smoothing_factor})"
            )
        super().on_train_begin(args, state, control, model=model, **kwargs)
        for module in self._told:
            module.label_smoothing = self.label_smoothing
