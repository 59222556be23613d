"""What the pages print: blocks of code, commands, links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code on a page in one language, in order."""
    return [code for kind, code in fenced(page) if kind == language]


def fenced(page: Path, section: str = "") -> list[tuple[str, str]]:
    """All blocks of a page, or of the section with this heading, each as (language, code)."""
    text = page.read_text(encoding="utf-8")
    if section:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """The words after `hf-deepwide` in every command, in shell blocks and between backticks."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]*\bhf-deepwide [^`\n]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M))
    lines = [line for code in blocks(page, "shell") for line in code.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*lines, *inline]:
        if command := re.search(r"(?:^|[|;&] *|-m )hf-deepwide (.*)|-m hf_deepwide\.cli (.*)", line):
            words = shlex.split(command[1] or command[2], comments=True)
            stops = [number for number, word in enumerate(words) if word in ("|", "<", ">", ";", "&&")]
            found.append(words[: stops[0]] if stops else words)
    return found


def links(page: Path) -> list[str]:
    """The targets of all links and pictures of a page."""
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
