"""Memory that training a study's models takes: each in a process of its own, on the same batch.

    python benchmarks/quality/memory.py benchmarks/quality/multi30k.yaml

The peaks that runs report of themselves are of several processors, precisions and versions of this library. Here each
system takes some of the training steps of `speed.py`, in the precision and with the attention that runs have on this
processor. What counts is all that the process has held at most, the libraries among it.
"""

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from kept_runs import PRUNED, chosen, folder_of, load_results
from speed import as_runs_have, training_batch, training_step, untrained
from study import HERE, load_study
from transformers import set_seed

from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError, run_script
from hf_deepwide.training.memory import bound_kernel_caches, keep_memory, peak_memory
from hf_deepwide.training.run import machine

STEPS = 3  # by then gradients and the optimizer's state have been held at once


def memory_of_training(run: dict[str, Any], vocabulary: int, attention: str, precision: torch.dtype) -> int:
    """Most bytes that this process has held, one that does nothing else."""
    torch.set_num_threads(1)
    bound_kernel_caches()
    keep_memory()
    set_seed(0)
    step = training_step(untrained(run, vocabulary, attention).train(), training_batch(vocabulary), precision)
    for _ in range(STEPS):
        step()
    return peak_memory()


def main() -> None:
    """Train each for some steps, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study, a YAML file")
    parser.add_argument(
        "--results", type=Path, help="of the study, and for memory.json; default: results/STUDY beside this file"
    )
    args = parser.parse_args()
    study = load_study(args.study)
    results = args.results or HERE / "results" / study.name
    _, rows = chosen(study, load_results(study, results))
    if not rows:
        raise UserError(f"{results}: no run has ended; train models by study.py first")
    precision, attention = as_runs_have()
    vocabulary = study.recipe["tokenizer"]["vocab_size"]
    systems = {}
    for name, of_seeds in rows.items():
        if not name.startswith(PRUNED):
            run = of_seeds[study.seeds[0]]
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                peak = process.submit(memory_of_training, run, vocabulary, attention, precision).result()
            systems[name] = {"run": folder_of(run), "parameters": run["parameters"], "peak_memory_bytes": peak}
            print(f"{name}: {peak / 2**30:.2f} GiB", flush=True)
    report = {
        "machine": machine(),
        "torch": torch.__version__,
        "precision": str(precision).removeprefix("torch."),
        "attention": attention,
        "systems": systems,
    }
    write_whole(results / "memory.json", json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
