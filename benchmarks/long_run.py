"""Measure a long run: memory over 2,000 training steps, and the share of step time that is spent waiting for data.

    python benchmarks/long_run.py --output benchmarks/results/long_run     # long_run.json and long_run.png

Our trainer trains a MAT of one layer, d 64, on the quick start's corpus. It validates and saves every 500 steps. One
run loads batches in the training process, and another run loads them in two workers. Resident memory, workers
included, is read every 50 steps. Its slope is the slope of a straight line through the readings after warm-up. The
largest shapes come in warm-up. So small a model is the hard case for data loading, because its steps are short.
"""

import argparse
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reports import measured_on, write_report
from trainings import encoded_corpus, trainer_of
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from hf_deepwide.analysis.figures import new_figure, save
from hf_deepwide.training.memory import keep_memory

RECIPE = "quickstart"
EVERY = 50  # steps between readings
MODEL = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
}


def resident_mib() -> float:
    """The memory of this process and its children in MiB; pages that they share count once (Linux)."""
    kib = 0
    for process in ("self", *(str(child.pid) for child in active_children())):
        rollup = Path("/proc", process, "smaps_rollup").read_text(encoding="ascii")
        kib += int(re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE)[1])
    return kib / 1024


class Readings(TrainerCallback):
    """A callback that reads the resident memory every `EVERY` steps."""

    def __init__(self) -> None:
        self.mib: dict[int, float] = {}

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the memory if the number of the step is a multiple of `EVERY`."""
        if state.global_step % EVERY == 0:
            self.mib[state.global_step] = round(resident_mib(), 1)


def long_run(steps: int, workers: int, max_tokens: int) -> dict[str, Any]:
    """Train; return the memory readings, the seconds per step, and the share of time that data loading takes."""
    with tempfile.TemporaryDirectory() as folder:
        changed = {
            "training.output_dir": folder, "training.max_steps": steps, "training.max_tokens": max_tokens,
            "training.dataloader_num_workers": workers, "training.dataloader_persistent_workers": workers > 0,
            "training.eval_strategy": "steps", "training.eval_steps": 500, "training.save_strategy": "steps",
            "training.save_steps": 500, "training.logging_steps": EVERY, "training.disable_tqdm": True,
        } | {f"model.{key}": value for key, value in MODEL.items()}  # fmt: skip
        trainer = trainer_of(RECIPE, changed, *encoded_corpus(RECIPE, "train", "validation"))
        readings = Readings()
        trainer.add_callback(readings)
        trainer.train()
        totals = trainer.throughput.state()["args"]
        logged = [entry for entry in trainer.state.log_history if "data_share" in entry]
    return {
        "resident_mib": readings.mib,
        "data_share": totals["data_seconds"] / totals["seconds"],
        "seconds_a_step": totals["seconds"] / steps,
        "data_share_by_step": {entry["step"]: round(entry["data_share"], 4) for entry in logged},
    }


def in_a_process(threads: int, *settings: int) -> dict[str, Any]:
    """Call `long_run` as the first work of a new process."""
    torch.set_num_threads(threads)
    disable_progress_bar()
    keep_memory()
    return long_run(*settings)


def growth(mib: dict[int, float], warm_up: int) -> dict[str, float]:
    """Fit a line to the readings after warm-up; return its slope, and its total rise divided by the mean reading."""
    steps = np.array([step for step in mib if int(step) > warm_up], dtype=float)
    values = np.array([value for step, value in mib.items() if int(step) > warm_up])
    slope, _ = np.polyfit(steps, values, 1)
    rise = slope * (steps[-1] - steps[0])
    return {"kib_a_step": round(float(slope) * 1024, 3), "share_of_memory": round(float(rise / values.mean()), 5)}


def draw(report: dict[str, Any], path: Path) -> None:
    """Plot the memory, and the share of data loading, over the steps."""
    figure, axes = new_figure(1, 2, (4.2, 2.8))
    for name, run in report["runs"].items():
        for axis, key in zip(axes[0], ("resident_mib", "data_share_by_step"), strict=True):
            values = run[key]
            axis.plot([int(step) for step in values], list(values.values()), label=name, linewidth=1.2)
    for axis, label in zip(axes[0], ("resident memory, MiB", "share of step time waiting for data"), strict=True):
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    save(figure, path)


def main() -> None:
    """Run with and without workers, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=500, help="steps before memory has to be flat")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--output", type=Path, help="write the results here, as .json and .png")
    args = parser.parse_args()
    runs = {}
    for workers in (0, 2):
        name = f"{workers} workers"
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # new, with no memory of another run
            runs[name] = process.submit(in_a_process, args.threads, args.steps, workers, args.max_tokens).result()
        runs[name]["growth"] = growth(runs[name]["resident_mib"], args.warm_up)
        shown = runs[name]["growth"]
        print(
            f"{name}: {shown['kib_a_step']:+.2f} KiB a step after warm-up, {shown['share_of_memory']:+.2%} of memory; "
            f"{runs[name]['data_share']:.1%} of step time waiting for data",
            flush=True,
        )
    report = {
        **measured_on(),
        "threads": args.threads,
        "settings": {key: value for key, value in vars(args).items() if key != "output"},
        "runs": runs,
    }
    if args.output:
        write_report(args.output, report)
        draw(report, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
