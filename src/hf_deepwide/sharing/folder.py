"""The folder that `share` writes: which of its files `share` wrote, and how these are replaced.

A manifest lists the files that `share` wrote, with digests. Only these files are replaced, and each file is written in
full or not at all.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from ..checkpoint_files import CONFIG
from ..durable import Writing, check_permission, let_others_read, publish, sha256_of, write_whole
from ..errors import UserError, one_line
from ..reading import read_json

MANIFEST = ".hf_deepwide_share.json"  # lists the files that `share` wrote: {"files": {path: [SHA-256, …]}}


def check_target(folder: Path, source: Path | None, overwrite: bool) -> dict[str, list[str]]:
    """Check that a folder is empty or new, or, with `overwrite`, that it holds an earlier result of `share`.

    Returns:
        The files in the folder that `share` wrote and that are unchanged since, with their digests.
    """
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"share: {folder} is a link to nothing; give a folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"share: {folder} is a file; give a folder")
    if source is not None and folder.exists() and source.exists():
        if folder.samefile(source):
            raise UserError(f"share: {folder} is where the model is; give another folder")
        if folder.resolve() in source.resolve().parents:
            raise UserError(f"share: the model lies inside {folder}; give another folder")
    check_permission(folder / CONFIG if folder.is_dir() else folder)
    if not _entries(folder):
        return {}
    if not overwrite:
        raise UserError(f"share: {folder} is not empty; give another folder, or --overwrite an earlier share in it")
    listed = _manifest(folder)
    if listed is None:
        raise UserError(f"share: {folder} was not written by share, so it is not replaced; give another folder")
    return {name: digests for name, digests in listed.items() if _digest(folder, name) in digests}


def _manifest(folder: Path) -> dict[str, list[str]] | None:
    """Return the files in the folder's manifest, with their digests at that time; None without a manifest."""
    path = folder / MANIFEST
    if not path.is_file() or path.is_symlink():
        return None
    try:
        content = read_json(path)
    except ValueError:
        content = None
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digests, list) for digests in files.values()):
        raise UserError(f"share: {path} is damaged, so nothing tells what share wrote there; give another folder")
    return files


def _digests(folder: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the digests of files in a folder by name, as a manifest lists them. Links are left out."""
    digests = ((name, _digest(folder, name)) for name in sorted(names))
    return {name: [digest] for name, digest in digests if digest is not None}


def _digest(folder: Path, name: str) -> str | None:
    """Return the SHA-256 of a file in a folder; None if it does not exist, or if a part of its path is a link."""
    path, relative = folder / name, Path(name)
    inside = relative.parts and not relative.is_absolute() and ".." not in relative.parts
    linked = any((folder / part).is_symlink() for part in (relative, *relative.parents[:-1]))
    if not inside or linked or not path.is_file():
        return None
    return sha256_of(path)


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder, without hidden ones (such as a clone's .git)."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []


def files_in(folder: Path) -> set[str]:
    """Return the files in a folder and its subfolders, as paths relative to the folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def refusing_unreadable(folder: Path | None) -> Iterator[None]:
    """Turn errors of reading or writing in the block into a `UserError` of one line."""
    place = Path(tempfile.gettempdir()) if folder is None else folder
    with Writing(place) as writing:
        yield
    if writing.why is not None:
        where = one_line(getattr(writing.error, "filename", None) or place, 200)
        raise UserError(f"share: {where} cannot be read or written: {writing.why}") from writing.error


@contextmanager
def staging(folder: Path | None) -> Iterator[Path]:
    """Yield an empty folder on the target's disk. It is deleted when the block ends, so a failure leaves no trace.

    The folder has a hidden name and lies beside the target. It lies inside the target only if the target is on another
    disk than its parent folder.
    """
    place = None
    if folder is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        is_disk = folder.is_dir() and folder.stat().st_dev != folder.parent.stat().st_dev
        place = folder if is_disk else folder.parent
    with tempfile.TemporaryDirectory(prefix=".share-", dir=place) as staging:
        staged = Path(staging) / "model"
        staged.mkdir()
        yield staged


def replace_files(folder: Path, staged: Path, earlier: dict[str, list[str]]) -> None:
    """Move the staged files into the folder, in place of the files that `share` wrote there earlier.

    A new folder appears in full or not at all. In an existing folder, the config is deleted first and written last. If
    this process is killed in between, the folder cannot be loaded, and sharing again completes it.

    Raises:
        UserError: a file that `share` did not write is in the way. Nothing has changed then.
    """
    let_others_read(staged)
    new = _digests(staged, files_in(staged))
    for name in new:
        _check_way(folder, name, earlier)
    if not folder.exists():
        _write_manifest(staged, new)
        publish(staged, folder)
        return
    for name in new:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    _write_manifest(folder, {name: earlier.get(name, []) + new.get(name, []) for name in sorted({*earlier, *new})})
    for name in filter(_is_config, {*earlier, *new}):
        (folder / name).unlink(missing_ok=True)
    for name in sorted(new, key=_is_config):
        publish(staged / name, folder / name)
    for name in earlier.keys() - new.keys():
        (folder / name).unlink(missing_ok=True)
        for parent in Path(name).parents[:-1]:
            if not any((folder / parent).iterdir()):
                (folder / parent).rmdir()
    _write_manifest(folder, new)


def _is_config(name: str) -> bool:
    """Return True for a model's config, without which it cannot be loaded, also for the model in a Space."""
    return Path(name).name == CONFIG


def _check_way(folder: Path, name: str, earlier: dict[str, list[str]]) -> None:
    """Check that writing a file loses nothing: the name is free, or `share` wrote the present file."""
    for part in (*Path(name).parents[:-1], Path(name)):
        path = folder / part
        ours = name in earlier if part == Path(name) else path.is_dir() and not path.is_symlink()
        if (path.exists() or path.is_symlink()) and not ours:
            raise UserError(
                f"share: {path} was not written by share, or has been changed since, and would be replaced; move it "
                "away, or give another folder"
            )


def _write_manifest(folder: Path, files: dict[str, list[str]]) -> None:
    content = {"hf_deepwide": version("hf_deepwide"), "files": files}
    write_whole(folder / MANIFEST, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
