"""The rows of the papers' tables, for tests that compare their models' numbers of parameters."""

import json
from functools import cache

from paper_rows import Row, Table, read_tables


@cache
def tables() -> list[Table]:
    """The tables of all papers, read once per process, because their rows keep configs that take seconds to make."""
    return list(read_tables())


def rows_of(author: str) -> list[Row]:
    """A paper's rows that this library has a model for, one row per config. A config is made when it is first used."""
    rows = [row for table in tables() if table.paper.startswith(author) for row in table.rows]
    made_of = {json.dumps([row.recipe, row.config, row.vocabulary, row.overrides]): row for row in rows}
    return [row for row in made_of.values() if row.recipe or row.config]
