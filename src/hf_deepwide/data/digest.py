"""Digests of training data: they show whether a resumed run has the data with which it began.

A digest depends on content, such as token ids. It does not depend on the name or date of a file, or on the code that
made the data.
"""

import hashlib
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from .arguments import Places
from .corpora import local_files

ROWS = 100_000  # rows of a dataset that are read at a time
FIRST = 1000  # rows of a stream that are part of its digest
PLACES, PIECE = 64, 65_536  # pieces of a streamed file that are part of its digest, and bytes of a piece


def data_digest(dataset: Dataset | IterableDataset, args: Places | None = None) -> str:
    """Return the digest of a dataset of text or ids, in about a second for a million pairs of 25 tokens.

    Rows that a filter has left out are part of the digest too: skipping them would take a hundred times as long.

    A stream cannot be read to its end here. Its digest includes its first rows. For local files it also includes the
    size of each file, and 64 pieces, spread evenly over the file.
    """
    digest = hashlib.sha256()
    if isinstance(dataset, Dataset):
        for table in [dataset.data, *([dataset._indices] if dataset._indices is not None else [])]:
            for start in range(0, len(table), ROWS):
                piece = table.slice(start, ROWS)
                for name in sorted(piece.column_names):
                    _add(digest, piece.column(name))
    else:
        for row in islice(dataset, FIRST):
            digest.update(json.dumps(row, sort_keys=True).encode())
        for path in local_files(args, "train") if args is not None else []:
            _add_file(digest, path)
    return digest.hexdigest()


def text_digest(pairs: Dataset) -> str:
    """Return the digest of the sentences of an evaluation split: sources, targets, and their order."""
    digest = hashlib.sha256()
    for side in ("source", "target"):
        digest.update(json.dumps(pairs[side][:]).encode())
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", values: pa.ChunkedArray | pa.Array) -> None:
    """Add numbers to the digest; for strings and lists of numbers, add their lengths, then their content."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()  # the ends of chunks are not content
    if isinstance(values, pa.ListArray | pa.LargeListArray):
        _add(digest, values.value_lengths())
        _add(digest, values.flatten())
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        _add(digest, pc.binary_length(values))
        values = values.cast(pa.large_binary())
        _, offsets, content = values.buffers()
        here = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        digest.update(memoryview(content or b"")[int(here[0]) : int(here[-1])])
    else:
        digest.update(np.ascontiguousarray(values.to_numpy(zero_copy_only=False)))


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{size}\n".encode())
    with path.open("rb") as file:
        for place in range(PLACES):
            file.seek(max(size - PIECE, 0) * place // (PLACES - 1))
            digest.update(file.read(PIECE))
