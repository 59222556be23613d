"""Parameters of a model, counted without making it, and the rows of the papers' tables."""

from functools import cache

from paper_rows import Table, read_tables


@cache
def tables() -> list[Table]:
    """The tables of all papers, read once in a process: their rows keep the configs, which take seconds to make."""
    return list(read_tables())


def rows_of(author):
    """The rows of a paper that are models of ours, each config once: by label."""
    rows = [row for table in tables() if table.paper.startswith(author) for row in table.rows]
    return {row.model_config.to_json_string(): row for row in rows if row.model_config}.values()
