"""The check whether an error means that a device, or the machine, has no memory left."""

import torch

# Phrases in errors that are not of the class OutOfMemoryError: from CPUs, Apple's GPUs, cuBLAS and CTranslate2.
PHRASES = (
    "DefaultCPUAllocator",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA failed with error out of memory",
)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if the error means that a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or any(phrase in str(error) for phrase in PHRASES)
