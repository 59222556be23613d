"""Files and folders that are on disk in full or not at all, through a kill, a full disk, or a power cut."""

import gzip
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import UserError

STAGING = ".saving"  # a folder for what is being written, or deleted: nothing in it is whole

# What torch says, in a RuntimeError, of a file it cannot write; why, it says only where it could not open the file.
_TORCH = re.compile(
    r"inline_container\.cc:\d+\] \. (?:.*strerror: (?P<why>.+)|.+)|Parent directory .* does not exist"
    r"|basic_ios::clear: iostream error"
)


def check_output(path: Path, *, inputs: Iterable[Path] = (), overwrite: bool = False, option: str = "") -> None:
    """Refuse to write a file or folder that exists, and one of the inputs even where overwriting is allowed.

    Paths are compared as places on the disk, so that another spelling, a link, or a case that the disk ignores
    does not matter.

    Args:
        path: what is to be written.
        inputs: files and folders that are read; none of them may be `path`.
        overwrite: `path` may exist.
        option: the option that allows it, for the message.

    Raises:
        UserError: `path` is an input, exists, is a device or a pipe, lies in a file instead of a folder or in a folder
            that nobody may write in, or is the folder `.` or ends in `..`.
    """
    _refuse_special(path)
    around = next(parent for parent in path.absolute().parents if parent.exists())
    if not around.is_dir():
        raise UserError(f"{path} cannot be written: {around} is a file, not a folder; give another place")
    check_permission(path)
    for given in inputs:
        if is_same(path, given):
            raise UserError(f"{path} is also an input; give another place for the output")
    if not overwrite and (path.is_symlink() or (path.exists() and not is_empty_folder(path))):
        allowed = f", or {option} to replace it" if option else ""
        raise UserError(f"{path} exists already; give another place for the output{allowed}")
    if path.name in ("", "..") and (is_empty_folder(path) or not path.exists()):  # no draft can take its place
        raise UserError(f"{path} is no name for what is to be written; give a name, such as {path / 'new'}")


def check_permission(path: Path) -> None:
    """See that a file or folder can be made, before there is work that would be lost.

    Raises:
        UserError: the nearest folder above it that exists is read-only.
    """
    around = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(around, os.W_OK | os.X_OK):
        raise UserError(f"{path}: no permission to write in {around}; give another place")


def check_output_file(path: Path, *, inputs: Iterable[Path] = (), overwrite: bool = False, option: str = "") -> None:
    """`check_output` of a file, whose folder has to be there: found before long work and not behind it.

    Raises:
        UserError: as `check_output`; or there is no such folder, or a folder of the file's name.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    check_output(path, inputs=inputs, overwrite=overwrite, option=option)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file")


def _refuse_special(path: Path) -> None:
    """Refuse a device or a pipe, which a new file of its name would replace: /dev/null for the whole machine.

    The links in /dev (/dev/stdout) lead to whatever a process has open, which can be a file.
    """
    link = path.is_symlink() and path.parent.resolve() == Path("/dev")
    if link or (path.exists() and not path.is_file() and not path.is_dir()):
        raise UserError(f"{path} is a device or a pipe, which would be replaced; give the name of a file")


def is_same(path: Path, other: Path) -> bool:
    """True if two paths name one place on the disk, whether it exists yet or not."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def is_empty_folder(path: Path) -> bool:
    """True if the path is a folder that holds nothing."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file; 100 MB take about 0.15 seconds."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there in full or not at all, compressed if its name ends in .gz."""
    content = text.encode()
    with whole_file(path) as draft:
        draft.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def draft_of(path: Path) -> Path:
    """Where a file lies while it is written: a name of ours, since `.NAME` may be a file of the user."""
    return path.with_name(f"{STAGING}-{path.name}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty draft; it becomes `path` when the block ends, and vanishes on an error.

    The draft is made anew, so that nobody's link is followed. A link at `path` is replaced, not followed.

    Raises:
        UserError: `path` is a device or a pipe, or its folder is missing.
    """
    _refuse_special(path)
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    draft = draft_of(path)
    draft.unlink(missing_ok=True)  # what an interrupted process left
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield draft
        publish(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder on the same disk; it becomes `path` when the block ends, and vanishes on an error.

    `path` must not exist, or be an empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as staging:
        draft = Path(staging) / path.name
        draft.mkdir()
        yield draft
        publish(draft, path)


def let_others_read(folder: Path) -> None:
    """Let others read what they may read in the folder: safetensors writes files for their owner alone."""
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600:
            path.chmod(usual)


def publish(draft: Path, final: Path) -> None:
    """Give a finished file or folder its name; what it holds reaches the disk before its name does."""
    if draft.is_dir():
        let_others_read(draft)
    for path in [*(draft.rglob("*") if draft.is_dir() else ()), draft]:
        _flush(path)
    draft.rename(final)
    _flush(final.parent)


@contextmanager
def whole_files(folder: Path, last: str = "") -> Iterator[Path]:
    """Yield an empty folder; its files move to `folder` when the block ends, and vanish on an error.

    Each file is there in full or not at all, and the file called `last` comes after the others. Links that have the
    names of these files are replaced, not followed.
    """
    draft = open_staging(folder) / "files"
    discard(draft)
    draft.mkdir()
    try:
        yield draft
        let_others_read(draft)
        for path in sorted(draft.iterdir(), key=lambda path: (path.name == last, path.name)):
            publish(path, folder / path.name)
    finally:
        discard(draft)
        _close_staging(draft.parent)


def open_staging(folder: Path) -> Path:
    """The folder in `folder` for what is being written; it is made, in place of a link of that name."""
    staging = folder / STAGING
    if staging.is_symlink():
        staging.unlink()
    staging.mkdir(parents=True, exist_ok=True)
    return staging


def _close_staging(staging: Path) -> None:
    if not any(staging.iterdir()):
        staging.rmdir()


def discard(path: Path) -> None:
    """Delete a file, a folder or a link, if it is there. What a link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a folder such that under its own name it is never there in part; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
        return
    staging = open_staging(folder.parent)
    doomed = staging / f"deleted-{folder.name}"
    discard(doomed)  # what a deletion that was killed left
    folder.rename(doomed)
    shutil.rmtree(doomed)
    _close_staging(staging)


class Writing:
    """A block that writes at a path. What keeps the block from writing does not leave it, but is kept.

    Libraries raise errors of many kinds for a full disk, so no caller lists them: `why_not_written` knows them all.

    Attributes:
        why: why something could not be written, in words; None after a block that wrote everything.
        error: the error behind `why`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.why: str | None = None
        self.error: Exception | None = None

    def __enter__(self) -> "Writing":
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Keep an error of writing; let every other error pass."""
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return False
        places = (self.path, *self.path.absolute().parents)
        nearest = next((place for place in places if os.path.isdir(place)), Path("/"))  # a name may be too long
        self.why, self.error = why_not_written(error, nearest), error
        return self.why is not None


@contextmanager
def saving(path: Path, what: str = "the model") -> Iterator[None]:
    """Save something at a path within the block.

    Raises:
        UserError: it could not be written; says why, in one line.
    """
    with Writing(path) as writing:
        yield
    if writing.why is not None:
        raise UserError(f"{path}: {what} cannot be saved: {writing.why}") from writing.error


def why_not_written(error: Exception, folder: Path) -> str | None:
    """Why a file in a folder could not be written, or None if an error is of something else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if type(error) is Exception and "(os error " in str(error):  # of the library `tokenizers`
        return str(error)
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
