"""The vanilla Transformer (Vaswani et al. 2017, "Attention Is All You Need"), pre- or post-norm.

Everything it needs is in `modeling_base`: the plain Transformer is the point where width and depth are at rest.
"""

from transformers import GenerationMixin

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_base import DeepWideForConditionalGeneration, DeepWideModel


class VanillaTransformerModel(DeepWideModel):
    """Encoder and decoder without a head."""

    config_class = VanillaTransformerConfig


class VanillaTransformerForConditionalGeneration(DeepWideForConditionalGeneration, GenerationMixin):
    """The baseline translation model."""

    config_class = VanillaTransformerConfig
    model_class = VanillaTransformerModel
