"""The Python code of a README, run as its readers run it."""

import re
from typing import Any

import pytest


def python_block(readme: str) -> str:
    """Its first block of Python."""
    return re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]


def run_code(code: str) -> dict[str, Any]:
    """The names that it leaves."""
    found: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), found)
    return found


def printed_by(code: str, capsys: pytest.CaptureFixture) -> str:
    """What it prints."""
    capsys.readouterr()
    run_code(code)
    return capsys.readouterr().out.strip()
