"""What a benchmark leaves: its results as JSON, and beside them the table that is made of these."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError


def write_report(output: Path, report: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> None:
    """Write `output` with the suffixes .json and .md; its folder is made."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output.with_suffix(".json"), json.dumps(report, indent=2) + "\n")
    write_whole(output.with_suffix(".md"), table(report))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown, of rows with the same columns."""
    return markdown_table(rows[0] if rows else (), (row.values() for row in rows))


def markdown_table(head: Collection[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, of titles and of the cells below them."""
    first, *rest = (f"| {' | '.join(map(str, cells))} |\n" for cells in (head, *rows))
    return "".join([first, "|---" * len(head) + "|\n", *rest])


def filled_in(page: str, begin: str, text: str, end: str) -> str:
    """The page with the text between two markers.

    Raises:
        UserError: the page lacks a marker.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise UserError(f"the page has no {(end if begun else begin).strip()}")
    return before + begin + text + end + after
