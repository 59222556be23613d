"""Tests in this folder run the code on the pages as users run it."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> None:
    """Draw figures: override the fixture that leaves them blank."""


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> None:
    """Hold out as many phrases as for users: override the fixture that holds out few."""
