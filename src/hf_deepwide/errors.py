"""The one exception for mistakes that are the user's, and how a script shows it."""

import errno
import reprlib
import sys
from collections.abc import Callable
from types import TracebackType

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


class _Quote(reprlib.Repr):
    """`repr` of the first few members and levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80

    def repr_int(self, value: int, level: int) -> str:
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length():,} bits"


QUOTED = 100  # characters


def quote(value: object) -> str:
    """A value for a message, on one line of at most 100 characters, however large or nested it is."""
    text = " ".join(_Quote().repr(value).split())
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 1]}…"


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; a `UserError` ends it with one line on stderr and exit status 2, not a traceback.

    So does what the system says of a path that cannot be read or written.
    """
    try:
        main()
    except (UserError, OSError) as error:
        message = _message(error)
        if message is None:
            raise
        _end(message)


def one_line_errors() -> None:
    """From now on mistakes end this process as `run_script` has it: for scripts of cells, which have no `main`."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        message = _message(error)
        if message is None:
            sys.__excepthook__(kind, error, trace)
        else:
            _end(message)

    sys.excepthook = show


def _message(error: BaseException) -> str | None:
    """What to tell of a mistake that the user can mend; None of any other error."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, OSError) or error.errno not in _MENDABLE:
        return None
    path = str(error.filename)
    shown = path if len(path) <= 200 else f"{path[:200]}…"
    return f"{shown}: {_MENDABLE[error.errno]}" if error.filename else _MENDABLE[error.errno]


def _end(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2) from None
