"""The training arguments: all fields of `Seq2SeqTrainingArguments` with our defaults, and our own fields."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..errors import quote
from ..limits import check_numbers
from ..redaction import without_secrets
from .depth import DepthArguments
from .faults import FaultArguments
from .lora import LoraArguments
from .ranges import RANGES, check_batches, check_choices, check_files, check_steps, follow_metric

logger = logging.getLogger(__name__)

_EVALUATION = "validation is the loss per token and, with predict_with_generate, BLEU; no logits are kept"
# Fields of the parent that would be ignored, or would break token batches or resuming, and what to use instead.
REFUSED = {
    "per_device_train_batch_size": "batches are counted in tokens; set training.max_tokens",
    "per_device_eval_batch_size": "batches are counted in tokens; set training.max_tokens or evaluation.max_tokens",
    "auto_find_batch_size": "batches are counted in tokens; set training.max_tokens",
    "train_sampling_strategy": "pairs of similar length are always put together",
    "length_column_name": "pairs of similar length are always put together",
    "sortish_sampler": "pairs of similar length are always put together",
    "dataloader_drop_last": "every pair is seen once an epoch; none is dropped",
    "remove_unused_columns": "the collator picks the columns it needs",
    "generation_config": "validation uses predict_with_generate, generation_num_beams and the section evaluation",
    "generation_max_length": "evaluation.max_length_factor and evaluation.max_length_offset say how long outputs get",
    "include_num_input_tokens_seen": "target tokens and their speed are always logged",
    "label_names": "labels are always called labels",
    "logging_nan_inf_filter": "a loss that is not finite is never hidden; see training.on_nonfinite",
    "debug": "what is not finite is found and saved anyway; see training.on_nonfinite",
    "dataloader_multiprocessing_context": "workers start as PyTorch's do by default",
    "dataloader_in_order": "a run is resumed where it was in its data, so batches keep their order",
    "do_train": "what a run does follows from its recipe",
    "do_eval": "set training.eval_strategy",
    "do_predict": "what a run does follows from its recipe",
    "resume_from_checkpoint": "an interrupted run is resumed by itself",
    "save_only_model": "a run is resumed from its checkpoints, which need the optimizer's state",
    "ignore_data_skip": "a run is resumed where it was in its data",
    "restore_callback_states_from_checkpoint": "a run is resumed with what it had counted",
    "enable_jit_checkpoint": "a run that SIGTERM or Ctrl-C ends always saves",
    "deepspeed": "its checkpoints cannot be checked before a run goes on; training.fsdp spreads weights over GPUs",
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "validation has the precision of training"),
    "average_tokens_across_devices": "the loss is always per target token of the whole step",
    **dict.fromkeys(
        (
            "prediction_loss_only",
            "eval_accumulation_steps",
            "batch_eval_metrics",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "include_for_metrics",
        ),
        _EVALUATION,
    ),
    "neftune_noise_alpha": "no noise is added to the embeddings of these models; raise model.dropout",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        "share a finished run with `hf-deepwide share`",
    ),
}


def _default(name: str, value: Any) -> Any:
    """The parent's field with another default."""
    return field(default=value, metadata=Seq2SeqTrainingArguments.__dataclass_fields__[name].metadata)


