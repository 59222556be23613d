"""A check of the index of a sharded checkpoint (`.metadata`), which PyTorch pickles: it may name shards alone.

PyTorch unpickles the index without a check, and then the values that are no tensors, such as learning rates. Both
could run any code. Here, an unpickler that accepts only the classes of such an index reads the index first. The values
are then read with `weights_only`, PyTorch's default elsewhere.
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

INDEX = ".metadata"
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),  # Python 3.13
    "collections": ("OrderedDict",),
}
ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # the variable that each `torch.load` reads


class Index(pickle.Unpickler):
    """An unpickler that makes the records of an index, and refuses everything else that a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by its name, if it is a record or one of PyTorch's dtypes."""
        if name in RECORDS.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that an index of shards holds")


@contextmanager
def only_weights(checkpoint: Path) -> Iterator[None]:
    """Check the indices of the shards, and let `torch.load` read only tensors and plain values within the block.

    Raises:
        pickle.UnpicklingError: an index holds something other than shards.
    """
    for path in sorted(checkpoint.rglob(INDEX)):
        with path.open("rb") as file:
            Index(file).load()
    before = os.environ.get(ONLY_WEIGHTS)
    os.environ[ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ONLY_WEIGHTS]
        else:
            os.environ[ONLY_WEIGHTS] = before
