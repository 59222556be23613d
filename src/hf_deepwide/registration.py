"""The families, declared once, and their registration with the Auto classes."""

from typing import NamedTuple

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .models.configuration_mat import MATConfig
from .models.configuration_vanilla_transformer import VanillaTransformerConfig
from .models.modeling_base import DeepWideForConditionalGeneration, DeepWideModel
from .models.modeling_mat import MATForConditionalGeneration, MATModel
from .models.modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)


class Family(NamedTuple):
    """The three classes of a family."""

    config: type
    model: type[DeepWideModel]
    lm: type[DeepWideForConditionalGeneration]


FAMILIES = {
    family.config.model_type: family
    for family in (
        Family(VanillaTransformerConfig, VanillaTransformerModel, VanillaTransformerForConditionalGeneration),
        Family(MATConfig, MATModel, MATForConditionalGeneration),
    )
}


def register() -> None:
    """Enter every family into the Auto classes."""
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config, exist_ok=True)
        AutoModel.register(family.config, family.model, exist_ok=True)
        AutoModelForSeq2SeqLM.register(family.config, family.lm, exist_ok=True)
