"""Quote a user's values in messages: on one short line, even if a value is large or nested."""

import reprlib

QUOTED, TOLD = 100, 300  # most characters in a message: of a value, and of a text from other software


class _Quote(reprlib.Repr):
    """A `repr` that shows only the first few members and levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 80, 80

    def repr_int(self, value: int, level: int) -> str:
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length():,} bits"


def quote(value: object) -> str:
    """Write a value for a message, on one line of at most 100 characters."""
    return one_line(_Quote().repr(value), QUOTED)


def one_line(said: object, most: int = TOLD) -> str:
    """Write a text from other software, such as an exception, on one line of at most `most` characters."""
    text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in " ".join(str(said).split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"
