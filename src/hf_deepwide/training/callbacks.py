"""Callbacks of the training loop: data order, early stopping, saving, dropout seeds, speed, the progress bar."""

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import transformers
from transformers import (
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from ..data.batches import TokenBatchSampler
from ..progress import tell
from .memory import peak_memory


class EpochCallback(TrainerCallback):
    """A callback that passes the new epoch to the sampler, and to a collator whose batches depend on the epoch.

    Transformers does so itself, with one exception: a run of several processes that resumes within an epoch. There the
    call of Transformers does not reach the wrapped sampler, and the epoch would be replayed in the order of epoch 0.
    """

    def __init__(self, sampler: TokenBatchSampler, collator: Any = None) -> None:
        self.listeners = [sampler, *([collator] if hasattr(collator, "set_epoch") else [])]

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Pass on the epoch. `state.epoch` is fractional within an epoch; 1e-6 guards against its rounding error."""
        for listener in self.listeners:
            listener.set_epoch(int(state.epoch + 1e-6))


class EarlyStoppingCallback(transformers.EarlyStoppingCallback):
    """A callback that ends training, with a message, when validation stops improving. Checkpoints hold its name."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict, **kwargs: Any
    ) -> None:
        """Call the parent, but only for the validation in training. The metrics of other splits have other names."""
        name = args.metric_for_best_model.removeprefix("eval_")
        if f"eval_{name}" not in metrics:
            return
        super().on_evaluate(args, state, control, metrics, **kwargs)
        ends = self.early_stopping_patience_counter >= self.early_stopping_patience
        if ends and state.is_world_process_zero:
            tell(
                f"step {state.global_step}: training ends early, as the validation's {name} has not improved "
                f"{self.early_stopping_patience_counter} times; it was best at step {state.best_global_step}"
            )


class SaveAfterEvaluation(TrainerCallback):
    """A callback that postpones a save in the last step of an epoch until after the evaluation of the epoch.

    The checkpoint then contains this evaluation. A run that resumes from it misses no evaluation, and the last
    checkpoint contains all evaluations.
    """

    def __init__(self) -> None:
        self._due = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Postpone the save if this step is the last one of an epoch or of the training."""
        ends = control.should_training_stop or float(state.epoch).is_integer()
        if control.should_save and ends and args.eval_strategy == IntervalStrategy.EPOCH:
            self._due, control.should_save = True, False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request the postponed save. The trainer evaluates, and then saves."""
        if self._due:
            self._due, control.should_save = False, True


class SeedByRank(TrainerCallback):
    """A callback that gives each process its own random numbers, once all processes have the same weights.

    The Trainer seeds all processes alike. Without this callback, all processes would draw the same dropout masks and
    drop the same branches. On resume, the generator states of all ranks are restored after this callback.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Seed with `seed + rank`."""
        set_seed(args.seed + args.process_index)


