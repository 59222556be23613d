"""The lower bounds in pyproject.toml are the versions that the suite runs with."""

import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
BOUNDS = re.findall(r'"([\w-]+)>=([\w.]+)[";]', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NOT_RUN = {"setuptools": "builds the package", "torch": "see constraints-oldest.txt"}


def pinned(file: str) -> dict[str, str]:
    """The version of each package in a constraints file."""
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize(("name", "bound"), [pair for pair in BOUNDS if pair[0] not in NOT_RUN])
def test_oldest_constraints_hold_the_bound(name, bound):
    oldest = Version(pinned("constraints-oldest.txt")[canonicalize_name(name)])
    assert oldest == Version(bound)
    assert Version(pinned("constraints.txt")[canonicalize_name(name)]) >= oldest


def test_bounds_are_found():
    assert {"transformers", "torch", "pytest"} <= {name for name, _ in BOUNDS}
