"""Reports of benchmarks: the results as JSON, and beside them a Markdown table that is made from the results."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError
from hf_deepwide.runs import facts


def measured_on(device: str = "cpu") -> dict[str, Any]:
    """Describe where a benchmark runs: processor or GPU as `machine`, more facts about it, threads, and PyTorch."""
    found = facts.machine()
    name = torch.cuda.get_device_name() if device == "cuda" else found["processor"]
    return {"machine": name, **found, "threads": torch.get_num_threads(), "torch": torch.__version__}


def begun(output: Path | None, about: dict[str, Any], **empty: dict[str, Any]) -> dict[str, Any]:
    """Return the report at `output`, to which results are added, or a new report with `empty` parts if there is none.

    Raises:
        UserError: the report differs in `about`: it is, for example, from another machine.
    """
    place = output.with_suffix(".json") if output else None
    if place is None or not place.is_file():
        return about | empty
    earlier = json.loads(place.read_text(encoding="utf-8"))
    # A key that the report lacks is no difference: an older version did not write it.
    if different := [key for key, value in about.items() if earlier.get(key, value) != value]:
        others = " and another ".join(different)
        raise UserError(f"{place} has numbers of another {others}; remove it, or give another --output")
    return earlier | about


def write_report(output: Path, report: Any, table: Callable[[Any], str] | None = None) -> None:
    """Write `output` with the suffix .json and, if `table` is given, with .md. The folder is created if needed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output.with_suffix(".json"), json.dumps(report, indent=2) + "\n")
    if table is not None:
        write_whole(output.with_suffix(".md"), table(report))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown. All rows have the same columns."""
    return markdown_table(rows[0] if rows else (), (row.values() for row in rows))


def markdown_table(head: Collection[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, with the titles of the columns and the cells of each row."""
    first, *rest = (f"| {' | '.join(map(str, cells))} |\n" for cells in (head, *rows))
    return "".join([first, "|---" * len(head) + "|\n", *rest])


def filled_in(page: str, begin: str, text: str, end: str) -> str:
    """Return the page with `text` between two markers, in place of the earlier text.

    Raises:
        UserError: the page lacks a marker.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise UserError(f"the page has no {(end if begun else begin).strip()}")
    return before + begin + text + end + after
