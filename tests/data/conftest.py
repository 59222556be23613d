"""The corpora of this room are those of users."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> None:
    """Hold out as many phrases as users get."""
