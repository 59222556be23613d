"""Write the tables of recipe keys in docs/recipes.md from the annotated reference recipe.

python benchmarks/recipe_page.py
"""

import re
from pathlib import Path

from reports import filled_in, markdown_table

from hf_deepwide.durable import write_whole
from hf_deepwide.runs.recipe import PACKAGED

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
REFERENCE = PACKAGED / "reference.yaml"
LINE = re.compile(r"  (# )?(\w+): (.*?) +# (.*)")  # a # before the key: a key of one family or one kind of data


def keys(section: str) -> str:
    """The table of a section: one row for each key, with its default and what it does."""
    text = REFERENCE.read_text(encoding="utf-8")
    lines = text.partition(f"\n{section}:\n")[2].partition("\n\n")[0].splitlines()
    found = (LINE.fullmatch(line).groups() for line in lines)
    rows = ((f"`{key}`", f"`{value}`", meaning) for _, key, value, meaning in found)
    return markdown_table(["key", "value", "what it does"], rows)


def with_keys(page: str) -> str:
    """The page with the tables between their markers."""
    for section in re.findall(r"<!-- keys: (\w+) -->", page):
        begin, end = f"<!-- keys: {section} -->\n", f"<!-- /keys: {section} -->"
        page = filled_in(page, begin, keys(section), end)
    return page


if __name__ == "__main__":
    write_whole(PAGE, with_keys(PAGE.read_text(encoding="utf-8")))
