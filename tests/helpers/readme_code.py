"""The Python code of a README, run as a reader would run it."""

import re
from typing import Any

import pytest


def python_block(readme: str) -> str:
    """The first Python block of a README."""
    return re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]


def run_code(code: str) -> dict[str, Any]:
    """Run code, and return its global names with their values."""
    found: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), found)
    return found


def printed_by(code: str, capsys: pytest.CaptureFixture) -> str:
    """Run code, and return what it prints."""
    capsys.readouterr()
    run_code(code)
    return capsys.readouterr().out.strip()
