"""Checks of training arguments that Transformers does not check, and that would fail late or spoil the training."""

from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments, get_scheduler
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import SchedulerType
from transformers.training_args import ParallelMode
from transformers.utils import is_flash_attn_2_available, is_kernels_available, is_liger_kernel_available
from transformers.utils.logging import get_log_levels_dict

from ..data.batches import BatchBy
from ..errors import one_line, quote
from ..limits import Range
from ..reading import what_is

BATCH_BY = get_args(BatchBy)
ATTENTION = ("eager", "sdpa", "flash_attention_2", "flex_attention")
# Optimizers that need a model to be made: the prefixes of their names, and the packages that contain them.
WANTS_MODEL = {"galore": "galore_torch", "apollo": "apollo_torch", "lomo": "lomo_optim", "adalomo": "lomo_optim"}
FOLLOWS_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedules
SEEDS = 2**32  # the number of seeds that NumPy accepts


COUNT, STEPS, RATE = 1_000_000, 10**12, 1_000_000  # limits far beyond any real training

# Every argument that is a number and that a recipe may set.
RANGES = {
    "max_tokens": Range(1, 10**9),
    "pad_to_multiple_of": Range(1, 1024),
    "average_last": Range(0, COUNT),
    "early_stopping_patience": Range(0, COUNT),
    "generation_every": Range(1, COUNT),
    "generation_num_beams": Range(1, 1000),
    "learning_rate": Range(0, RATE),
    "posterior_learning_rate": Range(0, RATE, excludes_least=True),
    "inner_steps": Range(1, STEPS),
    "max_skipped": Range(1, STEPS),
    "lora_r": Range(0, COUNT),
    "lora_alpha": Range(0, COUNT, excludes_least=True),
    "lora_dropout": Range(0, 1, excludes_most=True),
    "weight_decay": Range(0, RATE),
    "adam_beta1": Range(0, 1, excludes_most=True),
    "adam_beta2": Range(0, 1, excludes_most=True),
    "adam_epsilon": Range(0, 1, excludes_least=True),
    "max_grad_norm": Range(0, RATE),
    "label_smoothing_factor": Range(0, 1, excludes_most=True),
    "neftune_noise_alpha": Range(0, RATE),
    "gradient_accumulation_steps": Range(1, COUNT),
    "num_train_epochs": Range(0, COUNT, excludes_least=True),
    "max_steps": Range(-1, STEPS),
    "warmup_steps": Range(0, STEPS),
    "logging_steps": Range(0, STEPS, excludes_least=True),
    "eval_steps": Range(0, STEPS, excludes_least=True),
    "eval_delay": Range(0, STEPS),
    "save_steps": Range(0, STEPS, excludes_least=True),
    "save_total_limit": Range(1, COUNT),
    "torch_empty_cache_steps": Range(1, STEPS),
    "seed": Range(0, SEEDS, excludes_most=True),
    "data_seed": Range(0, SEEDS, excludes_most=True),
    "dataloader_num_workers": Range(0, 1000),
    "dataloader_prefetch_factor": Range(1, 10_000),
    "ddp_bucket_cap_mb": Range(1, COUNT),
    "ddp_timeout": Range(1, COUNT),
    "local_rank": Range(-1, COUNT),
}


def check_files(args: Seq2SeqTrainingArguments) -> None:
    """Refuse a path that is not a regular file, such as a named pipe, as a JSON file.

    Raises:
        ValueError: the message names the argument and the path.
    """
    for name in ("accelerator_config", "fsdp_config", "deepspeed"):
        path = getattr(args, name)
        if isinstance(path, str) and (found := what_is(Path(path))) not in (None, "a file"):
            raise ValueError(f"{name}: {one_line(path)} is {found}, not a JSON file")


def check_steps(args: TrainingArguments) -> None:
    """Refuse `eval_steps` or `save_steps` if the strategy is epoch. Call this before the parent fills in defaults.

    Raises:
        ValueError: the message names the argument, its value, and what to set.
    """
    for kind in ("eval", "save"):
        strategy, steps = getattr(args, f"{kind}_strategy"), getattr(args, f"{kind}_steps")
        default = getattr(TrainingArguments, f"{kind}_steps")
        if getattr(strategy, "value", strategy) == "epoch" and steps != default:
            unset = "null" if default is None else f"{default}, the default"
            raise ValueError(
                f"{kind}_steps is {steps:g}, but has no effect with {kind}_strategy epoch. Set {kind}_strategy: "
                f"steps, or leave {kind}_steps out. If the recipe that is extended sets {kind}_steps, set it to "
                f"{unset}"
            )


def check_batches(args: Seq2SeqTrainingArguments) -> None:
    """Refuse values that the trainers with batches by tokens do not accept.

    Raises:
        ValueError: the message names the argument, its value, and what is accepted.
    """
    if args.max_steps == 0:
        raise ValueError(f"max_steps is {args.max_steps}; accepted: 1 or more, or -1 for num_train_epochs epochs")
    if args.batch_by not in BATCH_BY:
        raise ValueError(f"batch_by is {quote(args.batch_by)}; accepted: {', '.join(BATCH_BY)}")
    if args.attn_implementation not in ATTENTION:
        raise ValueError(
            f"attn_implementation is {quote(args.attn_implementation)}; accepted: auto, {', '.join(ATTENTION)}"
        )
    if args.attn_implementation == "flash_attention_2" and not (is_flash_attn_2_available() or is_kernels_available()):
        raise ValueError(
            "attn_implementation is flash_attention_2, which needs a GPU and the package flash-attn; accepted "
            "without them: auto, sdpa, eager"
        )
    if str(args.optim).split(".")[-1].lower().startswith("schedule_free"):
        raise ValueError(
            f"optim is {args.optim}, but checkpoints of a schedule-free optimizer would hold wrong weights; accepted: "
            "another optimizer. To average weights, set average_last"
        )
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name):
            raise ValueError(
                f"accelerator_config: {name} would cut batches, which are counted in tokens; leave it out"
            )


