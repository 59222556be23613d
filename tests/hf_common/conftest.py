"""Choose which of Hugging Face's tests are collected here: none, unless `make hf-tests` has downloaded them."""

import fnmatch
import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hf_sdist

if hf_sdist.is_there():
    hf_sdist.install()
else:
    collect_ignore_glob = ["test_*.py"]

HERE = Path(__file__).parent
# Tests that check nothing for a text encoder-decoder: their loops are empty here, so they "pass".
NOT_APPLICABLE = (
    "test_get_text_features_*",  # for multi-modal models, like the next three
    "test_get_image_features_*",
    "test_get_audio_features_*",
    "test_get_video_features_*",
    "test_problem_types",  # for classification heads
    # It checks that GenerationTesterMixin is inherited. With the source distribution alone, that is an empty class.
    *(() if hf_sdist.HAS_GENERATION else ("test_generation_tester_mixin_inheritance",)),
)
MARKERS = (
    "accelerate_tests",
    "all_flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "generate",
    "slow",
    "torch_compile_test",
    "torch_export_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: of Hugging Face's tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    dropped = {item for item in items if item.path.parent == HERE and _says_nothing(item.name)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _says_nothing(test: str) -> bool:
    return any(fnmatch.fnmatch(test, pattern) for pattern in NOT_APPLICABLE)
