"""Files and folders that are on disk in full or not at all, through a kill, a full disk, or a power cut."""

import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError

STAGING = ".saving"  # a folder for what is being written, or deleted: nothing in it is whole

# What torch says, in a RuntimeError, of a file it cannot write; why, it says only where it could not open the file.
_TORCH = re.compile(r"inline_container\.cc:\d+\] \. (?:.*strerror: (?P<why>.+)|.+)|Parent directory .* does not exist")


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it: it is there in full or not at all."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    publish(draft, path)


def publish(draft: Path, final: Path) -> None:
    """Give a finished file or folder its name; what it holds reaches the disk before its name does."""
    for path in [*(draft.rglob("*") if draft.is_dir() else ()), draft]:
        _flush(path)
    draft.rename(final)
    _flush(final.parent)


def remove(folder: Path) -> None:
    """Delete a folder such that under its own name it is never there in part."""
    staging = folder.parent / STAGING
    staging.mkdir(exist_ok=True)
    doomed = staging / f"deleted-{folder.name}"
    folder.rename(doomed)
    shutil.rmtree(doomed)
    if not any(staging.iterdir()):
        staging.rmdir()


def why_not_written(error: Exception, folder: Path) -> str | None:
    """Why a file in a folder could not be written, or None if an error is of something else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, SafetensorError):
        return str(error).rpartition("I/O error: ")[2]
    if match := _TORCH.search(str(error)):
        free = shutil.disk_usage(folder).free / 2**30
        return match["why"] or f"a file could not be written to its end ({free:.2f} GiB are free)"
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
