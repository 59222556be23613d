"""Registration of the families and of the translation pipeline with Transformers."""

import re
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig, pipelines

from .families import all_families
from .models.pipeline_translation import TranslationPipeline
from .models.word_tokenizer import WordTokenizer


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


def register() -> None:
    """Enter families and the tokenizer of words into the Auto classes, and the pipeline into the registry.

    Another call changes nothing.
    """
    for model_type, family in all_families().items():
        AutoConfig.register(model_type, family.config, exist_ok=True)
        for name, cls in family.auto_classes.items():
            if name != "AutoConfig":
                getattr(transformers, name).register(family.config, cls, exist_ok=True)
    AutoTokenizer.register(NoModelConfig, fast_tokenizer_class=WordTokenizer, exist_ok=True)
    register_pipeline()


class NoModelConfig(PreTrainedConfig):
    """The key under which `AutoTokenizer` knows our tokenizer, which serves models of any type."""

    model_type = "hf_deepwide_words"


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
