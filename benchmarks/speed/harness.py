"""Time systems in turns in one process. What counts is the ratio of their times, as the median over the rounds.

A machine's speed drifts, so a time alone says little. The ratio of two times from the same round says more.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from hf_deepwide.training.memory import bound_kernel_caches, keep_memory

sys.path.insert(0, str(Path(__file__).parents[1]))  # every importer of this file can import reports

REPORT = "the report, a .json; its table lies beside it as .md"
WARM_UP = 2  # rounds that are not counted: they compile kernels and grow the heap


class Measured(NamedTuple):
    """The result of one system.

    Args:
        seconds: the median of the system's times.
        ratio: its time divided by the yardstick's time in the same round, as the median over the rounds.
    """

    seconds: float
    ratio: float


def options(description: str | None, rounds: int, output: str = REPORT) -> argparse.ArgumentParser:
    """A parser of the options that all benchmarks here share; `rounds` is a default, `output` a help text."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each system that count")
    parser.add_argument("--output", type=Path, help=output)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. From now on this process keeps memory and kernels as training does."""
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    bound_kernel_caches()
    return args


def take_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Time each step once in every round; return the seconds of the rounds after the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + warm_up):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def against(seconds: Mapping[str, list[float]], yardstick: str) -> dict[str, Measured]:
    """Compare each system with the yardstick: its median time, and its time divided by the yardstick's."""
    return {
        name: Measured(
            statistics.median(own),
            statistics.median(ours / theirs for ours, theirs in zip(own, seconds[yardstick], strict=True)),
        )
        for name, own in seconds.items()
    }


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(step: Callable[[], object]) -> int:
    """The peak of GPU memory in bytes over two calls of `step`. The first call creates the optimizer's averages."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    return torch.cuda.max_memory_allocated()
