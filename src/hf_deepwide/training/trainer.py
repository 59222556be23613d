"""The trainer of every task: batches by tokens, an exact loss per token, and everything else in a step.

`TokenBatchTrainer` is the Trainer of Transformers with eight helpers, each for one concern:

    splitter     memory that runs out                    out_of_memory.py
    faults       numbers that are not finite             faults.py
    latent       posteriors over layers, layers' logs    depth.py
    sharding     weights spread over processes           sharding.py
    lora         small matrices that learn in its place  lora.py
    saving       checkpoints, whole or not at all        saving.py
    preemption   signals                                 preemption.py
    throughput   tokens and seconds                      callbacks.py

A helper overrides nothing. `TokenBatchTrainer` holds all overrides of the Trainer's methods, each once. An override
calls the helpers in the order of its lines. The trainer of a task (translation.py, masked_lm.py) adds only its
collator and its validation, and for translation the copies of rows.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, Trainer
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from ..data.batches import TokenBatchSampler, round_up
from ..data.sampling import copies_by_temperature
from ..data.streaming import EndlessStream, StreamBatches
from ..models.loss import cross_entropy
from ..models.pretrained_model import DeepWidePreTrainedModel
from ..progress import shows_bars
from .arguments import TranslationTrainingArguments
from .callbacks import (
    EarlyStoppingCallback,
    EpochCallback,
    PlainProgress,
    SaveAfterEvaluation,
    SeedByRank,
    Throughput,
    TranslationProgress,
)
from .checkpoints import REGULAR, check_weights, find_best
from .depth import DepthTraining
from .faults import FaultGuard
from .lora import Lora
from .out_of_memory import BatchSplitter, LargestBatch
from .preemption import Preemption, outlive_signals
from .saving import Saving, check_loaded, fitting
from .sharding import Sharding
from .stream_position import StreamPosition, collate_stream

logger = logging.getLogger(__name__)

# Speeds that Transformers computes from a batch size in sentences, and operations, which are not counted here.
MISCOUNTED = ("eval_steps_per_second", "test_steps_per_second", "train_samples_per_second", "total_flos")


class TokenBatchTrainer(Trainer):
    """The trainer of any model on encoded rows, in batches of a number of tokens.

    The loss is the label-smoothed cross-entropy per target token of the whole optimizer step, over all devices and
    accumulation steps. So N processes compute the same as one process with N accumulation steps. A model that can
    compute this loss itself (`supports_label_smoothing`) does so, and keeps no logits. From every other model only the
    logits are used, because several models (Marian, BART) average each batch on its own.

    Evaluation leaves training's random generators as they were, so the number of evaluations does not affect training.

    Args:
        model: the model; its `generation_config` is used as it is.
        args: the arguments.
        tokenizer: its tokenizer.
        train_dataset: encoded rows: a dataset, or a stream (which needs `max_steps`).
        eval_dataset: the encoded validation set.
        data: the groups of sentences (`pairs`), and how often the sentences of each group are seen.
        data_collator: makes a batch of rows.
    """

    counted: ClassVar[str] = "target tokens"  # what the speed of training counts

    def __init__(
        self,
        model: PreTrainedModel,
        args: TranslationTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Dataset | None = None,
        *,
        data: Any,
        data_collator: Any,
    ) -> None:
        if args.ddp_find_unused_parameters is None and isinstance(model, DeepWidePreTrainedModel):
            args.ddp_find_unused_parameters = False  # there are none: skipped layers have gradients of zero
        self.fuses_loss = getattr(model, "supports_label_smoothing", False)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_loss_func=None if self.fuses_loss else self._loss_from_logits,
        )
        self.label_smoothing = args.label_smoothing_factor
        self.label_smoother = None  # the parent's would remove the labels that a model needs to compute the loss
        self.data = data
        self.train_collator: Any = None  # the collator of training, if it differs from that of validation
        self.latent = DepthTraining(self)
        self.splitter = BatchSplitter(self)
        self.faults = FaultGuard(self)
        self.sharding = Sharding(self)
        self.lora = Lora(self)
        self.preemption = Preemption()
        self.saving = Saving(self, self.preemption)
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
        for callback in self._callbacks():
            self.add_callback(callback)

    def _callbacks(self) -> Iterator[TrainerCallback]:
        """Yield the callbacks that act between the hooks below, in this order at each event."""
        yield from self.latent.callbacks  # set the model's step; log the use and the gradients of layers
        yield SaveAfterEvaluation()  # at the end of an epoch
        yield self.preemption  # saves and stops when a signal came
        yield Throughput()  # counts tokens and time
        yield LargestBatch()  # remembers that memory ran out
        yield SeedByRank()  # gives each process its own random numbers
        if self.args.early_stopping_patience:
            yield EarlyStoppingCallback(self.args.early_stopping_patience)
        if not self.args.disable_tqdm:
            progress = TranslationProgress if shows_bars() else PlainProgress
            yield progress(self.counted)

    @property
    def throughput(self) -> Throughput:
        """The counter of tokens. It is looked up each time, because resuming replaces the counter."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, Throughput))

    # Training: before the first step

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train from the start or from a checkpoint.

        Raises:
            UserError: training would resume with other data, or the checkpoint does not belong to this run.
            NonFiniteError: a loss or gradient is not finite, and the run must stop.
            Interrupted: a signal ended training. The run has been saved, and can be resumed.
        """
        # 1. Digests of the data: each checkpoint stores them, and on resume they are compared with the checkpoint's.
        self.saving.take_digests(self.train_dataset, self.eval_dataset, self.data)
        # 2. LoRA's matrices are added before the optimizer is made.
        self.lora.begin()
        # 3. Signals are noted from here on, and obeyed at the end of a step.
        with self.preemption.listening():
            output = super().train(*args, **kwargs)
            self.preemption.asked(self.args)
        # 4. A run that a signal ended leaves with the signal's exit status.
        self.preemption.leave(self.args, self.state)
        return output

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the model and make the optimizer."""
        # 1. accelerate shards the model; the embeddings stay in the root unit.
        with self.sharding.preparing():
            prepared = super()._prepare_for_training(*args, **kwargs)
        # 2. Posteriors are looked up again: sharded parameters are new objects.
        self.latent.find_posteriors()
        return prepared

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the parent's names without those that the model exempts (`no_weight_decay`) or LoRA freezes."""
        exempt, frozen = getattr(self.model, "no_weight_decay", ()), self.lora.frozen_tables()
        names = super().get_decay_parameter_names(model)
        return [name for name in names if name.rpartition(".")[2] not in exempt and name not in frozen]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the parent's optimizer, and move the posteriors to a separate group."""
        made_before = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not made_before:
            self.latent.add_group(optimizer, self.model if model is None else model)
        return optimizer

    # Training: a step

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Take the batches of one optimizer step, and the number of their target tokens over all processes."""
        # 1. Count the time of waiting for data.
        batches, tokens = super().get_batch_samples(self.throughput.timed(epoch_iterator), num_batches, device)
        # 2. Count the tokens.
        if tokens is not None:
            self.throughput.count(tokens)
        return batches, tokens

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Compute the loss of one batch and add its gradients; called once a batch, before the optimizer's step.

        Raises:
            NonFiniteError: the loss or gradient of the optimizer step is not finite, and the run must stop.
            UserError: a batch does not fit in memory, and cannot be computed in parts.
        """
        # 1. Record the batch and the states of the random generators: a fault is replayed from them.
        batch = self.faults.begin(inputs)
        # 2. Forward and backward, in parts where memory has run out.
        batch.loss = self.splitter.step(super().training_step, model, inputs, num_items_in_batch)
        batch.largest = self.splitter.largest.tokens
        # 3. Drop the gradients of posteriors that this step does not update. Measure the gradient norms of layers.
        self.latent.after_backward()
        # 4. After the last batch of an optimizer step: check that losses and gradients are finite.
        return self.faults.judge(batch, num_items_in_batch)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Compute the loss per target token; see the class. Without `num_items_in_batch`, per token of this batch."""
        # 1. The model smooths labels itself where it can, and then keeps no logits.
        if self.fuses_loss:
            inputs = {**inputs, "label_smoothing": self.label_smoothing, "skip_logits": True}
        # 2. accelerate leaves autocast out where weights are sharded.
        with self.sharding.autocast():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _loss_from_logits(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The loss of `outputs.logits` [sentences, target, vocabulary] against `labels` [sentences, target]."""
        return cross_entropy(outputs["logits"], labels, self.label_smoothing, num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean loss since the last log and related values, or the metrics of an evaluation or a training."""
        if "loss" not in logs:
            # The parent counts as if each batch had the same number of sentences.
            for name in [name for name in logs if name.endswith(MISCOUNTED)]:
                del logs[name]
            self.faults.amend(logs)
            super().log(logs, start_time)
            return
        # 1. The speed since the last log.
        logs |= self.throughput.since_last()
        # 2. Sharded weights are gathered: the log's values of the model are computed from whole weights.
        with self.sharding.whole_weights():
            # 3. The loss becomes the mean over the steps that were made.
            self.faults.amend(logs)
            # 4. The values that the model reports are added.
            logs |= self.latent.logs()
            # 5. The parent stores the entry, and callbacks add to it (layers' use, gradient norms).
            super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count nothing: the parent's estimate walks through all parameters in every step and omits the decoder."""
        return 0

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate with gathered weights. The random generators of training stay as they were."""
        with self._evaluating():
            return super().evaluate(*args, **kwargs)

    def validation_losses(self) -> dict[str, float]:
        """Return the validation losses of the model in its present state, in nats per token.

        Returns:
            `loss`, which is smoothed as in training, and `nll`, which is not smoothed.
        """
        losses, dataloader = {}, self.get_eval_dataloader()
        self.callback_handler.eval_dataloader = dataloader
        try:
            with self._evaluating():
                for name, smoothing in (("loss", self.args.label_smoothing_factor), ("nll", 0.0)):
                    self.label_smoothing = smoothing
                    loss, tokens = self.summed_loss(dataloader)
                    losses[name] = loss / tokens
                    self.callback_handler.on_predict(self.args, self.state, self.control, losses)  # closes the bar
        finally:
            self.label_smoothing = self.args.label_smoothing_factor
        return losses

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), self.sharding.whole_weights():
            yield

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Compute the metrics of a dataset; no predictions are kept."""
        self.callback_handler.eval_dataloader = dataloader
        metrics = self.validate(dataloader, metric_key_prefix)
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset))

    def validate(self, dataloader: DataLoader, prefix: str) -> dict[str, float]:
        """Return the loss per token over all tokens (the parent averages the batches' means). Tasks add metrics."""
        loss, tokens = self.summed_loss(dataloader)
        return {f"{prefix}_loss": loss / tokens}

    def summed_loss(self, dataloader: DataLoader) -> tuple[float, float]:
        """Return the loss summed over all tokens, and the number of tokens, over all processes."""
        self.model.eval()
        device = self.args.device
        # float32 would round token counts above 2**24; Apple's GPUs support no wider type
        totals = torch.zeros(2, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        for inputs in dataloader:
            inputs = self._prepare_inputs(inputs)
            tokens = inputs["labels"].ne(-100).sum()
            with torch.no_grad(), self.accelerator.autocast():
                loss = self.compute_loss(self.model, inputs).to(totals.dtype)
            totals += torch.stack([loss * tokens, tokens.to(totals.dtype)])
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return tuple(self.accelerator.reduce(totals, "sum").tolist())

    # Checkpoints: saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint under another name and rename it once it is whole.

        Raises:
            UserError: one process cannot write. All processes raise it, and the unfinished checkpoint is deleted.
        """
        self.splitter.largest.gather()
        with self.saving.checkpoint():
            super()._save_checkpoint(model, trial)

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder for the parent's checkpoint: the draft's folder while a checkpoint is being written."""
        return self.saving.draft_folder or super()._get_output_dir(trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model. The parent writes only shards of a sharded model, so write the whole model beside them."""
        if not self.sharding.enabled:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.sharding.gathered_weights()
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # Training runs with `use_cache=False`, but the saved config must not contain this setting.
        self.model.config.use_cache = True
        with_lora = self.lora.begun and self.args.should_save  # one process writes
        if with_lora:
            state_dict = self.lora.merged_weights()
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model.config.use_cache = self.args.use_cache
        if with_lora:
            self.lora.save(Path(output_dir or self.args.output_dir))

    # Checkpoints: resuming from one

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights, if data and sharding are the same as when the checkpoint was saved."""
        self.saving.check_sharding(resume_from_checkpoint)
        self.saving.check_data(resume_from_checkpoint)
        with fitting(resume_from_checkpoint):
            if self.lora.begun:
                self.lora.load(Path(resume_from_checkpoint))
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse missing and unexpected weights, of which the parent would only warn."""
        check_loaded(self.model, load_result)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's moments and the state of the learning rate schedule."""
        with fitting(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the loss scale, under fp16."""
        with fitting(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_callback_state(self) -> None:
        """Look for the best checkpoint in the run's present folder, then load the state of the callbacks."""
        find_best(Path(self.args.output_dir), self.state)
        with fitting(f"{REGULAR}-{self.state.global_step}"):
            super()._load_callback_state()
        for callback in self.callback_handler.callbacks:  # a callback that is not in the checkpoint starts afresh
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks.setdefault(type(callback).__name__, callback.state())
        self.args.eval_on_start = False  # a resume is not a start: this evaluation would count in early stopping

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the states of the random generators, or set new seeds if the number of processes has changed."""
        if self.saving.reseeds(checkpoint):
            return
        with fitting(checkpoint):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        """Load the best weights at the end of training, unless a signal ended it."""
        if self.preemption.agreed:  # the run is resumed later, and there may be little time
            return
        best = Path(self.state.best_model_checkpoint)
        check_weights(best, self.saving.run_id)
        if self.lora.begun:
            with fitting(str(best)):
                self.lora.load(best)
        else:
            super()._load_best_model()

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Return batches by tokens. accelerate deals them out to the processes; for a stream, `StreamBatches` does."""
        args, multiple = self.args, self.data_collator.pad_to_multiple_of
        collator = self.train_collator or self.data_collator
        logger.info("lengths in a batch are padded to multiples of %d (training.pad_to_multiple_of)", multiple)
        if isinstance(self.train_dataset, IterableDataset):
            stream = StreamBatches(
                self.train_dataset,
                args.max_tokens,
                seed=args.order_seed,
                buffer_size=self.data.shuffle_buffer,
                length_multiple=multiple,
                batch_by=args.batch_by,
                rank=args.process_index,
                world_size=args.world_size,
                batch_multiple=args.world_size * args.gradient_accumulation_steps,
                max_length=self.data.max_length,
            )
            if args.dataloader_num_workers:
                logger.info("a stream is read without workers: dataloader_num_workers is not used")
            self.remove_callback(StreamPosition)
            self.add_callback(StreamPosition())
            endless = EndlessStream(stream)
            return DataLoader(endless, batch_size=None, collate_fn=collate_stream(collator, endless))
        sampler = self._sampler(
            self.train_dataset,
            args.max_tokens,
            shuffle=True,
            batch_multiple=args.world_size * args.gradient_accumulation_steps,
            copies=self.copies(),
        )
        self.remove_callback(EpochCallback)
        self.add_callback(EpochCallback(sampler, collator))
        persistent = self.args.dataloader_persistent_workers
        return self.accelerator.prepare(self._loader(self.train_dataset, sampler, collator, persistent))

    def copies(self) -> Any:
        """Return how often each training row is seen in an epoch. None: once."""
        if self.data.sampling_temperature == 1:
            return None
        pairs = self.train_dataset["pair"][:]
        return copies_by_temperature(pairs, self.data.sampling_temperature, self.data.pairs)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """Return batches by tokens for validation, each pair once, longest first."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        longest = max(max(dataset["source_length"][:]), max(dataset["target_length"][:]))
        multiple = self.data_collator.pad_to_multiple_of
        max_tokens = max(self.args.max_tokens, round_up(longest, multiple))  # no pair may be left out
        sampler = self._sampler(dataset, max_tokens, shuffle=False, batch_multiple=self.args.world_size)
        # Each evaluation makes a new loader, of which nothing may stay in memory. So there are no persistent workers,
        # and `accelerator.prepare`, which keeps each loader, is not used.
        return prepare_data_loader(
            self._loader(dataset, sampler, self.data_collator, persistent_workers=False),
            self.args.device,
            num_processes=self.args.world_size,
            process_index=self.args.process_index,
            put_on_device=True,
        )

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """Batches as for validation."""
        return self.get_eval_dataloader(test_dataset)

    def _sampler(
        self, dataset: Dataset, max_tokens: int, shuffle: bool, batch_multiple: int, copies: Any = None
    ) -> TokenBatchSampler:
        return TokenBatchSampler(
            dataset["source_length"][:],
            dataset["target_length"][:],
            max_tokens,
            seed=self.args.order_seed,
            batch_multiple=batch_multiple,
            length_multiple=self.data_collator.pad_to_multiple_of,
            batch_by=self.args.batch_by,
            shuffle=shuffle,
            copies=copies,
        )

    def _loader(
        self, dataset: Dataset, sampler: TokenBatchSampler, collator: Any, persistent_workers: bool
    ) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=persistent_workers,
            worker_init_fn=outlive_signals,
        )
