"""Ranges of accepted numbers."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import UserError, quote


class Range(NamedTuple):
    """The numbers from `least` to `most`, with or without these two."""

    least: float
    most: float
    excludes_least: bool = False
    excludes_most: bool = False

    def __str__(self) -> str:
        least = f"more than {_number(self.least)}" if self.excludes_least else f"{_number(self.least)} or more"
        most = f"less than {_number(self.most)}" if self.excludes_most else f"{_number(self.most)} at most"
        return f"{least}, and {most}"

    def holds(self, value: float) -> bool:
        """Return True if the value is in the range; NaN is in no range."""
        return (
            self.least <= value <= self.most
            and not (self.excludes_least and value == self.least)
            and not (self.excludes_most and value == self.most)
        )


def check_numbers(values: Any, ranges: Mapping[str, Range], section: str = "") -> None:
    """Refuse an object's numbers that are outside their ranges; None is always accepted.

    Args:
        values: the object.
        ranges: the accepted range of each attribute, by its name.
        section: prefix of the names in the message, such as "data.".

    Raises:
        UserError: a number is outside its range; the message names the attribute, its value, and the range.
    """
    for name, accepted in ranges.items():
        value = getattr(values, name)
        if isinstance(value, int | float) and not accepted.holds(value):
            raise UserError(f"{section}{name} is {quote(value)}; accepted: {accepted}")


def _number(value: float) -> str:
    if math.isinf(value):
        return "infinity"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
