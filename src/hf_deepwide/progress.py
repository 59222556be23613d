"""Progress bars, only on a terminal and in a notebook. In a file, a bar would be one long line of carriage returns."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

_HIDDEN = ContextVar("_HIDDEN", default=False)


def shows_bars() -> bool:
    """Return True if bars are not hidden, and stderr is a terminal or belongs to a notebook."""
    return not _HIDDEN.get() and (sys.stderr.isatty() or "ipykernel" in sys.modules)


@contextmanager
def bars_hidden(hidden: bool) -> Iterator[None]:
    """Draw no bars within the block if `hidden`: on a terminal they would stand between lines of output."""
    before = _HIDDEN.set(hidden or _HIDDEN.get())
    try:
        yield
    finally:
        _HIDDEN.reset(before)


def tell(line: str) -> None:
    """Print a line on stderr. If the reader of stderr has ended, as `head` does, drop the line and continue."""
    try:
        print(line, file=sys.stderr, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


@contextmanager
def bars_where_shown() -> Iterator[None]:
    """Let `datasets` draw its bars within the block only where bars can be seen."""
    if shows_bars() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
