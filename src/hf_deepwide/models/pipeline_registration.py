"""Restore `pipeline("translation")`, which Transformers 5 has removed."""

import re
from typing import Any

from transformers import AutoModelForSeq2SeqLM, pipelines

from .pipeline_translation import TranslationPipeline


class TaskAliases(dict):
    """The registry's table of alternative task names, in which `translation_xx_to_yy` means `translation`."""

    def __contains__(self, task: object) -> bool:
        return super().__contains__(task) or (isinstance(task, str) and self.is_pair(task))

    def __missing__(self, task: str) -> str:
        if self.is_pair(task):
            return "translation"
        raise KeyError(task)

    @staticmethod
    def is_pair(task: str) -> bool:
        """Return whether the name of a task contains two languages."""
        return re.fullmatch(r"translation_.+_to_.+", task) is not None


def register_pipeline() -> None:
    """Restore `pipeline("translation")` and `pipeline("translation_xx_to_yy")`.

    This function does not call `PIPELINE_REGISTRY.register_pipeline`. With that call, `save_pretrained` of every such
    pipeline would write this code into the checkpoint, even for a Marian model. The checkpoint would then require
    trust_remote_code.
    """
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)  # since 5.19 this table is checked first
    registry = pipelines.PIPELINE_REGISTRY
    registry.supported_tasks["translation"] = translation_task()
    registry.task_aliases = TaskAliases(registry.task_aliases)


def translation_task() -> dict[str, Any]:
    """Return the registry's entry for the task. There is no default model."""
    return {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "default": {}, "type": "text"}


if __name__.startswith("transformers_modules.") and "translation" not in pipelines.PIPELINE_REGISTRY.supported_tasks:
    # This file came with a checkpoint, and the checkpoint's model is loaded before its pipeline is requested.
    register_pipeline()
