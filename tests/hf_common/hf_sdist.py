"""Get the model tests that Transformers ships in its source distribution, and make them importable as `tests`.

The wheel of Transformers holds no tests. Its source distribution holds `tests/test_*.py`, but not the folders that
some of these files import: `tests/generation`, `tests/exporters` and `tests/utils`. `install` makes stand-ins.

Run as a script, this file downloads the source distribution of the installed version into `build/hf_tests`.

A git checkout of Transformers also has GenerationTesterMixin. To test with a checkout, set TRANSFORMERS_TESTS to its
folder `tests`.
"""

import importlib.machinery
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

VERSION = importlib.metadata.version("transformers")
BUILD = Path(__file__).parents[2] / "build" / "hf_tests"
TESTS = Path(os.environ.get("TRANSFORMERS_TESTS") or BUILD / f"transformers-{VERSION}" / "tests")
HAS_GENERATION = (TESTS / "generation" / "test_utils.py").is_file()


def is_there() -> bool:
    """Whether the tests of Transformers are on this machine."""
    return (TESTS / "test_modeling_common.py").is_file()


def fetch() -> None:
    """Download the source distribution and unpack its tests, unless they are there."""
    if is_there():
        return
    archive = BUILD / f"transformers-{VERSION}.tar.gz"
    if not archive.is_file():
        wanted = ["--no-deps", "--no-binary", "transformers", "--dest", str(BUILD), f"transformers=={VERSION}"]
        done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], capture_output=True)
        if done.returncode or not archive.is_file():
            sys.exit(
                f"error: no package index here has the source of transformers {VERSION}, which holds the tests; put "
                f"{archive.name} into {BUILD}, or set TRANSFORMERS_TESTS to the tests folder of a git checkout"
            )
    prefix = f"transformers-{VERSION}/tests/"
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(prefix)
            if member.isfile() and name != member.name and "/" not in name:
                TESTS.mkdir(parents=True, exist_ok=True)
                (TESTS / name).write_bytes(tar.extractfile(member).read())
    (TESTS / "__init__.py").touch()  # the source distribution leaves this empty file out; ConfigTester runs it


def install() -> None:
    """Make `tests.test_modeling_common` and what it imports importable.

    `GenerationTesterMixin` is empty without a git checkout. The mixins of `tests.exporters` are always empty: their
    tests are slow and need onnx, executorch or openvino. The tests import only a dictionary from `tests.utils`.
    """
    _module("tests", TESTS)
    _module("tests.exporters")
    export = type("ExportTesterMixin", (), {})
    generate = type("ExportGenerateTesterMixin", (export,), {})
    _module("tests.exporters.test_export", ExportTesterMixin=export, ExportGenerateTesterMixin=generate)
    _module("tests.utils")
    _module("tests.utils.test_configuration_utils", config_common_kwargs=CONFIG_ARGUMENTS)
    if HAS_GENERATION:
        _module("tests.generation", TESTS / "generation")
    else:
        _module("tests.generation")
        mixin = type("GenerationTesterMixin", (), {})
        _module("tests.generation.test_utils", GenerationTesterMixin=mixin)


CONFIG_ARGUMENTS = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "architectures": ["SomeArchitecture"],
    "problem_type": "regression",
    "id2label": {0: "a", 1: "b", 2: "c"},
    "label2id": {"a": 0, "b": 1, "c": 2},
}


def _module(name: str, folder: Path | None = None, **content: Any) -> None:
    """Register a package with the files of a folder, or a module with the given content."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)] if folder else []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__dict__.update(content)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


if __name__ == "__main__":
    BUILD.mkdir(parents=True, exist_ok=True)
    fetch()
