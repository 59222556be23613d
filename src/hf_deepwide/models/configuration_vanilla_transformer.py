"""Configuration of the vanilla Transformer."""

from typing import Literal

from .configuration_base import DeepWideConfig, check_bounds, check_rates, validated


@validated
class VanillaTransformerConfig(DeepWideConfig):
    """The Transformer of Vaswani et al. (2017): the baseline of every table.

    The defaults are the paper's base model (D 512, F 2048, 8 heads, 6 + 6 layers, post-norm). Beside the shared
    fields, see `DeepWideConfig`, it has those of known ways to train deep stacks:

    Args:
        layer_drop: LayerDrop (Fan et al. 2020): the probability of skipping a whole layer in training, in both
            stacks. Skipped layers are not computed, and the others are not rescaled.
        residual: how a sub-layer F is joined to its input x. `"add"`: x + F(x), with LayerNorms. `"rezero"`
            (Bachlechner et al. 2021): x + a F(x), with one learned weight a per layer that starts at 0, and without
            LayerNorms. `"deepnorm"` (Wang et al. 2022): LN(alpha x + F(x)), and smaller initial weights, by constants
            of both depths. `"b2t"` (Takase et al. 2023): post-norm, and the input of a layer is added again before
            the layer's last norm.
        layer_aggregation: None; or `"dlcl"` (Wang et al. 2019): each layer's input is a learned linear combination
            of the embeddings and of all layers' outputs before it, normalised; or `"denseformer"` (Pagliardini et al.
            2024): the same without norms, which starts as the plain stack.
        aggregation_dilation: of DenseFormer: a sum behind layer l takes every so many-th output, back from y_l.
        aggregation_period: of DenseFormer: a sum is made behind every so many-th layer only.
        encoder_solver: None, or `"rk2"` (Li et al. 2022): each encoder layer is evaluated twice, and a learned gate
            weighs what the two evaluations add.

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    model_type = "vanilla_transformer"

    layer_drop: float | int = 0.0
    residual: Literal["add", "rezero", "deepnorm", "b2t"] = "add"
    layer_aggregation: Literal["dlcl", "denseformer"] | None = None
    aggregation_dilation: int = 1
    aggregation_period: int = 1
    encoder_solver: Literal["rk2"] | None = None

    def validate_depth(self) -> None:
        """LayerDrop has a rate in [0, 1), and ways to join layers fit each other and the norms."""
        check_rates(self, "layer_drop")
        if self.residual in ("deepnorm", "b2t") and self.normalize_before:
            raise ValueError(
                f"`residual={self.residual!r}` is a way to join post-norm sub-layers; set `normalize_before=False`"
            )
        if self.residual == "rezero" and self.normalize_before:
            raise ValueError("`residual='rezero'` has no LayerNorms; set `normalize_before=False`")
        least = min(self.encoder_layers, self.decoder_layers)
        check_bounds(self, 1, max(1, least), "aggregation_dilation", "aggregation_period")
        for name in ("aggregation_dilation", "aggregation_period"):
            if getattr(self, name) > 1 and self.layer_aggregation != "denseformer":
                raise ValueError(f"`{name}` is an option of DenseFormer; set `layer_aggregation='denseformer'`, or 1")
        if self.encoder_solver is not None and self.residual != "add":
            raise ValueError(
                f"`encoder_solver={self.encoder_solver!r}` solves for layers whose sub-layers are added to their "
                f"inputs, and `residual` is {self.residual!r}; set `residual='add'`"
            )
        if self.residual == "rezero" and self.layer_aggregation == "dlcl":
            raise ValueError(
                "`residual='rezero'` has no LayerNorms, and `layer_aggregation='dlcl'` normalises what it combines; "
                "choose one of them"
            )
