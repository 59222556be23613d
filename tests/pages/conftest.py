"""What the pages print is done as users do it."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> None:
    """Draw figures."""


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> None:
    """Hold out as many phrases as users get."""
