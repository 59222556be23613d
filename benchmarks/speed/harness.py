"""Side by side in one process: systems take turns, and what counts is the median over the rounds of their ratio.

A machine's speed drifts, so a time alone says little; the ratio of two times of the same round says more.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # reports, for all that import this file

REPORT = "the report, a .json; its table lies beside it as .md"
WARM_UP = 2  # rounds that are not counted: they compile kernels and grow the heap


class Measured(NamedTuple):
    """What the rounds give for one system.

    Args:
        seconds: the median of its times.
        ratio: the median over the rounds of its time by the yardstick's time in the same round.
    """

    seconds: float
    ratio: float


def options(description: str | None, rounds: int, output: str = REPORT) -> argparse.ArgumentParser:
    """A parser of what every benchmark here can be told; `rounds` is a default, `output` says what `--output` is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each system that count")
    parser.add_argument("--output", type=Path, help=output)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the command says; from now on this process keeps memory and kernels as training does."""
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    bound_kernel_caches()
    return args


def take_turns(
    steps: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Time each step once a round, in turn; returns the seconds of the rounds that count."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + warm_up):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def against(seconds: Mapping[str, list[float]], yardstick: str) -> dict[str, Measured]:
    """Each system's median time, and its time by the yardstick's."""
    return {
        name: Measured(
            statistics.median(own),
            statistics.median(ours / theirs for ours, theirs in zip(own, seconds[yardstick], strict=True)),
        )
        for name, own in seconds.items()
    }


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_memory(step: Callable[[], object]) -> int:
    """Most bytes of the GPU that are held while a step is taken twice; the optimizer's averages begin in the first."""
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    return torch.cuda.max_memory_allocated()
