"""Configuration of the vanilla Transformer."""

from typing import Literal

from .configuration_base import DeepWideConfig, check_rates, validated


@validated
class VanillaTransformerConfig(DeepWideConfig):
    """The Transformer of Vaswani et al. (2017): the baseline of every table.

    The defaults are the paper's base model (D 512, F 2048, 8 heads, 6 + 6 layers, post-norm). Beside the shared
    fields, see `DeepWideConfig`, it has those of three ways to train deep stacks:

    Args:
        layer_drop: LayerDrop (Fan et al. 2020): the probability of skipping a whole layer in training, in both
            stacks. Skipped layers are not computed, and the others are not rescaled.
        residual: `"add"`, x + F(x), with LayerNorms; or `"rezero"` (Bachlechner et al. 2021), x + a F(x), with one
            learned weight a per layer that starts at 0, and without LayerNorms.
        layer_aggregation: None, or `"dlcl"` (Wang et al. 2019): each layer's input is a learned linear combination
            of the embeddings and of all layers' outputs before it.

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    model_type = "vanilla_transformer"

    layer_drop: float | int = 0.0
    residual: Literal["add", "rezero"] = "add"
    layer_aggregation: Literal["dlcl"] | None = None

    def validate_depth(self) -> None:
        """LayerDrop has a rate in [0, 1), and there are no LayerNorms beside ReZero."""
        check_rates(self, "layer_drop")
        if self.residual == "rezero" and self.normalize_before:
            raise ValueError("`residual='rezero'` has no LayerNorms; set `normalize_before=False`")
        if self.residual == "rezero" and self.layer_aggregation is not None:
            raise ValueError(
                "`residual='rezero'` has no LayerNorms, and `layer_aggregation='dlcl'` normalises what it combines; "
                "choose one of them"
            )
