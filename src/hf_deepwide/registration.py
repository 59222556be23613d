"""Registration of the families and of the translation pipeline with Transformers."""

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from .families import all_families
from .models.pipeline_registration import register_pipeline
from .models.word_tokenizer import WordTokenizer


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
