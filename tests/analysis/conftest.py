"""Tests in this folder look at the figures."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> None:
    """Draw figures: override the fixture that leaves them blank."""