class WithoutSecrets:
    """Training arguments whose tokens, passwords and keys are never written. It must be the first base class."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled into `training_args.bin` of every checkpoint: all fields, without secrets."""
        return without_secrets(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for reporters, without secrets. The parent keeps secrets that are inside dictionaries."""
        return without_secrets(super().to_dict())  # type: ignore[misc]


class OneDevice:
    """Training arguments of a process that trains on one device."""

    @property
    def n_gpu(self) -> int:
        """The number of GPUs, at most 1. Transformers would use all GPUs, in the threads of `DataParallel`."""
        return min(super().n_gpu, 1)  # type: ignore[misc]

    def tell_of_idle_gpus(self) -> None:
        """Log how to use the other GPUs, if there are any and no launcher has started more processes."""
        if self.n_gpu and self.world_size == 1 and (found := torch.cuda.device_count()) > 1:  # type: ignore[attr-defined]
            logger.warning(
                "this process trains on one of %d GPUs; for all of them start with "
                "accelerate launch --num_processes %d -m hf_deepwide.cli train …", found, found,
            )  # fmt: skip


@dataclass
class TranslationTrainingArguments(
    WithoutSecrets, OneDevice, DepthArguments, FaultArguments, LoraArguments, Seq2SeqTrainingArguments
):
    """`Seq2SeqTrainingArguments` with batches by tokens, and with the defaults of translation training.

    The defaults are those of the papers (inverse square root, Adam betas 0.9 and 0.98, label smoothing 0.1, no weight
    decay). The model is evaluated and saved once an epoch, and the best checkpoint is kept.

    Raises:
        ValueError: a value is out of range, or fields contradict each other.
    """

    max_tokens: int = field(
        default=4096,
        metadata={"help": "Most tokens in a batch, per device, counted as batch_by says."},
    )
    batch_by: str = field(
        default="padded",
        metadata={
            "help": "How max_tokens counts. padded: sentences * max(longest source, longest target). real: all tokens "
            "of the side that has more, without padding."
        },
    )
    pad_to_multiple_of: int | str = field(
        default="auto",
        metadata={
            "help": "Lengths in a batch are padded to a multiple of this number. auto: 8 on a GPU; on a processor 2 "
            "under bf16, else 1."
        },
    )
    average_last: int = field(
        default=0,
        metadata={
            "help": "The final model is the mean of the last so many checkpoints; 0: it is the best checkpoint."
        },
    )
    early_stopping_patience: int = field(
        default=0,
        metadata={"help": "Stop after so many evaluations in a row without a better metric_for_best_model; 0: never."},
    )
    generation_every: int = field(
        default=1,
        metadata={"help": "With predict_with_generate: translate the validation set at every n-th evaluation only."},
    )
    attn_implementation: str = field(
        default="auto",
        metadata={
            "help": "eager, sdpa, flash_attention_2 or flex_attention; auto: eager (matrix products) on a CPU under "
            "bf16, where it is twice as fast as sdpa, else sdpa."
        },
    )
    keep_memory: bool = field(
        default=True,
        metadata={"help": "Tell glibc to keep freed memory between steps; see training/memory.py."},
    )
    bf16: bool | str = field(
        default="auto",
        metadata={"help": "bfloat16 autocast: true, false, or auto: where it is faster than float32."},
    )
    learning_rate: float = _default("learning_rate", 5e-4)
    lr_scheduler_type: str = _default("lr_scheduler_type", "inverse_sqrt")
    warmup_steps: float = _default("warmup_steps", 4000)
    adam_beta2: float = _default("adam_beta2", 0.98)
    label_smoothing_factor: float = _default("label_smoothing_factor", 0.1)
    eval_strategy: str = _default("eval_strategy", "epoch")
    save_strategy: str = _default("save_strategy", "epoch")
    load_best_model_at_end: bool = _default("load_best_model_at_end", True)
    save_total_limit: int | None = _default("save_total_limit", None)
    logging_steps: float = _default("logging_steps", 50)
    logging_nan_inf_filter: bool = _default("logging_nan_inf_filter", False)
    generation_num_beams: int | None = _default("generation_num_beams", 1)
    remove_unused_columns: bool = _default("remove_unused_columns", False)
    restore_callback_states_from_checkpoint: bool = _default("restore_callback_states_from_checkpoint", True)

    @property
    def device(self) -> torch.device:
        """The device of this process. A CPU gets no index, because Transformers 5.17 cannot resume with an index."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def order_seed(self) -> int:
        """The seed of the order of batches, and of random choices within them: masks, pieces of BPE-dropout."""
        return self.seed if self.data_seed is None else self.data_seed

    def __post_init__(self) -> None:
        """Check the numbers, replace `auto` and None by values, call the parent, and check that the fields agree."""
        check_numbers(self, RANGES)  # first, because the parent computes with the numbers and opens the files
        check_files(self)
        cpu_switch = os.environ.get("ACCELERATE_USE_CPU", "")  # set by `accelerate launch --cpu`
        on_cpu: bool = (
            self.use_cpu or cpu_switch.lower() in ("1", "true", "yes") or not torch.accelerator.is_available()
        )
        self.use_cpu: bool = on_cpu  # the parent refuses bf16 on a CPU unless `use_cpu` is set
        if self.bf16 == "auto":
            self.bf16 = not self.fp16 and (cpu_is_faster_in_bf16() if on_cpu else torch.cuda.is_bf16_supported(False))
        if not isinstance(self.bf16, bool):
            raise ValueError(f"bf16 is {quote(self.bf16)}; accepted: true, false, auto")
        if self.fp16 and on_cpu:
            raise ValueError("fp16 needs a GPU; on a CPU set bf16: auto, or neither")
        if self.pad_to_multiple_of == "auto":
            self.pad_to_multiple_of = (2 if self.bf16 else 1) if on_cpu else 8
        if not isinstance(self.pad_to_multiple_of, int):
            raise ValueError(f"pad_to_multiple_of is {quote(self.pad_to_multiple_of)}; accepted: a number, or auto")
        if self.attn_implementation == "auto":
            self.attn_implementation = "eager" if on_cpu and self.bf16 else "sdpa"
        if self.save_total_limit is None:
            # the newest checkpoint (to resume from), or all checkpoints that are averaged; and the best checkpoint
            self.save_total_limit = max(self.average_last, 1) + 1
        check_steps(self)
        self._check_saving()
        super().__post_init__()
        self._check()

    def _check_saving(self) -> None:
        """Check that each evaluation is saved. The parent checks it later, but its message uses other key names."""
        evaluated, saved = (getattr(each, "value", each) for each in (self.eval_strategy, self.save_strategy))
        if not self.load_best_model_at_end or not {evaluated, saved} <= {"no", "steps", "epoch"}:
            return
        if evaluated != saved:
            raise ValueError(
                f"load_best_model_at_end needs each evaluation saved, but eval_strategy is {evaluated} and "
                f"save_strategy {saved}; set both to steps, or both to epoch, or load_best_model_at_end: false"
            )
        evaluations = self.eval_steps or self.logging_steps
        if evaluated == "steps" and evaluations != self.save_steps:
            raise ValueError(
                f"load_best_model_at_end needs each evaluation saved, but eval_steps is {evaluations} (where it is "
                f"not set, logging_steps) and save_steps {self.save_steps}; set both to one number, or "
                "load_best_model_at_end: false"
            )

    def _check(self) -> None:
        self.check_faults()
        self.check_lora()
        check_batches(self)
        check_choices(self)
        follow_metric(self)
        if self.save_total_limit and self.save_total_limit <= self.average_last:
            raise ValueError(
                f"save_total_limit {self.save_total_limit} would delete checkpoints that average_last "
                f"{self.average_last} needs; set it to {self.average_last + 1} or more, or leave it out"
            )
        if self.save_total_limit == 1 and self.metric_for_best_model:
            # at the end the parent deletes all checkpoints but the best, and with them the history and optimizer
            raise ValueError(
                "save_total_limit 1 would keep the best checkpoint alone, but an interrupted run resumes from its "
                "newest checkpoint; set save_total_limit to 2 or more, or leave it out"
            )
        metric = (self.metric_for_best_model or "loss").removeprefix("eval_")
        if metric not in ("loss", "bleu"):
            raise ValueError(f"metric_for_best_model is {quote(metric)}; accepted: loss, bleu")
        if self.greater_is_better is not None and self.greater_is_better != (metric == "bleu"):
            best = "largest" if self.greater_is_better else "smallest"
            raise ValueError(
                f"greater_is_better: {str(self.greater_is_better).lower()} would keep the worst checkpoint, with the "
                f"{best} {metric}; leave greater_is_better out"
            )
        if metric == "bleu" and not (self.predict_with_generate and self.generation_every == 1):
            raise ValueError("metric_for_best_model: bleu needs predict_with_generate: true and generation_every: 1")
        if self.early_stopping_patience and not self.load_best_model_at_end:
            raise ValueError("early_stopping_patience needs load_best_model_at_end: true")
        self._check_evaluations()
        if self.save_strategy not in ("epoch", "steps"):
            raise ValueError(
                f"save_strategy is {SaveStrategy(self.save_strategy).value}; the final model is made from "
                "checkpoints, and a run is resumed from them: epoch or steps"
            )

    def _check_evaluations(self) -> None:
        """Refuse settings that need evaluations if the run makes no evaluation."""
        if self.eval_on_start and self.eval_strategy == "no":
            raise ValueError("eval_on_start needs evaluations, and eval_strategy is no")
        # if the model is evaluated once an epoch, eval_delay is in epochs
        in_steps = self.eval_strategy == "steps" and self.max_steps > 0
        end = self.max_steps if in_steps else self.num_train_epochs
        counted = in_steps or (self.eval_strategy == "epoch" and self.max_steps <= 0)
        if counted and self.eval_delay > end:
            raise ValueError(
                f"eval_delay {self.eval_delay:g} is more than the {end:g} {'steps' if in_steps else 'epochs'} of the "
                "training: nothing would be evaluated"
            )


def cpu_is_faster_in_bf16() -> bool:
    """Return True if training in bfloat16 is faster than in float32 on this processor.

    It is faster with AMX, with Arm's BF16, and with AVX-512 BF16 on AMD's processors, whose dot products run at full
    rate. On Intel's processors, AVX-512 BF16 alone does not pay for the conversions and for the emulated operations
    (benchmarks/speed/precision.py, on a processor of each x86 kind).
    """
    described = Path("/proc/cpuinfo")  # it exists on Linux only, and not in some sandboxes
    if not described.is_file():
        return False
    words = set(described.read_text(encoding="utf-8").split())
    return bool(words & {"amx_bf16", "bf16"}) or words >= {"AuthenticAMD", "avx512_bf16"}
