"""Memory of the process: keep what was freed, forget kernels of shapes gone by, say how much was held at most."""

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
    which training reaches in every step anyway. GPU memory is not concerned.

    Returns:
        False where there is no glibc (macOS, musl), and nothing was changed.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except OSError:
        return False
    return all(mallopt(option, KEEP) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


def bound_kernel_caches() -> None:
    """Let PyTorch and oneDNN keep the kernels of the shapes just used, and not those of the last 1,024.

    On a CPU, oneDNN makes a kernel for each shape of a bfloat16 product (float32 goes to another library), and batches
    by tokens come in hundreds of shapes, with dozens of products each: the kernels kept come to more memory than all
    else, and finding them again is no faster than making them (benchmarks/kernel_caches.py). To be called before the
    first such product; what the environment says already stays.
    """
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):  # PyTorch's, and the library's own
        os.environ.setdefault(cache, KERNELS)


def peak_memory() -> int:
    """Most bytes that this process has held: of the GPU where it used one, else of the machine's memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "linux":  # where what `resource` says begins at what the process held that has started this one
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):  # some sandboxes leave it out
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere KiB
