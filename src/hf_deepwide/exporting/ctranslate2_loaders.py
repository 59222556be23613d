"""Our families for CTranslate2's own converter, `TransformersConverter`.

The converter looks up a loader by the name of the config's class. `import hf_deepwide` must neither need nor load
ctranslate2, so that the loaders are registered when the converter's module is imported, whichever comes first.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..families import FAMILIES
from ..prune import is_prunable, prune

CONVERTERS = "ctranslate2.converters.transformers"


class Loader:
    """What the converter asks of a loader: the class that loads a model, and the model's specification."""

    architecture_name = "AutoModelForSeq2SeqLM"

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The specification of a model.

        Raises:
            UserError: the engine cannot compute what the model computes, or the model has several posteriors.
        """
        from .ctranslate2_spec import specification

        return specification(prune(model) if is_prunable(model) else model, tokenizer)


class Waiting(MetaPathFinder):
    """Wait for the import of the converter's module; then register the loaders, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that also registers ours; None for every other module."""
        if name != CONVERTERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register_with(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_loaders() -> None:
    """Register our loaders with CTranslate2's converter: now where it is imported, else as soon as it is."""
    if CONVERTERS in sys.modules:
        register_with(sys.modules[CONVERTERS])
    elif not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


def register_with(converters: ModuleType) -> None:
    """Register a loader of every family under the name of its config class."""
    for family in FAMILIES.values():
        converters.register_loader(family.config.__name__)(Loader)
