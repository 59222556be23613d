"""What `results.json` says beside the scores: versions, machine, and how the final weights came about."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from ..training.callbacks import Throughput
from .recipe import read_mark


def training_facts(run: Path, state: TrainerState, weights: str) -> dict[str, Any]:
    """What `results.json` says of how the final weights came about."""
    mark = read_mark(run)  # as it was trained, perhaps not on this machine
    counted = Throughput(**state.stateful_callbacks["Throughput"]["args"])
    # a run that an older version of this library began may not have counted them
    later = {"data_share": counted.data_seconds / counted.seconds, "peak_memory_bytes": counted.peak_memory_bytes}
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    best = {
        f"best_validation_{name}": choose(entry[f"eval_{name}"] for entry in evaluations if f"eval_{name}" in entry)
        for name, choose in (("loss", min), ("bleu", max))
        if any(f"eval_{name}" in entry for entry in evaluations)
    }
    return {
        "steps": state.global_step,
        "epochs": state.epoch,
        "target_tokens": counted.target_tokens,
        "tokens_per_second": counted.target_tokens / counted.seconds,
        "minutes": counted.minutes,
        **{name: value for name, value in later.items() if value},
        **best,
        "validation_curve": [[entry["step"], entry["eval_loss"]] for entry in evaluations],
        "weights": weights,
        **{name: mark[name] for name in ("precision", "attention", "processes")},
    }


def versions() -> dict[str, str]:
    """Of Python and the packages that have a part in the results."""
    packages = ("hf_deepwide", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def machine() -> dict[str, Any]:
    """Processor, the cores this process may use, and graphics cards."""
    processor = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        names = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        processor = names[0].partition(":")[2].strip() if names else processor
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"processor": processor, "cores": cores, "gpus": gpus}
