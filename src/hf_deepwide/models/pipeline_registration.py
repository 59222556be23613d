"""Brings `pipeline("translation")` back, which Transformers 5 has removed."""

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
        """Whether a task names two languages."""
        return re.fullmatch(r"translation_.+_to_.+", task) is not None


def register_pipeline() -> None:
    """Bring `pipeline("translation")` and `pipeline("translation_xx_to_yy")` back.

    Not by `PIPELINE_REGISTRY.register_pipeline`: that also makes `save_pretrained` of every such pipeline write the
    code into the checkpoint, which then asks for trust_remote_code, even a Marian's.
    """
    getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)  # from 5.19 on, the table is asked first
    registry = pipelines.PIPELINE_REGISTRY
    registry.supported_tasks["translation"] = translation_task()
    registry.task_aliases = TaskAliases(registry.task_aliases)


def translation_task() -> dict[str, Any]:
    """The registry's entry; there is no default model."""
    return {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "default": {}, "type": "text"}


if __name__.startswith("transformers_modules.") and "translation" not in pipelines.PIPELINE_REGISTRY.supported_tasks:
    register_pipeline()  # this file came with a checkpoint, and its model is there before any pipeline is asked for
