"""Configuration of the Transformer with depth-wise LSTMs."""

from typing import Any, Literal

from .configuration_base import WEIGHT, DeepWideConfig, check_bounds, check_used, validated
from .quoting import quote


@validated
class DepthwiseLSTMConfig(DeepWideConfig):
    """The Transformer with depth-wise LSTMs (Xu et al. 2024): an LSTM over depth connects the attention layers.

    The defaults are the paper's base model. The rows of the paper's tables, as fields:

    | table | row | fields |
    |---|---|---|
    | 2 | depth-wise RNN | `cell="rnn"` |
    | 3 | 1-layer hidden state (Eq. 5) | `lstm_hidden="single"` |
    | 3 | 2-layer of 1536 (the paper prints 1586) | `encoder_ffn_dim=1536, decoder_ffn_dim=1536` |
    | 4 | concatenation, two LSTMs | `decoder_merge="concat"`, `decoder_merge="two_lstms"` |
    | 5 | share all | `share_gates="global", share_hidden="stack"` |
    | 5 | share gates | the defaults; the counts printed for 6 layers are those of `share_gates="global"` |
    | 5 | share nothing | `share_gates="none"` |

    Two parameter counts of the paper cannot be reproduced: 100.18 M for two LSTMs (here 87.58 M with global gates),
    and 288.41 M for the big model of 12 + 6 layers with Eq. 5.

    Four shared fields have a special meaning. `encoder_ffn_dim` and `decoder_ffn_dim` are the widths of W_h1 in
    Eq. 6; the GLU halves them. `activation_function` is the function of Eq. 5. `activation_dropout` follows the GLU.

    Args:
        decoder_merge: how a decoder layer joins self- and cross-attention for its LSTM: by their sum (`"add"`), by
            concatenation (`"concat"`), or with one LSTM for each attention (`"two_lstms"`).
        lstm_hidden: the network of the hidden state: a GLU network of two layers (`"glu"`, Eq. 6) or one layer
            (`"single"`, Eq. 5).
        decoder_lstm_hidden: the same for the decoder; None means `lstm_hidden`.
        share_gates: which layers share the weights of the gates and their LayerNorms: no layers (`"none"`), all layers
            of one stack (`"stack"`), or all layers of both stacks (`"global"`). If a layer has two LSTMs, the first
            LSTMs of the layers share their gates, and the second LSTMs share other gates.
        share_hidden: the same for the network of the hidden state.
        cell: `"lstm"`, or `"rnn"`. The output of an RNN is the hidden state itself (section 3.3).
        lstm_bias: the biases of Eq. 2-6. The paper's parameter counts contain no biases: a LayerNorm follows each
            product but the last.
        forget_bias_init: the initial bias of the forget gate's LayerNorm. The paper names no value, which means 0.
            With 1, the default, more of the embeddings reaches the last layers of a deep stack before training. In our
            studies, models that start with 1 learn faster and end at a lower loss.
        attn_input_norm: a LayerNorm on the query of each attention, as in the paper's parameter counts. False is the
            "pure attention" of the paper's text.
        cross_query: the query of cross-attention, before the LayerNorm: the output of self-attention (`"self"`), the
            sum of this output and the layer's input (`"residual"`), or the layer's input (`"previous"`). With two
            LSTMs the query is always the output of the first LSTM.
        final_layer_norm: a LayerNorm on the output of both stacks.

    Raises:
        ValueError: a field has a wrong type, is out of range, or contradicts another.
    """

    model_type = "depthwise_lstm"

    normalize_before: bool = True
    attention_bias: bool = False
    lm_head_bias: bool = True
    activation_function: str = "gelu"
    decoder_merge: Literal["add", "concat", "two_lstms"] = "add"
    lstm_hidden: Literal["glu", "single"] = "glu"
    decoder_lstm_hidden: Literal["glu", "single"] | None = None
    share_gates: Literal["none", "stack", "global"] = "stack"
    share_hidden: Literal["none", "stack", "global"] = "none"
    cell: Literal["lstm", "rnn"] = "lstm"
    lstm_bias: bool = False
    forget_bias_init: float | int = 1.0
    attn_input_norm: bool = True
    cross_query: Literal["self", "residual", "previous"] = "self"
    final_layer_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in `decoder_lstm_hidden`, and pass the rest to the parent."""
        if self.decoder_lstm_hidden is None:
            self.decoder_lstm_hidden = self.lstm_hidden
        super().__post_init__(**kwargs)

    @property
    def shares_between_stacks(self) -> bool:
        """Whether the decoder's LSTM shares weights with the encoder's LSTM."""
        return self.share_hidden == "global" or (self.share_gates == "global" and self.cell == "lstm")

    @property
    def least_parameters(self) -> int:
        """The parent's bound without feed-forward networks, which no layer has."""
        ffn = 2 * (self.encoder_layers * self.encoder_ffn_dim + self.decoder_layers * self.decoder_ffn_dim)
        return super().least_parameters - self.d_model * self.ffn_branches * ffn

    def validate_lstm(self) -> None:
        """Check that a GLU halves an even width, and that fields without effect have their defaults.

        Only a single-layer hidden state has an activation function, and only an LSTM has a forget gate.
        """
        check_bounds(self, -WEIGHT, WEIGHT, "forget_bias_init")
        if self.forget_bias_init:  # 0 means no bias, which every cell accepts
            check_used(self, {"forget_bias_init": ("cell", ("lstm",))})
        if self.lstm_hidden != "single":
            check_used(self, {"activation_function": ("decoder_lstm_hidden", ("single",))})
        for name, hidden in (("encoder_ffn_dim", "lstm_hidden"), ("decoder_ffn_dim", "decoder_lstm_hidden")):
            if getattr(self, hidden) == "glu" and getattr(self, name) % 2:
                raise ValueError(f"`{name}` must be even, because the GLU halves it, got {getattr(self, name)}")

    def validate_combinations(self) -> None:
        """Check that shared weights have one shape, and that no field needs a residual or a feed-forward sub-layer."""
        if self.shares_between_stacks and self.decoder_merge == "concat":
            field = "share_hidden" if self.share_hidden == "global" else "share_gates"
            raise ValueError(
                f"`{field}='global'` needs LSTMs of one width, and `decoder_merge='concat'` makes the decoder's "
                f"wider; set `{field}='stack'`"
            )
        if self.share_hidden == "global":
            for one, other in (("lstm_hidden", "decoder_lstm_hidden"), ("encoder_ffn_dim", "decoder_ffn_dim")):
                used = one == "lstm_hidden" or self.lstm_hidden == "glu"
                if used and getattr(self, one) != getattr(self, other):
                    raise ValueError(
                        f"`share_hidden='global'` needs `{one}` and `{other}` to be equal, got "
                        f"{quote(getattr(self, one))} and {quote(getattr(self, other))}"
                    )
        if self.decoder_merge == "two_lstms" and self.cross_query != "self":
            raise ValueError(
                f"`cross_query` must be 'self' with `decoder_merge='two_lstms'`: the first LSTM's output asks, got "
                f"{quote(self.cross_query)}"
            )
        if not self.normalize_before:
            raise ValueError(
                "`normalize_before` must be True: there is no residual connection for a post-norm. To remove the "
                "norms before the attentions, set `attn_input_norm=False`"
            )
        if self.ffn_drop_branch is not None:
            raise ValueError(
                f"`ffn_drop_branch` must be None: there is no feed-forward sub-layer, got {self.ffn_drop_branch}"
            )
        if self.ffn_branches != 1:
            raise ValueError(f"`ffn_branches` must be 1: there is no feed-forward sub-layer, got {self.ffn_branches}")
        if not self.join_ffn:
            raise ValueError("`join_ffn` must be True: there is no feed-forward sub-layer, got False")
