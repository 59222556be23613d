"""The files that tests of a user's mistakes start from."""

import pytest


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """Tiny checkpoints of all families, a corpus, and recipes (`mistakes.make_workspace`)."""
    from mistakes import make_workspace

    return make_workspace(tmp_path_factory.mktemp("made") / "workspace")
