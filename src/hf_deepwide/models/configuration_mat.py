"""Configuration of the Multi-branch Attentive Transformer."""

from .configuration_base import DeepWideConfig, validated


@validated
class MATConfig(DeepWideConfig):
    """The Multi-branch Attentive Transformer (Fan et al. 2020).

    By default there are three attention branches and one feed-forward network. Each of them is dropped with
    probability 0.2 in training. The paper's best IWSLT14 model is `d_model=256, encoder_ffn_dim=2048,
    decoder_ffn_dim=2048, encoder_attention_heads=4, decoder_attention_heads=4, drop_branch=0.3, dropout=0.3`.
    All fields are shared; see `DeepWideConfig`.
    """

    model_type = "mat"

    attention_branches: int = 3
    drop_branch: float | int = 0.2
