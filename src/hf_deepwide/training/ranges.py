"""Values of training arguments that Transformers takes as they come, and which fail late or train nonsense."""

import math
from typing import NamedTuple

import torch
from transformers import Seq2SeqTrainingArguments, Trainer, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.utils import is_flash_attn_2_available, is_kernels_available, is_liger_kernel_available

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
WANTS_MODEL = ("galore", "apollo", "lomo", "adalomo")  # optimizers that cannot be made without a model
SEEDS = 2**32  # how many there are for NumPy


class Range(NamedTuple):
    """What a number may be."""

    least: float
    below: float = math.inf
    excludes_least: bool = False

    def __str__(self) -> str:
        least = f"more than {self.least}" if self.excludes_least else f"{self.least} or more"
        return least if math.isinf(self.below) else f"{least}, and less than {self.below}"

    def holds(self, value: float) -> bool:
        """True if the value is within; NaN is within none, nor is infinity."""
        return self.least <= value < self.below and not (self.excludes_least and value == self.least)


RANGES = {
    "max_tokens": Range(1),
    "average_last": Range(0),
    "early_stopping_patience": Range(0),
    "generation_every": Range(1),
    "generation_num_beams": Range(1),
    "learning_rate": Range(0),
    "weight_decay": Range(0),
    "adam_beta1": Range(0, 1),
    "adam_beta2": Range(0, 1),
    "adam_epsilon": Range(0, excludes_least=True),
    "max_grad_norm": Range(0),
    "label_smoothing_factor": Range(0, 1),
    "gradient_accumulation_steps": Range(1),
    "num_train_epochs": Range(0, excludes_least=True),
    "logging_steps": Range(0, excludes_least=True),
    "eval_steps": Range(0, excludes_least=True),
    "save_steps": Range(0, excludes_least=True),
    "save_total_limit": Range(1),
    "seed": Range(0, SEEDS),
    "data_seed": Range(0, SEEDS),
    "dataloader_num_workers": Range(0),
}


def check_ranges(args: Seq2SeqTrainingArguments) -> None:
    """Refuse numbers out of range, and names of what does not exist or is not installed.

    Raises:
        ValueError: names the argument, its value, and what is accepted.
    """
    for name, accepted in RANGES.items():
        value = getattr(args, name)
        if value is not None and not accepted.holds(value):
            raise ValueError(f"{name} is {value}; accepted: {accepted}")
    if args.max_steps == 0 or args.max_steps < -1:
        raise ValueError(f"max_steps is {args.max_steps}; accepted: 1 or more, or -1 for num_train_epochs epochs")
    if args.attn_implementation not in ATTENTION:
        raise ValueError(
            f"attn_implementation is {args.attn_implementation!r}; accepted: auto, {', '.join(ATTENTION)}"
        )
    if args.attn_implementation == "flash_attention_2" and not (is_flash_attn_2_available() or is_kernels_available()):
        raise ValueError(
            "attn_implementation is flash_attention_2, which needs a GPU and the package flash-attn; accepted "
            "without them: auto, sdpa, eager"
        )
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("use_liger_kernel needs the package liger-kernel, which is not installed")
    installed = get_available_reporting_integrations()
    for name in args.report_to or []:
        if name not in installed:
            raise ValueError(f"report_to is {name!r}; accepted: none, or what is installed: {', '.join(installed)}")
    if args.torch_compile_backend and args.torch_compile_backend not in torch._dynamo.list_backends():
        known = ", ".join(torch._dynamo.list_backends())
        raise ValueError(f"torch_compile_backend is {args.torch_compile_backend!r}; accepted: {known}")
    if not str(args.optim).split(".")[-1].lower().startswith(WANTS_MODEL):
        _try_optimizer(args)


def _try_optimizer(args: Seq2SeqTrainingArguments) -> None:
    """Make the optimizer and the scheduler for one parameter, so that what is wrong shows before anything is read."""
    try:
        cls, options = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **options)
    except (ValueError, TypeError, ImportError) as error:
        raise ValueError(f"optim {args.optim} cannot be made (optim_args {args.optim_args!r}): {error}") from error
    steps = max(args.max_steps, 1)
    try:
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"lr_scheduler_type {args.lr_scheduler_type} cannot be made with lr_scheduler_kwargs "
            f"{args.lr_scheduler_kwargs}: {error}"
        ) from error
