"""Configuration of the Transformer with depth-wise LSTMs."""

from typing import Any, Literal

from .configuration_base import WEIGHT, DeepWideConfig, check_bounds, validated
from .quoting import quote


@validated
class DepthwiseLSTMConfig(DeepWideConfig):
    """The Transformer with depth-wise LSTMs (Xu et al. 2024): attention layers that an LSTM over depth connects.

    The defaults are the paper's base model. What its tables compare, as fields:

    | table | row | fields |
    |---|---|---|
    | 2 | depth-wise RNN | `cell="rnn"` |
    | 3 | 1-layer hidden state (Eq. 5) | `lstm_hidden="single"` |
    | 3 | 2-layer of 1536 (the paper prints 1586) | `encoder_ffn_dim=1536, decoder_ffn_dim=1536` |
    | 4 | concatenation, two LSTMs | `decoder_merge="concat"`, `decoder_merge="two_lstms"` |
    | 5 | share all | `share_gates="global", share_hidden="stack"` |
    | 5 | share gates | the defaults; the counts printed for 6 layers are those of `share_gates="global"` |
    | 5 | share nothing | `share_gates="none"` |

    Printed counts that no reading of the paper explains: 100.18 M for two LSTMs (here 87.58 M with global gates), and
    288.41 M for the big model of 12 + 6 layers with Eq. 5.

    Of the shared fields, `encoder_ffn_dim` and `decoder_ffn_dim` are the widths of W_h1 in Eq. 6, of which the GLU
    leaves half; `activation_function` is that of Eq. 5; `activation_dropout` follows the GLU.

    Args:
        decoder_merge: how a decoder layer joins self- and cross-attention for its LSTM: by their sum (`"add"`), by
            concatenation (`"concat"`), or not: each has an LSTM of its own (`"two_lstms"`).
        lstm_hidden: the hidden state is a GLU network of two layers (`"glu"`, Eq. 6) or one layer (`"single"`, Eq. 5).
        decoder_lstm_hidden: the same for the decoder; None means `lstm_hidden`.
        share_gates: layers share the weights of the gates, with their LayerNorms: `"none"`, all of one `"stack"`, or
            all of both (`"global"`). Of two LSTMs in a layer, each shares with its like.
        share_hidden: the same for the network of the hidden state.
        cell: `"lstm"`, or `"rnn"`, whose output is the hidden state itself (section 3.3).
        lstm_bias: the biases of Eq. 2-6. The paper's counts have none: each product but the last meets a LayerNorm.
        forget_bias_init: what the bias of the forget gate's LayerNorm is at first. The paper says nothing of it; above
            0, more of the embeddings reaches the last layers of a deep stack before it is trained. Wherever 1 was
            compared with 0 here, it learnt better.
        attn_input_norm: a LayerNorm on what asks in each attention, as the paper's counts say; without it, the "pure
            attention" of its text.
        cross_query: what asks in cross-attention, before the LayerNorm: the self-attention's output (`"self"`), that
            and the layer's input added (`"residual"`), or the layer's input (`"previous"`). Two LSTMs leave no
            choice: it is what the first of them gives.
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
    forget_bias_init: float | int = 0.0
    attn_input_norm: bool = True
    cross_query: Literal["self", "residual", "previous"] = "self"
    final_layer_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the decoder's hidden state."""
        if self.decoder_lstm_hidden is None:
            self.decoder_lstm_hidden = self.lstm_hidden
        super().__post_init__(**kwargs)

    @property
    def shares_between_stacks(self) -> bool:
        """Whether the decoder's LSTM has weights of the encoder's."""
        return self.share_hidden == "global" or (self.share_gates == "global" and self.cell == "lstm")

    @property
    def least_parameters(self) -> int:
        """As the parent, without feed-forward networks, which no layer has."""
        ffn = 2 * (self.encoder_layers * self.encoder_ffn_dim + self.decoder_layers * self.decoder_ffn_dim)
        return super().least_parameters - self.d_model * self.ffn_branches * ffn

    def validate_lstm(self) -> None:
        """A GLU halves an even width."""
        check_bounds(self, -WEIGHT, WEIGHT, "forget_bias_init")
        for name, hidden in (("encoder_ffn_dim", "lstm_hidden"), ("decoder_ffn_dim", "decoder_lstm_hidden")):
            if getattr(self, hidden) == "glu" and getattr(self, name) % 2:
                raise ValueError(f"`{name}` must be even, for its GLU halves it, got {getattr(self, name)}")

    def validate_combinations(self) -> None:
        """What is shared has one shape; there is no residual connection and no feed-forward sub-layer."""
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
                "`normalize_before` must be True: there is no residual connection to normalise behind; "
                "`attn_input_norm=False` takes the norms before the attentions away"
            )
        if self.ffn_drop_branch is not None:
            raise ValueError(
                f"`ffn_drop_branch` must be None: there is no feed-forward sub-layer, got {self.ffn_drop_branch}"
            )
        if self.ffn_branches != 1:
            raise ValueError(f"`ffn_branches` must be 1: there is no feed-forward sub-layer, got {self.ffn_branches}")
