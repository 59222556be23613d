"""Configuration of MAT for language understanding."""

from typing import Literal

from .configuration_base import DeepWideConfig, check_rates, validated


@validated
class MATRobertaConfig(DeepWideConfig):
    """RoBERTa with multi-branch attention (Fan et al. 2020, section 6).

    The defaults are RoBERTa-base (Liu et al. 2019) with two attention branches, as in the paper; its RoBERTa-large
    has `d_model=1024, encoder_layers=24, encoder_attention_heads=16, encoder_ffn_dim=4096`. With
    `attention_branches=1, drop_branch=0` the model is RoBERTa. All fields but the last two are shared, see
    `DeepWideConfig`; fields that concern a decoder have no effect.

    Args:
        layer_drop: LayerDrop (Fan, Grave and Joulin 2020), a row of the paper's table 9: the probability of skipping a
            whole layer in training.
        max_position_embeddings: longest sequence, in tokens. RoBERTa's own field counts two positions more, which no
            token has.
        classifier_dropout: dropout before the two projections of the classification head; None means `dropout`.
    """

    model_type = "mat_roberta"

    vocab_size: int = 50265
    d_model: int = 768
    encoder_layers: int = 12
    decoder_layers: int = 1
    encoder_attention_heads: int = 12
    decoder_attention_heads: int = 1
    encoder_ffn_dim: int = 3072
    decoder_ffn_dim: int = 1
    attention_dropout: float | int = 0.1
    activation_function: str = "gelu"
    max_position_embeddings: int = 512
    position_embedding_type: Literal["sinusoidal", "marian", "learned"] = "learned"
    scale_embedding: bool = False
    layernorm_embedding: bool = True
    init_std: float | int | None = 0.02
    attention_branches: int = 2
    drop_branch: float | int = 0.2
    decoder_start_token_id: int | None = None
    is_encoder_decoder: bool = False
    use_cache: bool = False
    layer_drop: float | int = 0.0
    classifier_dropout: float | int | None = None

    def validate_classifier(self) -> None:
        """The head's dropout and LayerDrop are rates."""
        check_rates(self, "classifier_dropout", "layer_drop")
