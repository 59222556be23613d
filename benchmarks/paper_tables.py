"""Compare the four papers' tables with this library: which rows have a recipe, and the parameters of our models.

    python benchmarks/paper_tables.py                 write the overview in docs/papers.md
    python benchmarks/paper_tables.py --rows mat      print every row of a paper: recipe, parameters, printed scores

benchmarks/paper_tables/*.yaml hold the numbers that the papers print (see paper_rows.py). Parameters are counted on
models that are built from the rows' configs.
"""

import argparse
import shlex
from collections.abc import Sequence
from itertools import groupby

from paper_rows import ROOT, Row, Table, arguments, place_of, read_tables
from reports import filled_in, markdown

from hf_deepwide.durable import write_whole
from hf_deepwide.errors import UserError, run_script

PAGE = ROOT / "docs" / "papers.md"
PAPERS = ("mat", "multipath", "latent_depth", "depthwise_lstm")  # in the order of README
BEGIN, END = "<!-- tables -->\n", "<!-- /tables -->"


def overview() -> str:
    """The overview: a line for each paper, and then a line for each table of each paper.

    A line counts the rows, the rows that can be trained, and the rows that have the printed number of parameters.
    """
    tables = [table for paper in PAPERS for table in read_tables(paper) if table.rows]
    by_paper = {paper: [*of_paper] for paper, of_paper in groupby(tables, lambda table: table.paper)}
    papers = [
        {"paper": paper} | cells_of([row for table in of_paper for row in table.rows])
        for paper, of_paper in by_paper.items()
    ]
    parts = [markdown(papers)]
    for paper, of_paper in by_paper.items():
        cells = [{"table": f"{table.number}: {table.title}"} | cells_of(table.rows) for table in of_paper]
        parts.append(f"### {paper}\n\n{markdown(cells)}")
    return "\n".join(parts)


def cells_of(rows: Sequence[Row]) -> dict[str, object]:
    """The cells, by column, of the line that counts `rows`."""
    printed = [row for row in rows if row.printed and row.model_config]
    return {
        "rows": len(rows),
        "with a recipe": sum(row.recipe is not None for row in rows),
        "parameters as printed": f"{sum(row.note is None for row in printed)} of {len(printed)}" if printed else "",
    }


def row_lines(table: Table) -> list[str]:
    """All rows of a table, as lines for a terminal."""
    lines = [f"\n{place_of(table.number)}: {table.title}", *([table.text.strip()] if table.text else [])]
    for column, more in table.columns.items():
        if more:
            lines.append(f"  for the column {column}: {shlex.join(arguments(more))}")
    for row in table.rows:
        scores = ", ".join(f"{column} {score}" for column, score in zip(row.columns, row.scores, strict=True))
        lines += [f"- {row.name}: {scores}", f"    {command(row)}"]
        if by_column := row.parameters_by_column():
            counts = ", ".join(f"{column} {count / 1e6:.3f}" for column, count in by_column.items())
            lines.append(f"    M parameters: {counts}")
        elif row.parameters is not None:
            printed = f", printed {row.printed} M" if row.printed else ""
            lines.append(f"    {row.parameters / 1e6:.3f} M parameters{printed}{f' ({row.note})' if row.note else ''}")
    return lines


def command(row: Row) -> str:
    """The command that trains a row."""
    if not row.recipe:
        return "no recipe"
    task = [] if row.task == "translation" else [row.task]
    return shlex.join(["hf-deepwide", "train", *task, row.recipe, *arguments(row.changes())])


def main() -> None:
    """Write the overview, or print rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="PAPER", help="print the rows of mat, multipath, latent_depth, …")
    args = parser.parse_args()
    if args.rows:
        known = sorted(path.stem for path in (ROOT / "benchmarks" / "paper_tables").glob("*.yaml"))
        if args.rows not in known:
            raise UserError(f"--rows: {args.rows!r}; accepted: {', '.join(known)}")
        print("\n".join(line for table in read_tables(args.rows) for line in row_lines(table)))
        return
    write_whole(PAGE, with_overview(PAGE.read_text(encoding="utf-8")))


def with_overview(page: str) -> str:
    """The page with the overview between its markers."""
    return filled_in(page, BEGIN, overview(), END)


if __name__ == "__main__":
    run_script(main)
