"""The one exception for mistakes that are the user's, and how a script shows it."""

import errno
import struct
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any

from .models.quoting import one_line, quote

__all__ = [
    "UNREADABLE",
    "UserError",
    "need",
    "number_of",
    "one_line",
    "one_line_errors",
    "prefixed",
    "quote",
    "run_script",
    "some",
]

# What libraries such as PyTorch raise for a file that they can make no sense of.
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
    struct.error,
)
# What the system says of a path, and the user can mend; anything else it says is a fault of ours, and keeps its trace.
_MENDABLE = {
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the disk is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EEXIST: "there is a file of this name, where a folder should be",
    errno.EISDIR: "this is a folder, not a file",
}


class UserError(ValueError):
    """Something the user can mend: the message says what was wrong, where, what is accepted, and what to do."""

    status = 2  # the exit status of a script that ends with it


def need(package: str, extra: str, what: str) -> Any:
    """Import what only an optional part of this package brings: `what` needs it.

    Raises:
        UserError: it cannot be imported; the message says what to install.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"{what} needs {package}: pip install 'hf_deepwide[{extra}]' ({one_line(error)})") from error


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Begin the message of a `UserError` with where it is, such as `recipe.yaml: `, unless it begins so."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(prefix.rstrip(": ")) else prefix + message) from error


def some(names: Collection[str]) -> str:
    """The first three of many names, and how many more there are."""
    more = len(names) - 3
    return ", ".join(sorted(names)[:3]) + (f" and {more} more" if more > 0 else "")


def number_of(count: int, noun: str) -> str:
    """A count with its noun: 1 sentence, 2 sentences."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; a `UserError` ends it with one line on stderr and its exit status, not a traceback.

    So does what the system says of a path that cannot be read or written.
    """
    try:
        main()
    except (UserError, OSError) as error:
        message = _message(error)
        if message is None:
            raise
        _end(message, error)


def one_line_errors() -> None:
    """From now on mistakes end this process as `run_script` has it: for scripts of cells, which have no `main`."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = _message(error)
        if message is None:
            sys.__excepthook__(kind, error, trace)
        else:
            _end(message, error)

    sys.excepthook = show


def _message(error: BaseException) -> str | None:
    """What to tell of a mistake that the user can mend; None of any other error."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, OSError) or error.errno not in _MENDABLE:
        return None
    reason = _MENDABLE[error.errno]
    path = error.filename2 or error.filename  # of a renaming, the name that is taken, not that of the draft
    return f"{one_line(path)}: {reason}" if path else reason


def _end(message: str, error: BaseException) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(getattr(error, "status", UserError.status)) from None
