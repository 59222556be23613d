"""Memory of the process: reuse freed blocks, drop the kernels of old shapes, report the peak."""

import ctypes
import os
import re
import resource
import sys
from pathlib import Path

import torch

M_TRIM_THRESHOLD = -1  # malloc.h
M_MMAP_THRESHOLD = -3
KEEP = 1 << 30  # bytes
KERNELS = "32"  # more than the shapes of one layer, forward and backward


def keep_memory() -> bool:
    """Tell glibc's `malloc` to reuse large freed blocks instead of returning them to the kernel.

    A training step on a CPU allocates and frees the same large tensors again and again. By default glibc maps each
    large block afresh and unmaps it when it is freed. So every step pays a page fault for every 4 KiB of every
    activation. With both thresholds at 1 GiB the blocks stay in the heap. Resident memory then stays at its peak,
    which training reaches in every step anyway. GPU memory is not affected.

    Returns:
        False if there is no glibc (macOS, musl), and nothing was changed.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return False
    return all(mallopt(option, KEEP) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


def bound_kernel_caches() -> None:
    """Let PyTorch and oneDNN cache only the kernels of the last `KERNELS` shapes, not of the last 1,024.

    On a CPU, oneDNN makes a kernel for each shape of a bfloat16 product (float32 goes to another library). Batches by
    tokens come in hundreds of shapes, with dozens of products each. The cached kernels would take more memory than
    everything else, and finding a kernel is no faster than making it (benchmarks/kernel_caches.py). Call this before
    the first such product. Environment variables that are already set are not changed.
    """
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # PyTorch's, and the library's own
        os.environ.setdefault(cache, KERNELS)


def peak_memory() -> int:
    """Return the most bytes that this process has held: GPU memory if it used a GPU, else main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":  # here `ru_maxrss` includes the memory of the process that started this one
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):  # some sandboxes omit the line
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB, except on macOS
