"""What makes a tiny run quick, in every test that does not say otherwise.

The fixtures import the library: the process that hands tests to workers reads this file, too, and needs none of it.
"""

import gc
from collections.abc import Iterator

import pytest

LONGEST = ("test_scale_processes.py", "test_blocks.py", "test_export_onnx.py", "test_export.py", "test_resume.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with the longest files: at the end, one of them would be busy and the others idle."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collection, which would look at half a million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> Iterator[None]:
    """Leave figures blank: to draw them takes a third of a tiny run.

    A module, or a room, that looks at figures overrides this fixture.
    """
    from tiny_run import leave_figures_blank

    with pytest.MonkeyPatch.context() as patch:
        leave_figures_blank(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> Iterator[None]:
    """Hold out few phrases: to translate 500 in each evaluation takes another third.

    A room that is about the phrases themselves overrides this fixture.
    """
    from tiny_run import hold_out_few

    from hf_deepwide.data.phrases import build_phrases

    with pytest.MonkeyPatch.context() as patch:
        hold_out_few(patch)
        yield
    build_phrases.cache_clear()
