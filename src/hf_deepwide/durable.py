"""Files and folders that are written in full or not at all, even if a kill, a full disk or a power cut interrupts."""

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

STAGING = ".saving"  # a folder for files that are being written or deleted: nothing in it is complete

# torch's messages, in a RuntimeError, about a file it cannot write; only if it cannot open the file, they say why.
_TORCH = re.compile(
    r"inline_container\.cc:\d+\] \. (?:.*strerror: (?P<why>.+)|.+)|Parent directory .* does not exist"
    r"|basic_ios::clear: iostream error"
)


def check_output(path: Path, *, inputs: Iterable[Path] = (), overwrite: bool = False, option: str = "") -> None:
    """Refuse an output path that is also an input or, without `overwrite`, exists already.

    An empty folder is accepted. Paths are compared as places on the disk: another spelling, a link, or a difference in
    case that the disk ignores does not matter.

    Args:
        path: the file or folder to write.
        inputs: files and folders that are read; none of them may be `path`.
        overwrite: whether `path` may exist.
        option: the option that sets `overwrite`, for the message.

    Raises:
        UserError: `path` is an input, exists, is a device or a pipe, lies in a file instead of a folder or in a folder
            without write permission, or is `.` or ends in `..`.
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
    """Check that a file or folder can be created, before there is work that would be lost.

    Raises:
        UserError: there is no permission to write in the nearest existing folder above `path`.
    """
    around = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(around, os.W_OK | os.X_OK):
        raise UserError(f"{path}: no permission to write in {around}; give another place")


def check_output_file(path: Path, *, inputs: Iterable[Path] = (), overwrite: bool = False, option: str = "") -> None:
    """Check an output file as `check_output` does, and that its folder exists, before any long work begins.

    Raises:
        UserError: see `check_output`; or the folder does not exist, or `path` is a folder.
    """
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; make it first")
    check_output(path, inputs=inputs, overwrite=overwrite, option=option)
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file")


def _refuse_special(path: Path) -> None:
    """Refuse a device or a pipe: a new file would replace it, such as /dev/null for the whole machine.

    The links in /dev (/dev/stdout) are refused, too. They lead to what a process has open, which can be a file.
    """
    link = path.is_symlink() and path.parent.resolve() == Path("/dev")
    if link or (path.exists() and not path.is_file() and not path.is_dir()):
        raise UserError(f"{path} is a device or a pipe, which would be replaced; give the name of a file")


def is_same(path: Path, other: Path) -> bool:
    """Return True if two paths name the same place on the disk, whether it exists yet or not."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def is_empty_folder(path: Path) -> bool:
    """Return True if the path is an empty folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file; 100 MB take about 0.15 seconds."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a text file in full or not at all, compressed if its name ends in .gz."""
    content = text.encode()
    with whole_file(path) as draft:
        draft.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def draft_of(path: Path) -> Path:
    """The path of a file while it is written. The name begins with `STAGING`: `.NAME` may be a file of the user."""
    return path.with_name(f"{STAGING}-{path.name}")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty draft file; when the block ends, rename it to `path`; on an error, delete it.

    The draft is always a new file, so a link that another user placed there is not followed. A link at `path` is
    replaced, not followed.

    Raises:
        UserError: `path` is a device or a pipe, or its folder is missing.
    """
    _refuse_special(path)
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    draft = draft_of(path)
    draft.unlink(missing_ok=True)  # the draft that an interrupted process left
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield draft
        publish(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder on the same disk; when the block ends, rename it to `path`; on an error, delete it.

    `path` must be missing or an empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as staging:
        draft = Path(staging) / path.name
        draft.mkdir()
        yield draft
        publish(draft, path)


def let_others_read(folder: Path) -> None:
    """Give files of mode 0600 the folder's permissions to read and write: safetensors writes for the owner alone."""
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600:
            path.chmod(usual)


def publish(draft: Path, final: Path) -> None:
    """Rename a finished draft to its final name, after its content has been flushed to the disk."""
    if draft.is_dir():
        let_others_read(draft)
    for path in [*(draft.rglob("*") if draft.is_dir() else ()), draft]:
        _flush(path)
    draft.rename(final)
    _flush(final.parent)


@contextmanager
def whole_files(folder: Path, last: str = "") -> Iterator[Path]:
    """Yield an empty folder; when the block ends, move its files to `folder`; on an error in it, delete them.

    Each file arrives in full or not at all, and the file called `last` arrives after the others. Links that have the
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
    """Create the staging folder in `folder`, and return it; a link of its name is replaced."""
    staging = folder / STAGING
    if staging.is_symlink():
        staging.unlink()
    staging.mkdir(parents=True, exist_ok=True)
    return staging


def _close_staging(staging: Path) -> None:
    if not any(staging.iterdir()):
        staging.rmdir()


def discard(path: Path) -> None:
    """Delete a file, a folder or a link, if it exists. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Delete a folder, or only the link where it is a link.

    The folder is renamed first, so that a partly deleted folder never has its name.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    staging = open_staging(folder.parent)
    doomed = staging / f"deleted-{folder.name}"
    discard(doomed)  # the rest of a deletion that was killed
    folder.rename(doomed)
    shutil.rmtree(doomed)
    _close_staging(staging)


class Writing:
    """A context manager for writing at a path, which catches and keeps an error of writing.

    Libraries raise many kinds of errors for a full disk. `why_not_written` recognizes them, so that no caller has to
    list them.

    Attributes:
        why: the reason why something could not be written; None after a block that wrote everything.
        error: the error behind `why`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.why: str | None = None
        self.error: Exception | None = None

    def __enter__(self) -> "Writing":
        """Begin the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """Keep an error of writing, and end the block without it; let every other error pass."""
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return False
        places = (self.path, *self.path.absolute().parents)
        nearest = next((place for place in places if os.path.isdir(place)), Path("/"))  # a name may be too long
        self.why, self.error = why_not_written(error, nearest), error
        return self.why is not None


@contextmanager
def saving(path: Path, what: str = "the model") -> Iterator[None]:
    """Turn an error of writing within the block into a `UserError`.

    Args:
        path: the place where the block writes.
        what: the thing that is saved, for the message.

    Raises:
        UserError: something could not be written; the message gives the reason in one line.
    """
    with Writing(path) as writing:
        yield
    if writing.why is not None:
        raise UserError(f"{path}: {what} cannot be saved: {writing.why}") from writing.error


def why_not_written(error: Exception, folder: Path) -> str | None:
    """The reason why a file in a folder could not be written; None if the error is not about writing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if type(error) is Exception and "(os error " in str(error):  # raised by the library `tokenizers`
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
