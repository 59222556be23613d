"""Parameters of a model, counted without making it, and the rows of the papers' tables."""

import json
from functools import cache

from paper_rows import Row, Table, read_tables


@cache
def tables() -> list[Table]:
    """The tables of all papers, read once in a process: their rows keep the configs, which take seconds to make."""
    return list(read_tables())


def rows_of(author: str) -> list[Row]:
    """The rows of a paper that are models of ours, what makes a config once; a config is made when it is asked for."""
    rows = [row for table in tables() if table.paper.startswith(author) for row in table.rows]
    made_of = {json.dumps([row.recipe, row.config, row.vocabulary, row.overrides]): row for row in rows}
    return [row for row in made_of.values() if row.recipe or row.config]
