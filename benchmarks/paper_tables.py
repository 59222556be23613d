"""Every table of the four papers beside this library: each row's recipe, parameters, printed score, and ours if run.

    make paper-tables            (python benchmarks/paper_tables.py)

writes benchmarks/results/paper_tables.md and .json from benchmarks/paper_tables/*.yaml (see paper_rows.py). Parameters
are counted on models of the rows' configs. A score of ours is that of a run with the recipe of the row, but for its
seed, of which several are averaged; runs are the `results.json` that JSON files under benchmarks/results and
benchmarks/quality/results are or hold.
"""

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from paper_rows import ROOT, Row, Table, arguments, overrides_of, read_tables

from hf_deepwide.errors import run_script
from hf_deepwide.training.recipe import differences

RESULTS = ROOT / "benchmarks" / "results"
RUNS = [RESULTS, ROOT / "benchmarks" / "quality" / "results"]
NOT_RUN = "not run"


@dataclass(frozen=True)
class Run:
    """What was trained: the recipe that a results file holds, its results, and the file."""

    recipe: dict[str, dict[str, Any]]
    results: dict[str, Any]
    file: str


def runs_of(row: Row, column: str) -> list[tuple[float, str]]:
    """Score and file of each run of a row and column."""
    place = row.place(column)
    if place is None or row.recipe is None:
        return []
    values = row.values(column)
    return [
        (at(run.results, place), run.file)
        for run in all_runs()
        if run.recipe["model"] == values["model"]
        and not [
            line for line in differences(run.recipe, values) if not line.startswith(("training.seed:", "data.root:"))
        ]
    ]


@cache
def all_runs() -> list[Run]:
    """All results of runs that are committed."""
    runs = []
    for folder in RUNS:
        for file in sorted(folder.rglob("*.json")):
            name = file.relative_to(ROOT).as_posix()
            runs += [Run(found["recipe"], found, name) for found in results_in(json.loads(file.read_text("utf-8")))]
    return runs


def results_in(values: Any) -> Iterator[dict[str, Any]]:
    """The contents of `results.json` files, wherever they are in what a JSON file holds."""
    if isinstance(values, dict) and {"recipe", "versions"} <= set(values):
        yield values
    elif isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from results_in(value)


def at(values: Any, place: str) -> Any:
    """`at({"a": {"b": 1}}, "a.b")` is 1."""
    for key in place.split("."):
        values = values[key]
    return values


def record(row: Row) -> dict[str, Any]:
    """What is known of a row, for the JSON file and the Markdown."""
    runs = {column: runs_of(row, column) for column in row.columns}
    return {
        "row": row.name,
        "recipe": row.recipe,
        "overrides": None if row.recipe is None else row.changes(),
        "command": None if row.recipe is None else shlex.join([row.recipe, *arguments(row.changes())]),
        "parameters": row.parameters,
        "printed_parameters": row.printed,
        "note": row.note,
        "paper": dict(zip(row.columns, row.scores, strict=True)),
        "ours": None
        if row.recipe is None or not any(map(row.place, row.columns))
        else {
            column: {"score": mean(score for score, _ in found), "files": [file for _, file in found]}
            for column, found in runs.items()
            if found
        },
    }


def ours(row: dict[str, Any]) -> str:
    """Our scores as the Markdown has them; nothing where there is nothing to run, or to compare."""
    if row["ours"] is None:
        return ""
    told = (f"{column} {run['score']:.2f}, runs: {len(run['files'])}" for column, run in row["ours"].items())
    return "; ".join(told) or NOT_RUN


def markdown(table: Table, rows: list[dict[str, Any]]) -> str:
    """A table of ours for one of a paper's."""
    lines = [f"### Table {table.number}: {table.title}", ""]
    lines += [table.text.strip(), ""] if table.text else []
    by_column = [
        f"{column}: `{shlex.join(arguments(overrides_of(more)))}`"
        for column, more in table.columns.items()
        if overrides_of(more)
    ]
    lines += [f"A row is trained for each column. {'; '.join(by_column)}.", ""] if by_column else []
    axes = f" {'/'.join(table.axes)}" if table.axes else ""
    if rows:
        lines += [
            " | ".join([f"| row{axes}", "recipe", "parameters", "printed", *table.columns, "ours", "note |"]),
            "|---" * (len(table.columns) + 6) + "|",
        ]
    for row in rows:
        recipe = f"`{row['command']}`" if row["recipe"] else ""
        size = "" if row["parameters"] is None else f"{row['parameters'] / 1e6:.3f} M"
        printed = f"{row['printed_parameters']} M" if row["printed_parameters"] else ""
        cells = [row["row"], recipe, size, printed, *row["paper"].values(), ours(row), row["note"] or ""]
        lines.append("| " + " | ".join(cells) + " |")
    if table.smaller:
        told = []
        for name, where in table.smaller.items():
            score = at(json.loads((RESULTS / where["file"]).read_text("utf-8")), where["score"])
            told.append(f"{name} {score:.2f} ([{Path(where['file']).name}]({where['file']}))")
        lines += ["", f"Run here at another size: {'; '.join(told)}."]
    return "\n".join([*lines, ""])


HEAD = """# The papers' tables

Written by `make paper-tables` from benchmarks/paper_tables/*.yaml, which hold what the papers print. A row can be
trained by `python scripts/train_translation.py scripts/recipes/RECIPE.yaml OVERRIDES` (recipes in masked_lm/ by
`scripts/train_masked_lm.py`) with what stands under *recipe*. *parameters* are counted on the row's model by this
library, *printed* is the paper's number; a note says why they differ. Scores under a column's name are the paper's.
*ours* is of runs here with exactly this recipe; no recipe, and no number under *parameters*, where this library has
no such model.
"""


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    report, text = write()
    (RESULTS / "paper_tables.json").write_text(report, encoding="utf-8")
    (RESULTS / "paper_tables.md").write_text(text, encoding="utf-8")


def write() -> tuple[str, str]:
    """The JSON and the Markdown, as text."""
    report: dict[str, dict[str, Any]] = {}
    parts = [HEAD]
    for table in read_tables():
        if table.paper not in report:
            parts.append(f"## {table.paper}\n")
        rows = [record(row) for row in table.rows]
        report.setdefault(table.paper, {})[table.number] = {"title": table.title, "rows": rows}
        parts.append(markdown(table, rows))
    return json.dumps(report, indent=1, ensure_ascii=False) + "\n", "\n".join(parts)


if __name__ == "__main__":
    run_script(main)
