"""How to tell that a device, or the machine, has no memory left."""

import torch

# What errors say that are not of the class OutOfMemoryError: of processors, Apple's GPUs, cuBLAS, CTranslate2.
PHRASES = (
    "DefaultCPUAllocator",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA failed with error out of memory",
)


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or any(phrase in str(error) for phrase in PHRASES)
