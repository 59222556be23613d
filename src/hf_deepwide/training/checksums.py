"""The file `checksums.json` of a checkpoint: its run, and the digests of its files and of the run's data.

It is the last file that is written to a checkpoint, and it is read when a run resumes. `sha256sum` gives the same
digest of a file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..durable import sha256_of, write_whole
from ..errors import UserError
from ..reading import read_json

CHECKSUMS = "checksums.json"
UNREAD = "training_args.bin"  # the Trainer writes it for people to look at
# Endings of the files that a resume would read if they existed.
READ = (".pt", ".pth", ".safetensors", ".distcp", ".index.json", ".metadata")


def write_checksums(checkpoint: Path, data: dict[str, str], run_id: str | None = None) -> None:
    """Write the digests of a checkpoint's files, the digests of the `data` by split, and the id of the run, if any."""
    files = {name: sha256_of(path) for name, path in _files(checkpoint).items()}
    known = {} if run_id is None else {"run": run_id}
    content = {**known, "data": data, "sha256": files, "check": _check(data, files, run_id)}
    write_whole(checkpoint / CHECKSUMS, json.dumps(content, indent=2) + "\n")


def read_checksums(checkpoint: Path) -> dict[str, Any] | None:
    """Return `data`, `sha256` and perhaps `run`, or None if an older version of this library saved the checkpoint.

    Raises:
        ValueError: the file is damaged.
    """
    path = checkpoint / CHECKSUMS
    if not path.is_file():
        return None
    content = read_json(path)
    parts = [content.get(key) for key in ("data", "sha256")] if isinstance(content, dict) else []
    if (
        not parts
        or not all(isinstance(part, dict) for part in parts)
        or content.get("check") != _check(*parts, content.get("run"))
    ):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return content


def _check(data: dict[str, str], files: dict[str, str], run_id: str | None) -> str:
    """Return a digest of the digests, because the file that holds the digests can be damaged, too."""
    checked = [data, files] if run_id is None else [data, files, run_id]  # older versions wrote no run id
    return hashlib.sha256(json.dumps(checked, sort_keys=True).encode()).hexdigest()


def other_run(saved: dict[str, Any] | None, run_id: str | None) -> str | None:
    """Return a message if another run saved these checksums; None if the ids are equal or one of them is missing."""
    theirs = None if saved is None else saved.get("run")
    if None in (theirs, run_id) or theirs == run_id:
        return None
    return f"another run saved it (`run` in {CHECKSUMS} is not the `id` of this run)"


def first_difference(checkpoint: Path, saved: dict[str, str], names: list[str] | None = None) -> str | None:
    """Describe the first file that is not as it was saved, or return None. Check the files `names`, or all files."""
    present = _files(checkpoint)
    for name in sorted(saved) if names is None else names:
        if name not in present:
            return f"{name} is missing"
        if sha256_of(present[name]) != saved.get(name):
            return f"{name} is damaged (its checksum is another than when it was saved)"
    for name in sorted(present) if names is None else []:
        if name.endswith(READ) and name not in saved:
            return f"{name} was not saved with it"
    return None


def check_data(checkpoint: Path, data: dict[str, str]) -> None:
    """Check that a run resumes with the data that it began with.

    Raises:
        UserError: the data differ.
    """
    saved = read_checksums(checkpoint)
    earlier = data if saved is None else saved["data"]
    refuse_other_data(checkpoint, earlier, data)


def refuse_other_data(place: Path, earlier: Mapping[str, str], data: Mapping[str, str]) -> None:
    """Refuse to resume a run with other data than the run began with.

    Args:
        place: a checkpoint, or the folder of a run.
        earlier: the digest of each split when the run began.
        data: the digest of each split now.

    Raises:
        UserError: a split that is in both mappings has different digests.
    """
    if changed := [split for split in data.keys() & earlier.keys() if data[split] != earlier[split]]:
        raise UserError(
            f"{place}: the {' and '.join(sorted(changed))} data have changed since the run began, "
            "though they have the same name. Put the earlier data back, give another training.output_dir, or "
            "--overwrite to start afresh"
        )


def _files(checkpoint: Path) -> dict[str, Path]:
    """Return the files that have digests by their relative paths, files in subfolders included."""
    found = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if name not in (CHECKSUMS, UNREAD)}
