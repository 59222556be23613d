"""Register our families with CTranslate2's own converter, `TransformersConverter`.

The converter looks up a loader by the name of the config's class. `import hf_deepwide` must neither need nor load
ctranslate2. So the loaders are registered when the converter's module is imported, before or after this package.
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
    """A loader as the converter requires it: it names the class that loads a model, and returns the specification."""

    architecture_name = "AutoModelForSeq2SeqLM"

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return the specification of a model.

        Raises:
            UserError: the engine cannot compute the model's function, or the model has several posteriors.
        """
        from .ctranslate2_spec import specification

        return specification(prune(model) if is_prunable(model) else model, tokenizer)


class Waiting(MetaPathFinder):
    """An import hook that waits for the import of the converter's module, and then registers the loaders once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the converter's module, changed to also register our loaders; None for other modules."""
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
    """Register our loaders with CTranslate2's converter: now if it is imported already, else when it is imported."""
    if CONVERTERS in sys.modules:
        register_with(sys.modules[CONVERTERS])
    elif not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


def register_with(converters: ModuleType) -> None:
    """Register a loader for each family under the name of the family's config class."""
    for family in FAMILIES.values():
        converters.register_loader(family.config.__name__)(Loader)
