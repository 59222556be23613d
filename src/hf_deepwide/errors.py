"""The one exception for mistakes that are the user's, and how a script shows it."""

import sys
from collections.abc import Callable


class UserError(ValueError):
    """Something the user can mend: the message says what was wrong, where, what is accepted, and what to do."""


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; a `UserError` ends it with one line on stderr and exit status 2, not a traceback."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
