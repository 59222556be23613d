"""Configuration of the vanilla Transformer."""

from .configuration_base import DeepWideConfig, validated


@validated
class VanillaTransformerConfig(DeepWideConfig):
    """The Transformer of Vaswani et al. (2017): the baseline of every table.

    The defaults are the paper's base model (D 512, F 2048, 8 heads, 6 + 6 layers, post-norm). All fields are shared;
    see `DeepWideConfig`.
    """

    model_type = "vanilla_transformer"
