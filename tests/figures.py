"""Figures on a page, and which of them stand in text that something has generated."""

import re

FIGURE = re.compile(r"(?<![\w.-])\d[\d.,]*(?:e[+-]?\d+)?")  # not the 30 of Multi30k, nor the 2.0 of Apache-2.0
NO_FIGURES = (
    re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE),  # code, also in a line: names, not results
    re.compile(r"`[^`\n]*`"),
    re.compile(r"<!--.*?-->"),
    re.compile(r"(?<=\])\([^)]*\)"),  # where a link leads
    re.compile(r"\bet al\. \d{4}"),
)


def pattern(text: str) -> re.Pattern:
    """Finds a text however its lines are broken; those of a table are not."""
    if text.startswith("|") or "\n|" in text:
        return re.compile(re.escape(text))
    return re.compile(r"\s+".join(map(re.escape, text.split())))


def without(page: str, texts: list[str]) -> str:
    """A page without the texts that were generated, and without what is no figure."""
    for text in sorted(texts, key=len, reverse=True):
        page = pattern(text).sub("\n", page)
    for each in NO_FIGURES:
        page = each.sub("", page)
    return page


def lines_with_figures(page: str) -> list[str]:
    """The lines that have some."""
    return [line for line in page.splitlines() if FIGURE.search(line)]


def tables(page: str) -> list[str]:
    """The first line of each table."""
    return re.findall(r"^(\|.*)\n\|(?: *:?-+:? *\|)+$", page, flags=re.MULTILINE)
