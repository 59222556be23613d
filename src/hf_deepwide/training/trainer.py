"""The trainer: `Seq2SeqTrainer` with batches by tokens and an honest loss per token."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Seq2SeqTrainer,
)
from transformers.trainer_utils import EvalLoopOutput

from ..data.arguments import DataArguments
from ..data.batches import TokenBatchSampler, TranslationCollator
from ..data.sampling import copies_by_temperature
from ..data.streaming import EndlessStream, StreamBatches
from ..errors import UserError
from ..evaluation.scoring import translate_and_score
from ..evaluation.translate import EvaluationArguments, translate
from ..models.loss import token_count
from ..models.modeling_base import DeepWidePreTrainedModel
from ..progress import shows_bars
from .arguments import TranslationTrainingArguments
from .callbacks import EpochCallback, PlainProgress, SeedByRank, Throughput, TranslationProgress
from .depth import DepthTraining
from .faults import FaultGuard
from .preemption import Preemption, outlive_signals
from .saving import Saving
from .sharding import ShardedTraining
from .stream_position import StreamPosition, collate_stream

logger = logging.getLogger(__name__)


# A method that several of these parts have begins in TranslationTrainer, and each calls that of the next, from left to
# right, in or before its own work:
#   training_step   FaultGuard, DepthTraining, Trainer. On the way back: gradients are there, DepthTraining takes those
#                   of posteriors away that are not to move, and FaultGuard judges what the optimizer would be given.
#   log             all of them. The speed is added first. ShardedTraining gathers whole weights around the rest, as
#                   DepthTraining looks into the model; FaultGuard sets the loss right before Trainer keeps it.
#   evaluate        TranslationTrainer puts the random generators aside, ShardedTraining gathers weights within.
#   compute_loss    TranslationTrainer says how, ShardedTraining under which precision.
class TranslationTrainer(ShardedTraining, FaultGuard, DepthTraining, Saving, Seq2SeqTrainer):
    """Trains any encoder-decoder model on encoded pairs.

    The loss is the label-smoothed cross-entropy per target token of the whole optimizer step, over all devices and
    accumulation steps alike, so that N processes compute what one process with N accumulation steps computes.
    Models that compute it themselves (`supports_label_smoothing`) are asked to, and to keep no logits; from all
    others only logits are taken, as several of them (Marian, BART) average each batch on its own.

    Evaluation draws no random numbers of training's, so how often one evaluates does not change what is learnt.

    Args:
        model: the model; its `generation_config` is used as it is.
        args: the arguments.
        tokenizer: its tokenizer.
        train_dataset: what `data.batches.encode` returns: a dataset, or a stream (which needs `max_steps`).
        eval_dataset: the encoded validation set.
        eval_texts: the same with the columns `source` and `target`, for `predict_with_generate`.
        evaluation: how validation is translated and scored; beams are `args.generation_num_beams`.
        data: the languages, and how often the sentences of each pair are seen.
        data_collator: what pads a batch, if it is not translation that is trained.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TranslationTrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: Any = None,
        eval_dataset: Dataset | None = None,
        eval_texts: Dataset | None = None,
        evaluation: EvaluationArguments | None = None,
        data: DataArguments | None = None,
        data_collator: TranslationCollator | None = None,
    ) -> None:
        if args.ddp_find_unused_parameters is None and isinstance(model, DeepWidePreTrainedModel):
            args.ddp_find_unused_parameters = False  # there are none: what is skipped has gradients of zero
        self.fuses_loss = getattr(model, "supports_label_smoothing", False)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or TranslationCollator(tokenizer, model.config.decoder_start_token_id),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_loss_func=None if self.fuses_loss else self._loss_from_logits,
        )
        self.label_smoother = None  # the parent's would take the labels away from models that compute the loss
        self.eval_texts = eval_texts
        self.data = data or DataArguments()
        self.evaluation = dataclasses.replace(
            evaluation or EvaluationArguments(), num_beams=args.generation_num_beams or 1, metrics=["bleu"]
        )
        self.preemption = Preemption()
        self.add_callback(self.preemption)
        self.add_callback(Throughput())
        self.add_callback(SeedByRank())
        if args.early_stopping_patience:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(TranslationProgress() if shows_bars() else PlainProgress())

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Batches by tokens; accelerate deals them out to the processes."""
        args = self.args
        if isinstance(self.train_dataset, IterableDataset):
            stream = StreamBatches(
                self.train_dataset,
                args.max_tokens,
                seed=self._data_seed,
                buffer_size=self.data.shuffle_buffer,
                rank=args.process_index,
                world_size=args.world_size,
                max_length=self.data.max_length,
            )
            self.add_callback(StreamPosition())
            return DataLoader(EndlessStream(stream), batch_size=None, collate_fn=collate_stream(self.data_collator))
        copies = None
        if self.data.sampling_temperature > 1:
            pairs = self.train_dataset["pair"][:]
            copies = copies_by_temperature(pairs, self.data.sampling_temperature, self.data.pairs)
        sampler = self._sampler(
            self.train_dataset,
            args.max_tokens,
            shuffle=True,
            batch_multiple=args.world_size * args.gradient_accumulation_steps,
            copies=copies,
        )
        self.remove_callback(EpochCallback)
        self.add_callback(EpochCallback(sampler, self.data_collator))
        persistent = self.args.dataloader_persistent_workers
        return self.accelerator.prepare(self._loader(self.train_dataset, sampler, persistent))

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """The same for validation, each pair once, longest first."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        longest = max(max(dataset["source_length"]), max(dataset["target_length"]))
        multiple = self.data_collator.pad_to_multiple_of
        max_tokens = max(self.args.max_tokens, -(-longest // multiple) * multiple)  # no pair may be left out
        sampler = self._sampler(dataset, max_tokens, shuffle=False, batch_multiple=self.args.world_size)
        # Each evaluation makes a loader of its own, of which nothing may stay behind: neither workers that persist,
        # nor, as `accelerator.prepare` keeps it, the loader.
        return prepare_data_loader(
            self._loader(dataset, sampler, persistent_workers=False),
            self.args.device,
            num_processes=self.args.world_size,
            process_index=self.args.process_index,
            put_on_device=True,
        )

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """As for validation."""
        return self.get_eval_dataloader(test_dataset)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _sampler(
        self, dataset: Dataset, max_tokens: int, shuffle: bool, batch_multiple: int, copies: Any = None
    ) -> TokenBatchSampler:
        return TokenBatchSampler(
            dataset["source_length"][:],
            dataset["target_length"][:],
            max_tokens,
            seed=self._data_seed,
            batch_multiple=batch_multiple,
            length_multiple=self.data_collator.pad_to_multiple_of,
            shuffle=shuffle,
            copies=copies,
        )

    def _loader(self, dataset: Dataset, sampler: TokenBatchSampler, persistent_workers: bool) -> DataLoader:
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=persistent_workers,
            worker_init_fn=outlive_signals,
        )

    # Loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss per target token; see the class. Without `num_items_in_batch`, per token of this batch."""
        if self.fuses_loss:
            inputs = {**inputs, "label_smoothing": self.args.label_smoothing_factor, "skip_logits": True}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _loss_from_logits(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Of `outputs.logits` [sentences, target, vocabulary] and `labels` [sentences, target]."""
        total = nn.functional.cross_entropy(
            outputs["logits"].flatten(0, 1).float(),
            labels.flatten(),
            label_smoothing=self.args.label_smoothing_factor,
            reduction="sum",
        )
        return total / token_count(labels, num_items_in_batch)

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the parent, with the random generators left as they were."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss per token over all tokens (the parent averages the batches' means), and BLEU where asked for."""
        self.callback_handler.eval_dataloader = dataloader
        loss, tokens = self.summed_loss(dataloader)
        metrics = {f"{metric_key_prefix}_loss": loss / tokens}
        if self.args.predict_with_generate and self.eval_texts is not None and metric_key_prefix == "eval":
            number = 1 + sum("eval_loss" in entry for entry in self.state.log_history)
            if number % self.args.generation_every == 0:
                metrics |= self._bleu()
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset))

    def summed_loss(self, dataloader: DataLoader) -> tuple[float, float]:
        """The loss summed over all tokens, and their number, over all processes."""
        self.model.eval()
        totals = torch.zeros(2, device=self.args.device)
        for inputs in dataloader:
            inputs = self._prepare_inputs(inputs)
            tokens = inputs["labels"].ne(-100).sum()
            with torch.no_grad(), self.accelerator.autocast():
                totals += torch.stack([self.compute_loss(self.model, inputs) * tokens, tokens.float()])
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return tuple(self.accelerator.reduce(totals, "sum").tolist())

    def translate(
        self,
        sources: Sequence[str],
        evaluation: EvaluationArguments,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> list[str]:
        """Translate on all processes, each a share; each gets all translations, in order."""
        rank, world = self.args.process_index, self.args.world_size
        share = translate(
            self.model,
            self.processing_class,
            sources[rank::world],
            evaluation,
            source_lang=source_lang,
            target_lang=target_lang,
        )
        if world == 1:
            return share
        shares = gather_object([share])
        translations = [""] * len(sources)
        for start, texts in enumerate(shares):
            translations[start::world] = texts
        return translations

    def _bleu(self) -> dict[str, float]:
        """BLEU on the validation set; of several language pairs, the mean and that of each."""
        scores, _ = translate_and_score(self.translate, self.eval_texts, self.data, self.evaluation)
        if "pairs" not in scores:
            return {"eval_bleu": scores["bleu"]}
        by_pair = {f"eval_bleu_{pair}": of_pair["bleu"] for pair, of_pair in scores["pairs"].items()}
        return {"eval_bleu": scores["average"]["bleu"], **by_pair}

    # Speed

    @property
    def throughput(self) -> Throughput:
        """The counter of tokens; resuming puts a new one in its place, so it is looked up."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, Throughput))

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """As the parent; the target tokens of the step, which it counts over all processes, are also added up.

        So is the time of waiting for its batches.
        """
        batches, tokens = super().get_batch_samples(self.throughput.timed(epoch_iterator), num_batches, device)
        if tokens is not None:
            self.throughput.count(tokens)
        return batches, tokens

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: the parent's estimate walks through all parameters in every step and knows nothing of the decoder."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the parent, with the speed since the last log beside the loss."""
        if "loss" in logs:
            logs |= self.throughput.since_last()
        super().log(logs, start_time)

    # Checkpoints

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # Tied weights and constant tables are not in a checkpoint; the parent reports them as missing.
        expected = {*self.model.all_tied_weights_keys, *(self.model._keys_to_ignore_on_save or ())}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in expected]
        if odd := sorted([*load_result.missing_keys, *load_result.unexpected_keys]):
            raise UserError(
                f"the checkpoint has no weights for {odd[0]}"
                if odd[0] in load_result.missing_keys
                else f"the checkpoint has weights for {odd[0]}, which the model does not have"
            )
