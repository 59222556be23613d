"""Registration of the families and of the translation pipeline with Transformers."""

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from .families import all_families
from .models.pipeline_registration import register_pipeline
from .models.word_tokenizer import WordTokenizer


def register() -> None:
    """Register the families and the word tokenizer with the Auto classes, and the translation pipeline.

    A second call changes nothing.
    """
    for model_type, family in all_families().items():
        AutoConfig.register(model_type, family.config, exist_ok=True)
        for name, cls in family.auto_classes.items():
            if name != "AutoConfig":
                getattr(transformers, name).register(family.config, cls, exist_ok=True)
    AutoTokenizer.register(NoModelConfig, fast_tokenizer_class=WordTokenizer, exist_ok=True)
    register_pipeline()


class NoModelConfig(PreTrainedConfig):
    """The key under which `AutoTokenizer` finds our tokenizer, which serves models of any type."""

    model_type = "hf_deepwide_words"
