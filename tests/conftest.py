"""Fixtures that make tiny runs quick, in every test that does not override them.

The library is imported in the fixtures, not above. The process that hands tests to workers reads this file, too, and
does not need the library.
"""

import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

LONGEST = (  # the longest first
    "test_scale_processes.py", "test_backends.py", "test_resume.py", "test_export_onnx.py", "test_blocks.py",
    "test_equations.py", "test_share.py", "test_classification.py", "test_out_of_memory.py", "test_new_languages.py",
    "test_generation.py", "test_trainer.py", "test_space.py", "test_studies.py", "test_decoding.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with the longest files. Otherwise, at the end, one worker may be busy and the others idle."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="module", autouse=True)
def left_out_of_garbage_collection() -> None:
    """Exclude the objects that exist from garbage collection: each collection would look at a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks() -> Iterator[str]:
    """The address of a server whose children have imported Transformers, and nothing of this package."""
    from forked_commands import serving
    from tiny_run import ENVIRONMENT

    modules = "transformers.pipelines", "transformers.generation.utils"
    with serving(*modules, environment={**ENVIRONMENT, "PYTHONHASHSEED": "123"}) as address:
        yield address


@pytest.fixture(scope="session")
def run_code(forks: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs `python -c CODE WORD …` in a child of the server: a new Python takes long to start."""
    from forked_commands import run

    return partial(run, forks)


@pytest.fixture
def used_in_a_fork(run_code: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load shared models in a child of the server: a new process would spend most of its time on imports."""
    from hf_deepwide.sharing import use

    def run(command: list[str], *, cwd: Path, env: dict[str, str] | None = None, **_: Any) -> Any:
        return run_code(*command[command.index("-c") + 1 :], folder=str(cwd), environment=env or os.environ)

    monkeypatch.setattr(use, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


@pytest.fixture(scope="module", autouse=True)
def blank_figures() -> Iterator[None]:
    """Leave figures blank: to draw them takes a third of a tiny run.

    A test module or a folder of tests that looks at figures overrides this fixture.
    """
    from tiny_run import leave_figures_blank

    with pytest.MonkeyPatch.context() as patch:
        leave_figures_blank(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_held_out() -> Iterator[None]:
    """Hold out few phrases: to translate 500 in each evaluation takes another third.

    A folder with tests of the phrases themselves overrides this fixture.
    """
    from tiny_run import hold_out_few

    from hf_deepwide.data.phrases import build_phrases

    with pytest.MonkeyPatch.context() as patch:
        hold_out_few(patch)
        yield
    build_phrases.cache_clear()
