"""What a checkpoint says of itself: its run, and the digests of its files and of the data that training was on.

The file is written last into a checkpoint, and read when a run goes on. `sha256sum` of a file gives the same number.
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
UNREAD = "training_args.bin"  # the Trainer leaves it for people to look at
# What a resume would read if it were there.
READ = (".pt", ".pth", ".safetensors", ".distcp", ".index.json", ".metadata")


def write_checksums(checkpoint: Path, data: dict[str, str], run_id: str | None = None) -> None:
    """Write the digests of all files of a checkpoint, and of the `data`, by split; and the id of the run, if any."""
    files = {name: sha256_of(path) for name, path in _files(checkpoint).items()}
    known = {} if run_id is None else {"run": run_id}
    content = {**known, "data": data, "sha256": files, "check": _check(data, files, run_id)}
    write_whole(checkpoint / CHECKSUMS, json.dumps(content, indent=2) + "\n")


def read_checksums(checkpoint: Path) -> dict[str, Any] | None:
    """`data`, `sha256` and perhaps `run`, or None of a checkpoint that an older version of this library saved.

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
    """A digest of the digests, as the file that holds them can be damaged, too."""
    checked = [data, files] if run_id is None else [data, files, run_id]  # older versions knew no runs
    return hashlib.sha256(json.dumps(checked, sort_keys=True).encode()).hexdigest()


def other_run(saved: dict[str, Any] | None, run_id: str | None) -> str | None:
    """Say that another run saved a checkpoint with these checksums; None where one of the two has no id."""
    theirs = None if saved is None else saved.get("run")
    if None in (theirs, run_id) or theirs == run_id:
        return None
    return f"another run saved it (`run` in {CHECKSUMS} is not the `id` of this run)"


def first_difference(checkpoint: Path, saved: dict[str, str], names: list[str] | None = None) -> str | None:
    """What of a checkpoint's files is not as it was saved, or None; of some `names`, or of all."""
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
    """See that a run goes on with the data that it began with.

    Raises:
        UserError: they are others.
    """
    saved = read_checksums(checkpoint)
    earlier = data if saved is None else saved["data"]
    refuse_other_data(checkpoint, earlier, data)


def refuse_other_data(place: Path, earlier: Mapping[str, str], data: Mapping[str, str]) -> None:
    """Refuse to go on from a place with other data than those that the run began with.

    Args:
        place: a checkpoint, or the folder of a run.
        earlier: split to digest, as the run began.
        data: the same of the data that are there now.

    Raises:
        UserError: a split that both name differs.
    """
    if changed := [split for split in data.keys() & earlier.keys() if data[split] != earlier[split]]:
        raise UserError(
            f"{place}: the {' and '.join(sorted(changed))} data have changed since the run began, "
            "though they have the same name. Put the earlier data back, give another training.output_dir, or "
            "--overwrite to start afresh"
        )


def _files(checkpoint: Path) -> dict[str, Path]:
    """The regular files in a checkpoint by their names, those in folders included."""
    found = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if name not in (CHECKSUMS, UNREAD)}
