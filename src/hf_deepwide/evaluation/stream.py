"""Translate text of any length, one buffer of lines at a time, and continue after an interruption."""

import fcntl
import gzip
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from ..data.text_files import decode_line, read_lines
from ..durable import check_permission, is_same
from ..errors import UserError
from ..lock import NO_LOCKS
from ..progress import bars_hidden, shows_bars

BUFFER = 2048  # lines that are sorted by length and translated together
STANDARD = "-"  # the name of standard input and standard output


def translate_stream(
    translate: Callable[[list[str], int], list[str]],
    source: str = STANDARD,
    target: str = STANDARD,
    *,
    resume: bool = False,
    overwrite: bool = False,
    buffer: int = BUFFER,
) -> int:
    """Translate line by line. The target has as many lines as the source, in the same order.

    Memory does not grow with the text. Lines are written to the target after each buffer, so that an interruption
    loses at most the current buffer.

    Args:
        translate: a function that receives a list of sentences and the number of the first sentence's line, and
            returns the list of translations.
        source: a file (`.gz`: compressed), or `-` for standard input.
        target: a file (`.gz`: compressed), or `-` for standard output.
        resume: count the complete lines in the target, and continue after them. An incomplete last line is translated
            again.
        overwrite: replace the target.
        buffer: lines that are translated together. Fewer lines give the first translation sooner; more are faster.

    Returns:
        The number of lines translated.

    Raises:
        UserError: the source is missing or no text, the target exists, it has more lines than the source, or another
            process writes it. The target is then unchanged.
    """
    check_stream(source, target, resume=resume, overwrite=overwrite)
    total = None if source == STANDARD else sum(1 for _ in _read(source))  # this also finds lines that are no text
    done, end, size = _whole_lines(Path(target)) if resume else (0, 0, None if overwrite else 0)
    lines = _after(_read(source), done, source, target)
    if source == STANDARD and sys.stdin.isatty():
        buffer = 1  # somebody is waiting for each line
    chunks = iter(lambda: list(islice(lines, buffer)), [])
    translated = map(translate, chunks, itertools.count(done + 1, buffer))
    count = 0
    with bars_hidden(target == STANDARD and sys.stdout.isatty()):
        first = next(translated, [])  # an error before the first translation leaves the target unchanged
        with (
            _open_target(target, end, size) as file,
            tqdm(unit=" lines", initial=done, total=total, disable=not shows_bars()) as bar,
        ):
            for chunk in chain([first], translated):
                file.write("".join(f"{line}\n" for line in chunk).encode())
                file.flush()
                count += len(chunk)
                bar.update(len(chunk))
    return count


def check_stream(source: str, target: str, *, resume: bool = False, overwrite: bool = False) -> None:
    """Refuse a source that does not exist, and a target that is the source, would be lost, or cannot be continued.

    Raises:
        UserError: the source or the target is refused. The message says why.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with the output, and --overwrite replaces it; give only one")
    if source != STANDARD:
        next(_read(source), None)
    elif sys.stdin is None:
        raise UserError("standard input is closed; name a file with --input")
    if target == STANDARD:
        if resume:
            raise UserError("--resume continues a file; name it with --output")
        return
    path = Path(target)
    if source != STANDARD and is_same(path, Path(source)):
        raise UserError(f"{target} is also the input; give another place for the output")
    if resume and path.suffix == ".gz":
        raise UserError(f"--resume: {target}: a compressed file cannot be continued; compress it when it is complete")
    if path.is_dir():
        raise UserError(f"{target} is a folder; give the name of a file")
    if path.exists() and not (resume or overwrite):
        go_on = "" if path.suffix == ".gz" else ", --resume to continue it"
        raise UserError(f"{target} exists already; give another place{go_on}, or --overwrite")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent} for the output; make it first")
    check_permission(path)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserError(f"{path}: no permission to write this file; give another place")


def _whole_lines(path: Path) -> tuple[int, int, int]:
    """Return the number of complete lines in a file, the end of the last one, and the file's size, both in bytes."""
    if not path.exists():
        return 0, 0, 0
    count, end = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            if (last := block.rfind(b"\n")) >= 0:
                end = file.tell() - len(block) + last + 1
        return count, end, file.tell()


def _after(lines: Iterable[str], done: int, source: str, target: str) -> Iterator[str]:
    """Return the lines after the first `done` lines, which must exist."""
    left = iter(lines)
    if sum(1 for _ in islice(left, done)) < done:
        raise UserError(f"{target} has {done:,} lines, more than {source}; it is not a translation of this text")
    return left


def _read(source: str) -> Iterator[str]:
    """Yield the lines of a file or of standard input. An empty file has none."""
    if source != STANDARD:
        path = Path(source)
        yield from () if path.is_file() and not path.stat().st_size else read_lines(path)
        return
    for number, raw in enumerate(sys.stdin.buffer, start=1):
        yield decode_line(raw, Path("standard input"), number)


@contextmanager
def _open_target(target: str, end: int, size: int | None) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Yield the target, opened for writing after its first `end` bytes. Standard output stays open afterwards.

    A file is locked for this process. It must still have the `size` at which its lines were counted; None: any size.
    """
    if target == STANDARD:
        try:
            yield sys.stdout.buffer
        except BrokenPipeError:  # `head` has closed the pipe; Python would complain once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    with open(target, "ab") as file:
        _claim(file, target, size)
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a device has no length
            file.truncate(end)
        if target.endswith(".gz"):
            with gzip.GzipFile(target, "wb", fileobj=file) as compressed:
                yield compressed
        else:
            yield file


def _claim(file: BinaryIO, target: str, size: int | None) -> None:
    """Lock the target. Refuse a file that another process writes, or has written meanwhile: lines would be doubled."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another process is writing {target}; wait for its end, or give another --output") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    if size is not None and os.fstat(file.fileno()).st_size != size:
        raise UserError(f"{target} has changed since this command began; give the command with --resume once more")
