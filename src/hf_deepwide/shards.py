"""The index of a sharded checkpoint (`.metadata`), which PyTorch pickles: read it only if it names shards alone.

PyTorch unpickles the index as it is, and then the values that are no tensors, such as learning rates. Both could run
any code. Here an unpickler that knows PyTorch's own records, and nothing else, reads the index first. The values are
read as PyTorch reads values by default elsewhere (`weights_only`).
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
ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # what PyTorch reads in each `torch.load`


class Index(pickle.Unpickler):
    """Makes the records of an index, and refuses whatever else a pickle may ask for."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or function by its name, if it is a record or one of PyTorch's types of numbers."""
        if name in RECORDS.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that an index of shards holds")


@contextmanager
def only_weights(checkpoint: Path) -> Iterator[None]:
    """While a run is resumed: shards are indices and tensors and plain values.

    Raises:
        pickle.UnpicklingError: an index holds something else.
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
