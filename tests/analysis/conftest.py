"""The figures of this room are looked at."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> None:
    """Draw figures."""
