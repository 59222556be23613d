"""The Transformer with depth-wise LSTMs (Xu et al. 2024, "Rewiring the Transformer with Depth-Wise LSTMs", arXiv
2007.06257).

An LSTM that runs over the layers, separately at every position, replaces residual connections and feed-forward
sub-layers. Its input x is the attention output of a layer. Output_0 and Cell_0 are the embeddings (section 2.1):

    c = Output_{l-1} | x                                                                                   (Eq. 1)
    i, f, o = sigmoid(LN(W_i c)), sigmoid(LN(W_f c)), sigmoid(LN(W_o c))                                   (Eq. 2-4)
    h = GeLU(LN(W_h c))                                                                                    (Eq. 5)
    or  h = W_h2 GLU(LN(W_h1 c))                                                                           (Eq. 6)
    Cell_l = Cell_{l-1} * f + h * i,    Output_l = Cell_l * o                                              (Eq. 7, 8)

In an encoder layer x = SelfAttn(LN(Output)). A decoder layer has s = SelfAttn(LN(Output)) and, by default,
r = CrossAttn(LN(s)). It joins them to x = s + r or x = s | r, or has an LSTM for each.

Every weight has one owner and one name. A module that layers share belongs to their stack. A module that both stacks
share belongs to the encoder, and is passed to the decoder's forward pass. The cell goes from layer to layer, not from
token to token: decoding caches only keys and values.

Shapes: B batch, T time, S source length, D model width, I inputs to the cell (2D, or 3D), F width of W_h1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from .attention import MultiBranchAttention
from .branches import input_projection
from .configuration_depthwise_lstm import DepthwiseLSTMConfig
from .dropout import Dropout
from .modeling_base import DeepWideForConditionalGeneration, DeepWideModel
from .pretrained_model import DeepWidePreTrainedModel
from .stacks import Decoder, Encoder, Stack

EPS = 1e-6  # of LayerNorms, as in Neutron, the library that the authors used


class GateNorm(nn.LayerNorm):
    """Three LayerNorms, one for each third of the features: `[B, T, 3D]` to `[B, T, 3, D]`."""

    def __init__(self, dim: int) -> None:
        super().__init__(3 * dim, EPS)

    def initialise(self, config: DepthwiseLSTMConfig) -> None:
        """Start as LayerNorms do, except for the forget gate's bias: `forget_bias_init`."""
        init.ones_(self.weight)
        bias = torch.zeros_like(self.bias)
        bias.view(3, -1)[1] = config.forget_bias_init
        init.copy_(self.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise all three at once. The statistics are float32 for any dtype, as in `nn.LayerNorm`."""
        x = x.unflatten(-1, (3, -1))
        x = nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias.view(3, -1), x, self.weight.view(3, -1))


class LSTMGates(nn.Module):
    """Input, forget and output gate of one cell (Eq. 2-4), with one matrix for all three."""

    def __init__(self, config: DepthwiseLSTMConfig, inputs: int) -> None:
        super().__init__()
        self.fc = input_projection(3, inputs, config.d_model, bias=config.lstm_bias)
        self.layer_norm = GateNorm(config.d_model)

    def forward(self, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the three gates `[B, T, D]` from c `[B, T, I]`."""
        return self.layer_norm(self.fc(c)).sigmoid().unbind(-2)


class SingleHidden(nn.Module):
    """GeLU(LN(W_h c)): the hidden state, from one linear layer (Eq. 5)."""

    def __init__(self, config: DepthwiseLSTMConfig, inputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, config.d_model, bias=config.lstm_bias)
        self.layer_norm = nn.LayerNorm(config.d_model, EPS)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = Dropout(config.dropout)

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        """Compute h `[B, T, D]` from c `[B, T, I]`."""
        return self.dropout(self.activation(self.layer_norm(self.fc1(c))))


class GatedHidden(nn.Module):
    """W_h2 GLU(LN(W_h1 c)): the hidden state, from two linear layers (Eq. 6). GLU(a | b) = a * sigmoid(b)."""

    def __init__(self, config: DepthwiseLSTMConfig, inputs: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, inner, bias=config.lstm_bias)
        self.layer_norm = nn.LayerNorm(inner, EPS)
        self.activation_dropout = Dropout(config.activation_dropout)
        self.fc2 = nn.Linear(inner // 2, config.d_model, bias=config.lstm_bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, c: torch.Tensor) -> torch.Tensor:
        """Compute h `[B, T, D]` from c `[B, T, I]`."""
        inner = nn.functional.glu(self.layer_norm(self.fc1(c)))
        return self.dropout(self.fc2(self.activation_dropout(inner)))


@dataclass(frozen=True)
class Parts:
    """The modules of one cell.

    None means that another module owns it (shared), or that it does not exist (an RNN has no gates). The stack passes
    shared parts to its layers. This class is no tuple, because accelerate's hooks move modules that are in a tuple
    among the arguments.
    """

    gates: LSTMGates | None = None
    hidden: nn.Module | None = None


NO_PARTS = Parts()


class DepthwiseLSTM(nn.Module):
    """A cell, or those of its parts that belong to one owner.

    A layer owns the parts that are not shared. A stack owns the parts that its layers share.
    """

    def __init__(
        self, config: DepthwiseLSTMConfig, stack: str, owned: tuple[str, ...] = ("none",), merged: int = 1
    ) -> None:
        """Make the parts that belong to this cell's owner.

        Args:
            config: the config.
            stack: "encoder" or "decoder".
            owned: the values of `share_gates` and `share_hidden` for which the part belongs to this owner.
            merged: the width of x, as a multiple of D.
        """
        super().__init__()
        self.is_rnn = config.cell == "rnn"
        inputs = (1 + merged) * config.d_model
        self.gates = LSTMGates(config, inputs) if config.share_gates in owned and not self.is_rnn else None
        self.hidden = None
        if config.share_hidden in owned:
            kind = config.lstm_hidden if stack == "encoder" else config.decoder_lstm_hidden
            inner = config.encoder_ffn_dim if stack == "encoder" else config.decoder_ffn_dim
            self.hidden = SingleHidden(config, inputs) if kind == "single" else GatedHidden(config, inputs, inner)

    def parts(self, shared: Parts = NO_PARTS) -> Parts:
        """Return the cell's own parts, and `shared` parts in place of missing ones."""
        gates, hidden = self.gates, self.hidden
        return Parts(shared.gates if gates is None else gates, shared.hidden if hidden is None else hidden)

    def forward(
        self, output: torch.Tensor, cell: torch.Tensor, inputs: tuple[torch.Tensor, ...], shared: Parts = NO_PARTS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one step in depth (Eq. 1-8).

        Args:
            output, cell: Output_{l-1} and Cell_{l-1} `[B, T, D]`.
            inputs: x, as one tensor `[B, T, D]` or as two to be concatenated.
            shared: the parts that the layer does not own.

        Returns:
            Output_l and Cell_l `[B, T, D]`. An RNN's output is h, and its cell does not change.
        """
        parts = self.parts(shared)
        # Under autocast attention returns half precision, and the products need c in it: c is cast only once.
        c = torch.cat([output.to(inputs[0].dtype), *inputs], dim=-1)
        # Shared parts may be on another device than this layer.
        h = parts.hidden(c).to(c.device)
        if self.is_rnn:
            return h, cell
        input_gate, forget_gate, output_gate = (gate.to(cell.device) for gate in parts.gates(c))
        cell = torch.addcmul(cell * forget_gate, h, input_gate)
        return cell * output_gate, cell


def norm_before(config: DepthwiseLSTMConfig) -> nn.Module:
    """Make the norm before an attention: a LayerNorm, or the identity if `attn_input_norm` is False."""
    return nn.LayerNorm(config.d_model, EPS) if config.attn_input_norm else nn.Identity()


class DepthwiseLSTMEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, and one step of the LSTM (section 2.2)."""

    def __init__(self, config: DepthwiseLSTMConfig) -> None:
        super().__init__()
        self.self_attn = MultiBranchAttention(config, config.encoder_attention_heads)
        self.self_attn_layer_norm = norm_before(config)
        self.lstm = DepthwiseLSTM(config, "encoder")
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cell: torch.Tensor,
        attention_mask: Any = None,
        shared: tuple[Parts, ...] = (NO_PARTS,),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute this layer's output and cell `[B, S, D]` from the previous layer's output and cell."""
        attended, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), attention_mask, **kwargs)
        return self.lstm(hidden_states, cell, (self.dropout(attended),), shared[0])


class DepthwiseLSTMDecoderLayer(GradientCheckpointingLayer):
    """Causal self-attention, attention to the source, and one LSTM step for both or for each (section 2.3)."""

    def __init__(self, config: DepthwiseLSTMConfig, layer_idx: int) -> None:
        super().__init__()
        self.merge = config.decoder_merge
        self.cross_query = config.cross_query
        heads = config.decoder_attention_heads
        self.self_attn = MultiBranchAttention(config, heads, is_causal=True, layer_idx=layer_idx)
        self.self_attn_layer_norm = norm_before(config)
        self.encoder_attn = MultiBranchAttention(config, heads, is_cross=True, layer_idx=layer_idx)
        self.encoder_attn_layer_norm = norm_before(config)
        self.lstm = DepthwiseLSTM(config, "decoder", merged=2 if self.merge == "concat" else 1)
        if self.merge == "two_lstms":
            self.encoder_attn_lstm = DepthwiseLSTM(config, "decoder")
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cell: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: Any = None,
        shared: tuple[Parts, ...] = (NO_PARTS, NO_PARTS),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute this layer's output and cell `[B, T, D]` from the previous layer's output and cell.

        Without `encoder_hidden_states` `[B, S, D]`, cross-attention returns zero.
        """

        def cross_attention(query: torch.Tensor) -> torch.Tensor:
            if encoder_hidden_states is None:
                return torch.zeros_like(query)
            query = self.encoder_attn_layer_norm(query)
            attended, _ = self.encoder_attn(query, encoder_attention_mask, encoder_hidden_states, **kwargs)
            return self.dropout(attended)

        attended, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), attention_mask, **kwargs)
        attended = self.dropout(attended)
        if self.merge == "two_lstms":
            hidden_states, cell = self.lstm(hidden_states, cell, (attended,), shared[0])
            return self.encoder_attn_lstm(hidden_states, cell, (cross_attention(hidden_states),), shared[1])
        if self.cross_query == "previous":
            query = hidden_states
        else:
            query = attended if self.cross_query == "self" else hidden_states + attended
        crossed = cross_attention(query)
        inputs = (attended, crossed) if self.merge == "concat" else (attended + crossed,)
        return self.lstm(hidden_states, cell, inputs, shared[0])


class DepthwiseLSTMPreTrainedModel(DeepWidePreTrainedModel):
    """The base class of this family's models."""

    config_class = DepthwiseLSTMConfig
    _no_split_modules = ["DepthwiseLSTMEncoderLayer", "DepthwiseLSTMDecoderLayer"]


class DepthwiseLSTMStack(DepthwiseLSTMPreTrainedModel, Stack):
    """A stack of layers along which an LSTM runs, with the parts of the LSTM that the layers share."""

    lstm: DepthwiseLSTM

    def __init__(self, config: DepthwiseLSTMConfig) -> None:
        super().__init__(config)
        self.layer_norm = nn.LayerNorm(config.d_model, EPS) if config.final_layer_norm else nn.Identity()

    def shared_parts(self, encoder_lstm: Parts) -> tuple[Parts, ...]:
        """Return the shared parts for each cell of a layer."""
        return (self.lstm.parts(encoder_lstm),)

    def run_layers(
        self, hidden_states: torch.Tensor, *inputs: Any, encoder_lstm: Parts = NO_PARTS, **kwargs: Any
    ) -> torch.Tensor:
        """Compute Output_N from the embeddings `[batch, time, D]`, which are Output_0 and Cell_0.

        `encoder_lstm` is `encoder.lstm.parts()`, for a decoder that shares parts with the encoder.
        """
        shared = self.shared_parts(encoder_lstm)
        cell = hidden_states
        for layer in self.layers:
            hidden_states, cell = layer(hidden_states, cell, *inputs, shared=shared, **kwargs)
        return hidden_states


class DepthwiseLSTMEncoder(DepthwiseLSTMStack, Encoder):
    """Embeddings and a stack of encoder layers. It owns the parts that its layers or both stacks share."""

    layer_class = DepthwiseLSTMEncoderLayer
    _can_record_outputs = {"hidden_states": DepthwiseLSTMEncoderLayer, "attentions": MultiBranchAttention}

    def __init__(self, config: DepthwiseLSTMConfig) -> None:
        super().__init__(config)
        self.lstm = DepthwiseLSTM(config, "encoder", owned=("stack", "global"))
        self.post_init()


class DepthwiseLSTMDecoder(DepthwiseLSTMStack, Decoder):
    """Embeddings and a stack of decoder layers. It owns the parts that only its layers share."""

    layer_class = DepthwiseLSTMDecoderLayer
    _can_record_outputs = {
        "hidden_states": DepthwiseLSTMDecoderLayer,
        "attentions": OutputRecorder(MultiBranchAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiBranchAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: DepthwiseLSTMConfig) -> None:
        super().__init__(config)
        merged = 2 if config.decoder_merge == "concat" else 1
        self.lstm = DepthwiseLSTM(config, "decoder", owned=("stack",), merged=merged)
        if config.decoder_merge == "two_lstms":  # the encoder has no such LSTM that could be shared
            self.encoder_attn_lstm = DepthwiseLSTM(config, "decoder", owned=("stack", "global"))
        self.post_init()

    def shared_parts(self, encoder_lstm: Parts) -> tuple[Parts, ...]:
        """Return the shared parts for each cell of a layer, which has one or two cells.

        Raises:
            ValueError: the decoder shares weights with the encoder, and has not been given them.
        """
        if self.config.shares_between_stacks and encoder_lstm == NO_PARTS:
            raise ValueError(
                "the decoder shares weights with the encoder, and has not got them: call the whole model, or give "
                "`encoder_lstm=model.encoder.lstm.parts()`"
            )
        parts = super().shared_parts(encoder_lstm)
        return (*parts, self.encoder_attn_lstm.parts()) if self.config.decoder_merge == "two_lstms" else parts


class DepthwiseLSTMModel(DepthwiseLSTMPreTrainedModel, DeepWideModel):
    """Encoder and decoder without a head."""

    encoder_class = DepthwiseLSTMEncoder
    decoder_class = DepthwiseLSTMDecoder

    def decoder_inputs(self) -> dict[str, Any]:
        """Return the parts of the encoder's LSTM, if the decoder shares any."""
        return {"encoder_lstm": self.encoder.lstm.parts()} if self.config.shares_between_stacks else {}


class DepthwiseLSTMForConditionalGeneration(
    DepthwiseLSTMPreTrainedModel, DeepWideForConditionalGeneration, GenerationMixin
):
    """The translation model. `from_base` copies a base's embeddings and attentions; the base's function is lost."""

    model_class = DepthwiseLSTMModel
