"""Measure what smaller caches of oneDNN's kernels save and cost: memory and time of bfloat16 training on a CPU.

    python benchmarks/kernel_caches.py                                           # a table
    python benchmarks/kernel_caches.py --output benchmarks/results/kernel_caches # and kernel_caches.json, .md

The vanilla model of the studies (6 + 3 layers, d 128) computes the loss and gradients of batches of many shapes, with
up to 4,096 tokens. Each measurement is a process of its own. Its caches have the default size of PyTorch and oneDNN,
or they are bounded as in training (`hf_deepwide.training.memory`). The two kinds of process take turns. What counts is
the ratio of their values in the same round, as the median over the rounds. Time is processor time, which other work on
the machine changes less.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from reports import markdown, measured_on, write_report
from transformers import set_seed

from hf_deepwide import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_deepwide.training.memory import bound_kernel_caches, keep_memory, peak_memory

SIZE = {
    "vocab_size": 8000, "d_model": 128, "encoder_layers": 6, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "dropout": 0.1,
}  # fmt: skip
MAX_TOKENS = 4096
LENGTHS = range(8, 40)
CACHES = ("default", "bounded")
WARM_UP = 10  # steps that are not timed


def measure(bounded: bool, steps: int) -> dict[str, float]:
    """Train in this process; return the peak memory in MiB, and the processor seconds of a step."""
    torch.set_num_threads(1)
    keep_memory()
    if bounded:
        bound_kernel_caches()
    set_seed(1)
    model = VanillaTransformerForConditionalGeneration._from_config(
        VanillaTransformerConfig(**SIZE), attn_implementation="eager"
    ).train()
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            begin = time.process_time()
        source, target = random.choices(LENGTHS, k=2)
        rows = MAX_TOKENS // max(source, target)
        sources, labels = (torch.randint(4, SIZE["vocab_size"], (rows, length)) for length in (source, target))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=sources, attention_mask=torch.ones_like(sources), labels=labels).loss
        loss.backward()
        model.zero_grad()
    return {"peak_mib": peak_memory() / 2**20, "seconds_per_step": (time.process_time() - begin) / steps}


def in_a_process(caches: str, steps: int) -> dict[str, float]:
    """Call `measure` in a new process, which has no kernels in its caches."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("CACHE_CAPACITY")}
    command = [sys.executable, __file__, "--measure", caches, "--steps", str(steps)]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def medians(rounds: list[dict[str, dict[str, float]]], caches: str) -> dict[str, float]:
    """The medians over the rounds: of each measured value, and of its ratio to the default's in the same round."""
    found = {}
    for key, ratio in (("peak_mib", "peak_by_default"), ("seconds_per_step", "seconds_by_default")):
        found[key] = statistics.median(each[caches][key] for each in rounds)
        found[ratio] = statistics.median(each[caches][key] / each["default"][key] for each in rounds)
    return found


def table(report: dict) -> str:
    """The report as Markdown."""
    rows = [
        {
            "kernels that are kept": caches,
            "peak memory": f"{row['peak_mib'] / 1024:.2f} GiB ({row['peak_by_default']:.2f} x)",
            "a step, processor's time": f"{row['seconds_per_step']:.3f} s ({row['seconds_by_default']:.2f} x)",
        }
        for caches, row in report["caches"].items()
    ]
    return (
        f"{report['settings']['steps']} steps, batches of up to {len(LENGTHS) ** 2:,} shapes, bfloat16, one thread; "
        f"medians of {report['settings']['rounds']} rounds, and of the ratios to the default in the same round.\n\n"
    ) + markdown(rows)


def main() -> None:
    """Measure both kinds of cache in turns, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="measured steps of each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--output", type=Path, help="write the results here, as .json and .md")
    parser.add_argument("--measure", choices=CACHES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure == "bounded", args.steps)))
        return
    rounds = []
    for number in range(args.rounds):
        rounds.append({caches: in_a_process(caches, args.steps) for caches in CACHES})
        print(f"round {number + 1} of {args.rounds}: {rounds[-1]}", flush=True)
    report = {
        **measured_on(),
        "threads": 1,
        "settings": {"steps": args.steps, "rounds": args.rounds},
        "caches": {caches: medians(rounds, caches) for caches in CACHES},
    }
    print(table(report))
    if args.output:
        write_report(args.output, report, table)


if __name__ == "__main__":
    main()
