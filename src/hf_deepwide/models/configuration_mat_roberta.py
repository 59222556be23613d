"""Configuration of MAT for language understanding."""

from typing import Any, Literal

from .configuration_base import DeepWideConfig, check_bounds, check_rates, validated
from .quoting import quote

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


@validated
class MATRobertaConfig(DeepWideConfig):
    """RoBERTa with multi-branch attention (Fan et al. 2020, section 6).

    The defaults are RoBERTa-base (Liu et al. 2019) with two attention branches, as in the paper. The paper's
    RoBERTa-large has `d_model=1024, encoder_layers=24, encoder_attention_heads=16, encoder_ffn_dim=4096`. With
    `attention_branches=1, drop_branch=0` the model is RoBERTa. All fields but the last three are shared, see
    `DeepWideConfig`. The fields of a decoder have no effect. `lm_head_bias` has no effect: the head has a bias.

    Args:
        layer_drop: LayerDrop (Fan, Grave and Joulin 2020), a row of the paper's table 9: the probability of skipping a
            whole layer in training.
        max_position_embeddings: longest sequence, in tokens. The value in a RoBERTa config is larger by two, because
            it counts two positions that no token uses.
        classifier_dropout: dropout before the two projections of the classification head; None means `dropout`.
        layer_norm_eps: the epsilon of layer norms. RoBERTa's is 1e-5; the default of Transformers' `RobertaConfig` is
            1e-12.
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
    layer_norm_eps: float = 1e-5

    def __post_init__(self, **kwargs: Any) -> None:
        check_labels(kwargs.get("num_labels"), self.id2label, self.problem_type)
        super().__post_init__(**kwargs)

    def validate_classifier(self) -> None:
        """Check that the head's dropout and LayerDrop are rates, and that the epsilon of layer norms is above 0."""
        check_rates(self, "classifier_dropout", "layer_drop")
        check_bounds(self, 0, 1, "layer_norm_eps", above=True)


def check_labels(count: Any, names: Any, problem: Any) -> None:
    """Refuse labels for which no classification head can be made. Each argument may be None.

    Args:
        count: the number of labels (`num_labels`).
        names: the name of each label by its number (`id2label`).
        problem: the `problem_type`, one of `PROBLEMS`.

    Raises:
        ValueError: names the field, its value, and what is accepted.
    """
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"`num_labels` is {quote(count)}; accepted: a whole number, 1 or more")
    if names is not None and (not isinstance(names, dict) or not names):
        raise ValueError(f"`id2label` is {quote(names)}; accepted: the name of each label, by its number from 0 on")
    if names is not None and {str(number) for number in names} != {str(number) for number in range(len(names))}:
        raise ValueError(f"`id2label` has the numbers {quote([*names])}; accepted: 0 to {len(names) - 1}, each once")
    if count is not None and names is not None and count != len(names):
        raise ValueError(
            f"`num_labels` is {count}, and `id2label` names {len(names)} labels; leave one of the two out"
        )
    if problem is not None and problem not in PROBLEMS:
        raise ValueError(f"`problem_type` is {quote(problem)}; accepted: {', '.join(PROBLEMS)}")
