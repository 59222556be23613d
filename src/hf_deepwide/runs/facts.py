"""The facts in `results.json` beside the scores: versions, machine, and how the final weights were trained."""

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
    """Return the facts in `results.json` about how the final weights were trained."""
    mark = read_mark(run)  # of the training, which perhaps ran on another machine
    counted = Throughput(**state.stateful_callbacks["Throughput"]["args"])
    # a run that began with an older version of this library may lack these counts
    later = {
        "processor_minutes": counted.processor_minutes,
        "data_share": counted.data_seconds / counted.seconds,
        "peak_memory_bytes": counted.peak_memory_bytes,
    }
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    best = {
        f"best_validation_{name}": choose(entry[f"eval_{name}"] for entry in evaluations if f"eval_{name}" in entry)
        for name, choose in (("loss", min), ("bleu", max))
        if any(f"eval_{name}" in entry for entry in evaluations)
    }
    return {
        "steps": state.global_step,
        "epochs": state.epoch or None,  # unknown for a stream that was not read to its end
        "target_tokens": counted.target_tokens,
        "tokens_per_second": counted.target_tokens / counted.seconds,
        "minutes": counted.minutes,
        **{name: value for name, value in later.items() if value},
        **best,
        "validation_curve": [[entry["step"], entry["eval_loss"]] for entry in evaluations],
        "weights": weights,
        **{name: mark[name] for name in ("precision", "attention", "processes")},
        "threads": torch.get_num_threads(),
        "padding": mark.get("padding", 8),  # older versions always padded to multiples of 8
    }


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the results."""
    packages = ("hf_deepwide", "torch", "transformers", "tokenizers", "datasets", "accelerate", "sacrebleu")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


# Instruction sets that change how fast matrices are multiplied, or how sums are rounded. Processors of one brand may
# differ in them, and a virtual machine may hide them.
INSTRUCTION_SETS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"),  # x86
    *("asimd", "bf16", "i8mm", "sve", "sve2"),  # ARM
)


def machine() -> dict[str, Any]:
    """Processor and its instruction sets, the cores this process may use, and graphics cards."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = describe(cpuinfo.read_text(encoding="utf-8")) if cpuinfo.is_file() else {}
    processor = cpu.get("model name") or platform.processor() or platform.machine()
    known = {*cpu.get("flags", "").split(), *cpu.get("Features", "").split()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": processor,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in known],
        "cores": cores,
        "gpus": gpus,
    }


def describe(cpuinfo: str) -> dict[str, str]:
    """The fields of the first processor in the text of `/proc/cpuinfo`."""
    pairs = (line.partition(":") for line in cpuinfo.strip().split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
