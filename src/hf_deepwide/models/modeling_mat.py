"""The Multi-branch Attentive Transformer (Fan et al. 2020, "Multi-branch Attentive Transformer"), arXiv 2006.10270.

Each attention sub-layer (self- or cross-attention, encoder or decoder) averages N_a independent multi-head attentions:

    mAttn(Q, K, V) = Q + 1/N_a sum_i beta_i attn_M(Q, K, V; theta_i)                                   (Eq. 4, 6)
    beta_i = 1{U_i >= rho} / (1 - rho),  U_i ~ U[0, 1] in training;  beta_i = 1 otherwise              (Eq. 5)

and the feed-forward sub-layer is dropped, or split into branches, in the same way:

    x + 1/N_f sum_i beta_i FFN(x; w_i)                                                                 (Eq. 7, 8)

Head drop (`drop_unit="head"`) draws a U_ij for each head of each branch, and drops heads before the output projection
mixes them (Eq. 9, 10). `join_ffn=False` and `drop_unit="chunk"` drop as the released code does; see `DeepWideConfig`.

`attention.MultiBranchAttention` and `feed_forward.MultiBranchFeedForward` compute the sums. The residual connection in
`layers.ResidualLayer` adds Q and x. With N_a = 1 and rho = 0 this is the vanilla Transformer. Proximal initialisation
(section 3.3) is `MATForConditionalGeneration.from_base`.
"""

from transformers import GenerationMixin

from .configuration_mat import MATConfig
from .modeling_base import DeepWideForConditionalGeneration, DeepWideModel


class MATModel(DeepWideModel):
    """Encoder and decoder without a head."""

    config_class = MATConfig


class MATForConditionalGeneration(DeepWideForConditionalGeneration, GenerationMixin):
    """The MAT translation model."""

    config_class = MATConfig
    model_class = MATModel
