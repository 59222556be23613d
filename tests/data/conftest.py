"""Tests in this folder use the same corpora as users."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> None:
    """Hold out as many phrases as for users: override the fixture that holds out few."""
