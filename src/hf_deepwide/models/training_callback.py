"""What a Trainer that is not ours has to tell a model whose loss changes over training."""

from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from .pretrained_model import DeepWidePreTrainedModel


class TrainingStep(TrainerCallback):
    """Tells the model how many optimizer steps were made (`training_step`), for losses that change over training."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Find the modules that want to know: the model and its stacks, also within an adapter."""
        self._told = [module for module in model.modules() if isinstance(module, DeepWidePreTrainedModel)]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before the first batch of each optimizer step, 0 before the first one of a run."""
        for module in self._told:
            module.training_step = state.global_step


class LatentDepthCallback(TrainingStep):
    """Lets `Trainer` and `Seq2SeqTrainer` of Transformers train the loss of latent depth (Li et al. 2020, Eq. 8).

        trainer = Seq2SeqTrainer(model, args, callbacks=[LatentDepthCallback(label_smoothing=0.1)], …)

    The trainers of this package need no callback. A model that comes without this package makes one by
    `model.training_callback()`. Accumulation, several processes and resuming are right with it: the Trainer counts
    optimizer steps, and restores its count from a checkpoint.

    Args:
        label_smoothing: epsilon, in place of the Trainer's `label_smoothing_factor`. With that the Trainer takes the
            labels away from the model and computes the cross-entropy alone.
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
        """As the parent; refuse the Trainer's label smoothing, and smooth in the model.

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