class Throughput(TrainerCallback, ExportableState):
    """A counter of target tokens (`</s>` included, padding not), and of the time for training steps and for data.

    It also keeps the peak memory of the process, and its processor time over all threads. Evaluation and saving do not
    count as steps. The totals are part of checkpoints, so they survive an interruption.
    """

    def __init__(
        self,
        target_tokens: int = 0,
        seconds: float = 0.0,
        minutes: float = 0.0,
        data_seconds: float = 0.0,
        peak_memory_bytes: int = 0,
        processor_minutes: float = 0.0,
    ) -> None:
        self.target_tokens = target_tokens
        self.seconds = seconds  # time of training steps
        self.data_seconds = data_seconds  # the part of `seconds` that was spent waiting for the next batch
        self.minutes = minutes  # total time of earlier sessions, evaluation and saving included
        self.peak_memory_bytes = peak_memory_bytes  # of this process, in earlier sessions
        self.processor_minutes = processor_minutes  # of all threads of this process, in earlier sessions
        self._new_tokens: torch.Tensor | int = 0
        self._logged = (target_tokens, seconds, data_seconds)
        self._start = self._mark = time.perf_counter()
        self._processor_start = time.process_time()

    def count(self, tokens: torch.Tensor | int) -> None:
        """Add the tokens of one optimizer step, over all processes. Read the number later, not to wait for a GPU."""
        self._new_tokens = self._new_tokens + tokens

    def timed(self, batches: Iterator) -> Iterator:
        """Yield the same batches, and count the time of waiting for each: reading, padding, moving to the device."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.data_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def since_last(self) -> dict[str, float]:
        """Target tokens per second, and the share of the time that was spent waiting for data, since the last call."""
        self._settle()
        now = (self.target_tokens, self.seconds, self.data_seconds)
        tokens, seconds, waited = (new - old for new, old in zip(now, self._logged, strict=True))
        self._logged = now
        if seconds <= 0:
            return {"tokens_per_second": 0.0, "data_share": 0.0}
        return {"tokens_per_second": tokens / seconds, "data_share": waited / seconds}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clocks."""
        self._start = self._mark = time.perf_counter()
        self._processor_start = time.process_time()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the time since the mark: the time of this step, data loading included."""
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave out the time of the evaluation."""
        self._mark = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave out the time of saving."""
        self._mark = time.perf_counter()

    def state(self) -> dict:
        """Return the totals that a checkpoint stores and the Trainer restores."""
        self._settle()
        minutes = self.minutes + (time.perf_counter() - self._start) / 60
        totals = {
            "target_tokens": self.target_tokens,
            "seconds": self.seconds,
            "data_seconds": self.data_seconds,
            "minutes": minutes,
            "peak_memory_bytes": max(self.peak_memory_bytes, peak_memory()),
            "processor_minutes": self.processor_minutes + (time.process_time() - self._processor_start) / 60,
        }
        return {"args": totals, "attributes": {}}

    def _settle(self) -> None:
        self.target_tokens += int(self._new_tokens)
        self._new_tokens = 0


class TranslationProgress(ProgressCallback):
    """The Trainer's progress bar (steps, time left) with loss and speed beside it, and one line per evaluation.

    Args:
        counted: what the speed counts, such as "target tokens".
    """

    def __init__(self, counted: str) -> None:
        super().__init__()
        self.counted = counted

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the newest numbers."""
        if not state.is_world_process_zero or self.training_bar is None or logs is None:
            return
        if "loss" in logs:
            self.training_bar.set_postfix_str(
                f"epoch {state.epoch:.1f}, loss {logs['loss']:.3f}, {logs['tokens_per_second']:,.0f} {self.counted}/s"
            )
        if "eval_loss" in logs:
            self.training_bar.write(evaluation_line(state, logs))


class PlainProgress(TrainerCallback):
    """Progress without a bar: one line on stderr per `logging_steps`, and one line per evaluation.

    Args:
        counted: what the speed counts, such as "target tokens".
    """

    def __init__(self, counted: str) -> None:
        self.counted = counted

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock for the estimate of the time left."""
        self._start, self._first = time.perf_counter(), state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the newest numbers."""
        if not state.is_world_process_zero or logs is None:
            return
        if "loss" in logs:
            a_step = (time.perf_counter() - self._start) / (state.global_step - self._first)
            left = timedelta(seconds=round(a_step * (state.max_steps - state.global_step)))
            line = (
                f"step {state.global_step} of {state.max_steps}, epoch {state.epoch:.1f}: loss {logs['loss']:.3f}, "
                f"{logs['tokens_per_second']:,.0f} {self.counted}/s, {left} left"
            )
            tell(line)
        if "eval_loss" in logs:
            tell(evaluation_line(state, logs))


def evaluation_line(state: TrainerState, logs: dict[str, Any]) -> str:
    """Return the results of an evaluation in one line."""
    bleu = f", BLEU {logs['eval_bleu']:.2f}" if "eval_bleu" in logs else ""
    return f"step {state.global_step}, epoch {state.epoch:.1f}: validation loss {logs['eval_loss']:.4f}{bleu}"
