"""The trainer of classifiers: the Trainer of Transformers, but it obeys signals and stops at non-finite numbers."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from ..device_memory import is_out_of_memory
from ..errors import UserError, quote
from ..limits import Range, check_numbers
from ..weight_checks import is_finite
from .arguments import OneDevice, WithoutSecrets
from .checkpoints import find_best, load_state
from .faults import NonFiniteError
from .preemption import Preemption
from .ranges import COUNT, RANGES, check_choices, check_steps, follow_metric

METRICS = ("accuracy", "f1", "matthews")
SIZES = ("per_device_train_batch_size", "per_device_eval_batch_size", "eval_accumulation_steps")
REMEDY = "Lower training.learning_rate or raise training.warmup_steps, and start afresh with --overwrite"


@dataclass
class ClassificationTrainingArguments(WithoutSecrets, OneDevice, TrainingArguments):
    """The arguments of Transformers, with `seeds` in place of `seed`.

    Raises:
        ValueError: a value is out of range.
    """

    seeds: list[int] = field(default_factory=lambda: [1], metadata={"help": "One training each."})
    attn_implementation: str = field(default="sdpa", metadata={"help": "eager or sdpa."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to validate."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save a checkpoint."})
    save_total_limit: int | None = field(default=1, metadata={"help": "Checkpoints that are kept beside the best."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "The best checkpoint becomes the model."})
    metric_for_best_model: str | None = field(default="accuracy", metadata={"help": "accuracy, f1 or matthews."})
    report_to: str = field(default="none", metadata={"help": "Where to log."})

    def __post_init__(self) -> None:
        """Check what `Trainer` would not check."""
        sizes = dict.fromkeys(SIZES, Range(1, COUNT))
        check_numbers(self, {name: RANGES[name] for name in RANGES if name in vars(self)} | sizes)
        if self.max_steps == 0:
            raise ValueError("max_steps is 0; accepted: 1 or more, or -1 for num_train_epochs epochs")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {quote(self.seeds)}; give numbers, each once")
        for seed in self.seeds:
            if not RANGES["seed"].holds(seed):
                raise ValueError(f"seeds: {quote(seed)} is not accepted; accepted: {RANGES['seed']}")
        check_steps(self)
        super().__post_init__()
        self.dataloader_pin_memory &= torch.cuda.is_available()  # without a GPU, PyTorch warns of it in each epoch
        if self.metric_for_best_model not in METRICS:
            raise ValueError(
                f"metric_for_best_model is {quote(self.metric_for_best_model)}; accepted: {', '.join(METRICS)}"
            )
        if self.attn_implementation not in ("eager", "sdpa"):
            raise ValueError(f"attn_implementation is {quote(self.attn_implementation)}; accepted: eager, sdpa")
        check_choices(self)
        follow_metric(self)


class ClassificationTrainer(Trainer):
    """The trainer of a classifier. Its arguments are those of `Trainer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A classifier returns the mean loss of its batch, even if its `forward` accepts any keyword.
        self.model_accepts_loss_kwargs = False
        self.preemption = Preemption()
        self.add_callback(self.preemption)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train from the start or from a checkpoint.

        Raises:
            NonFiniteError: the loss or a prediction is not finite.
            Interrupted: a signal ended training. The run has been saved, and can be resumed.
        """
        with self.preemption.listening():
            output = super().train(*args, **kwargs)
            self.preemption.asked(self.args)
        self.preemption.leave(self.args, self.state)
        return output

    def read_back(self, last: Path) -> None:
        """Load the result of a training that ended at checkpoint `last`: the state and the chosen weights."""
        self.state = load_state(last)
        best = find_best(Path(self.args.output_dir), self.state) if self.args.load_best_model_at_end else None
        self._load_from_checkpoint(str(best or last))

    def _load_callback_state(self) -> None:
        """Look for the best checkpoint in the run's present folder, then load the state of the callbacks."""
        find_best(Path(self.args.output_dir), self.state)
        super()._load_callback_state()
        self.args.eval_on_start = False  # a resume is not a start

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Load the best weights and delete checkpoints, unless a signal ended training: resuming needs the newest."""
        self.preemption.leave(self.args, self.state)
        return super()._finalize_training(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the loss of one batch and add its gradients.

        Raises:
            NonFiniteError: the loss is not finite. The optimizer has not used its gradients.
            UserError: memory ran out.
        """
        with self._telling_of_memory("train", " and double training.gradient_accumulation_steps"):
            loss = super().training_step(*args, **kwargs)
        summed = self.accelerator.reduce(loss.float().reshape(1), "sum").item()  # a fault in one process stops all
        if not math.isfinite(summed):
            raise self._fault(self.state.global_step + 1, f"the training loss is {summed}")
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
        """Return loss, logits and labels of a batch. Drop the further outputs of an encoder-decoder model."""
        with self._telling_of_memory("eval"):
            loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, logits[0] if isinstance(logits, tuple) else logits, labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Compute the metrics of a dataset.

        Raises:
            NonFiniteError: a weight, a prediction or the loss is not finite. The class with the largest logit would
                then mean nothing.
        """
        if not all(is_finite(weights) for weights in self.model.parameters()):
            raise self._fault(self.state.global_step, "weights are not finite")
        output = super().evaluation_loop(*args, **kwargs)
        losses = [value for name, value in output.metrics.items() if name.endswith("_loss")]
        if not np.isfinite(output.predictions).all() or not all(map(math.isfinite, losses)):
            raise self._fault(self.state.global_step, "predictions or their loss are not finite")
        return output

    @contextmanager
    def _telling_of_memory(self, kind: str, and_more: str = "") -> Iterator[None]:
        """Report what to do if memory runs out, unless Transformers searches for a batch size that fits.

        Args:
            kind: kind of batch: train or eval.
            and_more: further advice, beside halving the batch size.
        """
        size = f"per_device_{kind}_batch_size"
        try:
            yield
        except RuntimeError as error:
            if self.args.auto_find_batch_size or not is_out_of_memory(error):
                raise
            raise UserError(
                f"seed {self.args.seed}, step {self.state.global_step + 1}: memory ran out on a batch of "
                f"{getattr(self.args, size)} rows. Halve training.{size}{and_more}, or lower data.max_length; then "
                "start afresh with --overwrite"
            ) from error

    def _fault(self, step: int, what: str) -> NonFiniteError:
        return NonFiniteError(f"seed {self.args.seed}, step {step}: {what}. {REMEDY}")
