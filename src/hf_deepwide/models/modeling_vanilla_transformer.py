"""The vanilla Transformer (Vaswani et al. 2017, "Attention Is All You Need"), pre- or post-norm, and its deep kin.

At its defaults it is what `modeling_base` holds: the point where width and depth are at rest. Known ways to train
deeper stacks are options, each on its own. How a sub-layer is joined to its input (`residual`) is in `residuals`. How
layers are joined is here. x_l is the input of layer l, y_l its output, y_0 the embeddings; L is the number of layers:

    LayerDrop   y_l = x_l where U_l <= p, U_l ~ U[0, 1], in training    (Fan, Grave and Joulin 2020, arXiv 1909.11556)
    DLCL        x_{l+1} = sum_{k<=l} W_lk LN(y_k)                       (Wang et al. 2019, arXiv 1906.01787, Eq. 8, 9)

Shapes: B batch, T time, D model width.
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init

from .branches import no_gradient
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .layers import DecoderLayer, EncoderLayer
from .modeling_base import (
    Decoder,
    DeepWideForConditionalGeneration,
    DeepWideModel,
    DeepWidePreTrainedModel,
    Encoder,
    Stack,
)
from .residuals import (
    BottomToTopDecoderLayer,
    BottomToTopEncoderLayer,
    DeepNormDecoderLayer,
    DeepNormEncoderLayer,
    ReZero,
    ReZeroDecoderLayer,
    ReZeroEncoderLayer,
)

# The layers of encoder and decoder, by the config's `residual`.
LAYERS: dict[str, tuple[type[EncoderLayer], type[DecoderLayer]]] = {
    "add": (EncoderLayer, DecoderLayer),
    "rezero": (ReZeroEncoderLayer, ReZeroDecoderLayer),
    "deepnorm": (DeepNormEncoderLayer, DeepNormDecoderLayer),
    "b2t": (BottomToTopEncoderLayer, BottomToTopDecoderLayer),
}


class LayerCombination(nn.Module):
    """The dynamic linear combination of layers (DLCL), what a layer reads of all that came before it.

    Pre-norm, x_{l+1} = sum_{k<=l} W_lk LN_k(y_k); post-norm, x_{l+1} = LN_l(sum_{k<=l} W_lk y_k). Each sum starts as
    a mean. As in the released code, the embeddings y_0 are not normalised. Post-norm, neither is x_1, which combines
    the embeddings alone. This leaves one LayerNorm per layer.
    """

    def __init__(self, config: VanillaTransformerConfig, layers: int) -> None:
        super().__init__()
        self.normalize_before = config.normalize_before
        self.layer_norms = nn.ModuleList([nn.LayerNorm(config.d_model) for _ in range(layers)])
        self.combination_weights = nn.Parameter(self.initial_weights())

    def initial_weights(self) -> torch.Tensor:
        """W `[L + 1, L + 1]`, lower triangular: row l holds 1 / (l + 1), and what lies above is never used."""
        ones = torch.ones(len(self.layer_norms) + 1, len(self.layer_norms) + 1).tril()
        return ones / ones.sum(1, keepdim=True)

    def forward(self, history: list[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        """Add y_l `[B, T, D]` to the l terms in `history`, and combine them into x_{l+1}."""
        index = len(history)
        norm = self.layer_norms[index - 1] if index else nn.Identity()
        history.append(norm(output) if self.normalize_before else output)
        weights = self.combination_weights[index, : index + 1].unbind()
        combined = weights[0] * history[0]
        for weight, term in zip(weights[1:], history[1:], strict=True):
            combined = torch.addcmul(combined, weight, term)
        return combined if self.normalize_before else norm(combined)


class VanillaTransformerPreTrainedModel(DeepWidePreTrainedModel):
    """What the models of this family share beside the rest."""

    config_class = VanillaTransformerConfig
    _no_split_modules = [cls.__name__ for layers in LAYERS.values() for cls in layers]
    no_weight_decay = ("residual_weight", "combination_weights")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As everywhere; layers of ReZero start as the identity, combinations of layers as their mean."""
        super()._init_weights(module)
        if isinstance(module, ReZero):
            init.zeros_(module.residual_weight)
        elif isinstance(module, LayerCombination):
            init.copy_(module.combination_weights, module.initial_weights())


class VanillaTransformerStack(VanillaTransformerPreTrainedModel, Stack):
    """Layers that may be skipped in training, or read more than the layer before them."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.combination = LayerCombination(config, len(self.layers)) if config.layer_aggregation == "dlcl" else None
        self.post_init()

    def run_layers(self, hidden_states: torch.Tensor, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers, `[B, T, D]` to `[B, T, D]`; see `Stack`."""
        history: list[torch.Tensor] = []
        for layer, skipped in zip(self.layers, self.draw_skipped(kwargs.get("past_key_values")), strict=True):
            if self.combination is not None:
                hidden_states = self.combination(history, hidden_states)
            if skipped:
                tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
                hidden_states = hidden_states + no_gradient(layer, *tensors)
            else:
                hidden_states = layer(hidden_states, *inputs, **kwargs)
        return hidden_states if self.combination is None else self.combination(history, hidden_states)

    def draw_skipped(self, past_key_values: Any) -> list[bool]:
        """Which layers this forward pass skips (LayerDrop): none in evaluation, nor with a cache, which needs all.

        There is one draw per layer and forward pass, for all sentences and positions. It is from the CPU's generator:
        so on a GPU the decision needs no synchronisation.
        """
        rate = self.config.layer_drop
        if not self.training or rate == 0 or past_key_values is not None:
            return [False] * len(self.layers)
        return (torch.rand(len(self.layers), device="cpu") <= rate).tolist()


class VanillaTransformerEncoder(VanillaTransformerStack, Encoder):
    """Embeddings and a stack of encoder layers."""

    @property
    def layer_class(self) -> type[EncoderLayer]:
        """How the layers are joined."""
        return LAYERS[self.config.residual][0]


class VanillaTransformerDecoder(VanillaTransformerStack, Decoder):
    """Embeddings and a stack of decoder layers."""

    @property
    def layer_class(self) -> type[DecoderLayer]:
        """How the layers are joined."""
        return LAYERS[self.config.residual][1]


class VanillaTransformerModel(VanillaTransformerPreTrainedModel, DeepWideModel):
    """Encoder and decoder without a head."""

    encoder_class = VanillaTransformerEncoder
    decoder_class = VanillaTransformerDecoder


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerPreTrainedModel, DeepWideForConditionalGeneration, GenerationMixin
):
    """The baseline translation model."""

    model_class = VanillaTransformerModel
