"""The one exception for mistakes of the user, and the functions with which a script shows it."""

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

# The errors that libraries such as PyTorch raise for a file that they cannot interpret.
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
# System errors about a path that the user can mend. Any other system error is a bug of ours, and keeps its traceback.
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
    """A mistake that the user can mend: the message says what was wrong, where, what is accepted, and what to do."""

    status = 2  # the exit status of a script that ends with this error


def need(package: str, extra: str, what: str) -> Any:
    """Import a package that is installed only with an `extra` of this package; `what` is the feature that needs it.

    Raises:
        UserError: the package cannot be imported; the message says what to install.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"{what} needs {package}: pip install 'hf_deepwide[{extra}]' ({one_line(error)})") from error


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Put a place such as `recipe.yaml: ` before the message of a `UserError`, unless the message begins with it."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(prefix.rstrip(": ")) else prefix + message) from error


def some(names: Collection[str]) -> str:
    """The first three names in sorted order, and the number of the remaining names."""
    more = len(names) - 3
    return ", ".join(sorted(names)[:3]) + (f" and {more} more" if more > 0 else "")


def number_of(count: int, noun: str) -> str:
    """A count with its noun: 1 sentence, 2 sentences."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; a `UserError` ends it with one line on stderr and its exit status, without a traceback.

    A system error about a path that cannot be read or written ends the script in the same way (see `_MENDABLE`).
    """
    try:
        main()
    except (UserError, OSError) as error:
        message = _message(error)
        if message is None:
            raise
        _end(message, error)


def one_line_errors() -> None:
    """Let errors end this process as in `run_script` from now on. For scripts made of cells, which have no `main`."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = _message(error)
        if message is None:
            sys.__excepthook__(kind, error, trace)
        else:
            _end(message, error)

    sys.excepthook = show


def _message(error: BaseException) -> str | None:
    """The message of an error that the user can mend; None for any other error."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, OSError) or error.errno not in _MENDABLE:
        return None
    reason = _MENDABLE[error.errno]
    path = error.filename2 or error.filename  # of a failed renaming, the final name, not the draft's
    return f"{one_line(path)}: {reason}" if path else reason


def _end(message: str, error: BaseException) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(getattr(error, "status", UserError.status)) from None