def check_choices(args: TrainingArguments) -> None:
    """Refuse options that do not exist or are not installed, and settings that the optimizer or schedule refuses.

    Raises:
        ValueError: the message names the argument, its value, and what is accepted.
    """
    if args.fsdp and args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise ValueError("fsdp spreads weights over several processes, and there is one; start more, or leave it out")
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("use_liger_kernel needs the package liger-kernel, which is not installed")
    levels = ["passive", *get_log_levels_dict()]
    for name in ("log_level", "log_level_replica"):
        if getattr(args, name) not in levels:
            raise ValueError(f"{name} is {quote(getattr(args, name))}; accepted: {', '.join(levels)}")
    if args.dataloader_persistent_workers and not args.dataloader_num_workers:
        raise ValueError("dataloader_persistent_workers needs dataloader_num_workers, which is 0")
    installed = get_available_reporting_integrations()
    for name in args.report_to or []:
        if name not in installed:
            raise ValueError(
                f"report_to is {quote(name)}; accepted: none, or what is installed: {', '.join(installed)}"
            )
    if args.torch_compile_backend and args.torch_compile_backend not in torch._dynamo.list_backends():
        known = ", ".join(torch._dynamo.list_backends())
        raise ValueError(f"torch_compile_backend is {quote(args.torch_compile_backend)}; accepted: {known}")
    if args.torch_compile_mode and args.torch_compile_mode not in (modes := torch._inductor.list_mode_options()):
        raise ValueError(f"torch_compile_mode is {quote(args.torch_compile_mode)}; accepted: {', '.join(modes)}")
    _try_checkpointing(args)
    optimizer = str(args.optim).split(".")[-1].lower()
    if args.optim_target_modules and not optimizer.startswith(("galore", "apollo")):
        raise ValueError(
            f"optim_target_modules is read by the optimizers galore and apollo, and optim is {optimizer}; leave it out"
        )
    package = next((package for name, package in WANTS_MODEL.items() if optimizer.startswith(name)), None)
    if package is None:
        _try_optimizer(args)
    elif not find_spec(package):
        raise ValueError(f"optim {optimizer} needs the package {package.replace('_', '-')}, which is not installed")


def follow_metric(args: TrainingArguments) -> None:
    """Set the `mode` of a scheduler that follows the metric. By default Transformers assumes that less is better.

    Raises:
        ValueError: the recipe sets the opposite mode.
    """
    if args.lr_scheduler_type not in FOLLOWS_METRIC or args.greater_is_better is None:
        return
    mode, given = "max" if args.greater_is_better else "min", args.lr_scheduler_kwargs or {}
    if given.get("mode", mode) != mode:
        raise ValueError(
            f"lr_scheduler_kwargs: mode is {quote(given['mode'])}, but for metric_for_best_model "
            f"{args.metric_for_best_model}, {'more' if args.greater_is_better else 'less'} is better; leave mode out"
        )
    args.lr_scheduler_kwargs = {**given, "mode": mode}


def _try_checkpointing(args: TrainingArguments) -> None:
    """Try gradient checkpointing on one number, so that wrong options are reported before any data are read."""
    renamed = hasattr(args, "activation_checkpointing_kwargs")  # by Transformers 5.23
    name = "activation_checkpointing_kwargs" if renamed else "gradient_checkpointing_kwargs"
    options = {"use_reentrant": False, **(getattr(args, name) or {})}
    prefix = f"{name}{' (once gradient_checkpointing_kwargs)' * renamed} {quote(options)}"
    if renamed:  # the Trainer of this version removes two options
        every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        if not isinstance(every, int) or not Range(1, COUNT).holds(every):
            raise ValueError(f"{prefix}: every_n_layers is {quote(every)}; accepted: {Range(1, COUNT)}")
        if not isinstance(offload, bool):
            raise ValueError(f"{prefix}: offload is {quote(offload)}; accepted: true, false")
    try:
        checkpoint(torch.nn.Identity(), torch.zeros(1), **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{prefix}: {one_line(error)}") from error


def _try_optimizer(args: TrainingArguments) -> None:
    """Try the optimizer and the scheduler on one parameter, so that errors are reported before any data are read."""
    try:
        cls, options = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **options)
    except (ValueError, TypeError, ImportError) as error:
        raise ValueError(
            f"optim {args.optim} cannot be made (optim_args {quote(args.optim_args)}): {one_line(error)}"
        ) from error
    steps = max(args.max_steps, 1)
    for name, value in (args.lr_scheduler_kwargs or {}).items():
        if isinstance(value, int | float) and not Range(-RATE, RATE).holds(value):
            raise ValueError(f"lr_scheduler_kwargs: {quote(name)} is {quote(value)}; accepted: {Range(-RATE, RATE)}")
        if name in ("min_lr", "lr_end") and isinstance(value, int | float) and value > args.learning_rate:
            raise ValueError(
                f"lr_scheduler_kwargs: {name} is {quote(value)}, more than learning_rate ({args.learning_rate}), so "
                f"the rate would rise to the end of training; lower {name}"
            )
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
            f"lr_scheduler_type {SchedulerType(args.lr_scheduler_type).value} cannot be made with lr_scheduler_kwargs "
            f"{quote(args.lr_scheduler_kwargs)}: {one_line(error)}"
        ) from error
