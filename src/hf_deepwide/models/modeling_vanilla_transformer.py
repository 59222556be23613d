"""The vanilla Transformer (Vaswani et al. 2017, "Attention Is All You Need"), pre- or post-norm, and its variants.

With its default config it is the encoder-decoder of `modeling_base`. Known methods to train deeper stacks are options.
Each method has an option of its own, and its equations are in the file in the last column:

    `residual`            how a sub-layer is joined to its input: ReZero, DeepNorm, B2T, SDU     `residuals`
    `layer_aggregation`   what a layer reads: DLCL, DenseFormer, transparent attention           `layer_combination`
                          what a stack gives: iterative, hierarchical, EM routing                `layer_aggregation`
    `encoder_solver`      an encoder layer as a step of a Runge-Kutta method                     `runge_kutta`
    `decoder_attention`   a decoder's two attentions as one: merged attention                    `merged_attention`
    `layer_form`          other sub-layers than attention and feed-forward:                      `FORMS`
                          heads with networks of their own: the Weighted Transformer             `branched_attention`
                          nested linear attentions: Luna                                         `luna`
                          convolutions in the place of self-attention: DynamicConv               `dynamic_convolution`
                          cells with convolutions: the Evolved Transformer                       `evolved_layers`
    `language_aware`      norms and a matrix of each language: LALN, LALT                        `language_layers`
    `layer_drop`          LayerDrop (Fan, Grave and Joulin 2020, arXiv 1909.11556)               here
    `initialization`      Lipschitz-constrained initial weights (Xu et al. 2020, 1911.03179)     here
                          depth-scaled initial weights (Zhang et al. 2019, 1908.11365)           here

LayerDrop, where x_l is the input of layer l and y_l its output: in training, y_l = x_l if U_l <= p, U_l ~ U[0, 1].

Shapes: B batch, T time, D model width.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from .attention_residuals import AttentionResidualDecoderLayer, AttentionResidualEncoderLayer
from .branched_attention import SimplexWeights, WeightedDecoderLayer, WeightedEncoderLayer, largest_weights
from .branches import fans, no_gradient
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .dynamic_convolution import DynamicConvolution, convolve
from .evolved_layers import EvolvedDecoderLayer, EvolvedEncoderLayer
from .hyper_connections import (
    HyperDecoderLayer,
    HyperEncoderLayer,
    ManifoldHyperDecoderLayer,
    ManifoldHyperEncoderLayer,
)
from .joined_layers import Join, add_joins, as_state
from .language_layers import (
    LanguageAwareDecoderLayer,
    LanguageAwareEncoderLayer,
    LanguageAwareMergedLayer,
    LanguageTransform,
)
from .layer_aggregation import AGGREGATIONS
from .layer_combination import COMBINATIONS, LayerNormEach, LayerSum, TransparentAttention
from .layer_selection import check_posteriors
from .layers import DecoderLayer, EncoderLayer
from .luna import (
    CausalLunaAttention,
    LunaAttention,
    LunaDecoderLayer,
    LunaEncoderLayer,
    LunaLayerNorm,
    PackedEmbeddings,
    split_memory,
)
from .merged_attention import MeanOfValues, MergedAttentionDecoderLayer
from .modeling_base import DeepWideModel, WithPosteriors
from .pretrained_model import DeepWidePreTrainedModel
from .residuals import (
    BottomToTopDecoderLayer,
    BottomToTopEncoderLayer,
    DeepNormDecoderLayer,
    DeepNormEncoderLayer,
    ReZeroDecoderLayer,
    ReZeroEncoderLayer,
    SelfDependentDecoderLayer,
    SelfDependentEncoderLayer,
    scale_initial_weights,
)
from .runge_kutta import RungeKuttaEncoderLayer, SolverGate
from .stacks import Decoder, Encoder, Stack

# The layers of encoder and decoder, by the config's `residual`.
LAYERS: dict[str, tuple[type[EncoderLayer], type[DecoderLayer]]] = {
    "add": (EncoderLayer, DecoderLayer),
    "rezero": (ReZeroEncoderLayer, ReZeroDecoderLayer),
    "deepnorm": (DeepNormEncoderLayer, DeepNormDecoderLayer),
    "b2t": (BottomToTopEncoderLayer, BottomToTopDecoderLayer),
    "attention": (AttentionResidualEncoderLayer, AttentionResidualDecoderLayer),
    "hyper": (HyperEncoderLayer, HyperDecoderLayer),
    "mhc": (ManifoldHyperEncoderLayer, ManifoldHyperDecoderLayer),
    "sdu": (SelfDependentEncoderLayer, SelfDependentDecoderLayer),
}
# The layers by the config's `layer_form`, if it is not "transformer".
FORMS: dict[str, tuple[type[EncoderLayer], type[DecoderLayer]]] = {
    "weighted": (WeightedEncoderLayer, WeightedDecoderLayer),
    "luna": (LunaEncoderLayer, LunaDecoderLayer),
    "dynamic_convolution": (EncoderLayer, DecoderLayer),  # `convolve` replaces their self-attention
    "evolved": (EvolvedEncoderLayer, EvolvedDecoderLayer),
}
WITHOUT_TWIN = ("luna", "evolved")  # forms that `decoding` does not support
OTHER_LAYERS = (
    *(RungeKuttaEncoderLayer, MergedAttentionDecoderLayer),
    *(LanguageAwareEncoderLayer, LanguageAwareDecoderLayer, LanguageAwareMergedLayer),
)
# The names of a layer's projections, for every `residual` and `layer_form` that can be depth-scaled.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "in_proj", "kernel_proj", "out_proj", "projection", "fc1", "fc2")


class VanillaTransformerPreTrainedModel(DeepWidePreTrainedModel):
    """The base class of the models of this family."""

    config_class = VanillaTransformerConfig
    _no_split_modules = [
        cls.__name__ for layers in (*LAYERS.values(), *FORMS.values(), OTHER_LAYERS) for cls in layers
    ]
    no_weight_decay = (
        "residual_weight",
        "combination_weights",
        "mixture_logits",
        "capsule_bias",
        "capsule_cost",
        "language_scale",
        "language_bias",
        "solver_weight",
        "solver_bias",
        "depth_query",
        "static_alpha",
        "static_beta",
        "alpha_scale",
        "beta_scale",
        "coefficient_bias",
        "coefficient_scale",
        "simplex_weight",
    )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as in every family, or so that the model starts Lipschitz-constrained (Xu et al. 2020)."""
        super()._init_weights(module)
        if self.config.initialization == "lipschitz":
            self._constrain(module)

    def _constrain(self, module: nn.Module) -> None:
        """Draw initial weights so that a sub-layer hardly shrinks the input that its residual connection adds.

        Projections are uniform within sqrt(1 / inputs), where `inputs` counts the inputs of one branch. Embeddings are
        uniform within sqrt(2 / (D + V)). An output projection that is not tied to the embeddings is a projection.
        """
        if isinstance(module, nn.Embedding):
            bound = math.sqrt(2 / sum(module.weight.shape))
            init.uniform_(module.weight, -bound, bound)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, PackedEmbeddings):
            bound = math.sqrt(2 / sum(module.packed_embeddings.shape))
            init.uniform_(module.packed_embeddings, -bound, bound)
        elif isinstance(module, nn.Linear):
            inputs, _ = fans(module)
            bound = math.sqrt(1 / inputs) * getattr(module, "gain", 1)
            init.uniform_(module.weight, -bound, bound)


class VanillaTransformerStack(VanillaTransformerPreTrainedModel, Stack):
    """A stack whose layers may be skipped in training, or may read more than the previous layer's output."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.combination = self.make_combination()
        self.is_transparent = config.layer_aggregation == "transparent"
        add_joins(self.layers, config)
        if config.layer_form == "dynamic_convolution":
            convolve(self.layers, config, isinstance(self, Decoder))
        self.post_init()

    def post_init(self) -> None:
        """Mark the layers' gains if weights are depth-scaled, then draw the initial weights as the parent does."""
        if self.config.initialization == "depth_scaled":
            for number, layer in enumerate(self.layers, start=1):
                scale_initial_weights(layer, PROJECTIONS, number**-0.5)
        super().post_init()

    def begin_step(self, step: int) -> None:
        """Move the simplex weights of branched attention back to the simplex."""
        if self.config.layer_form == "weighted":
            for module in self.modules():
                if isinstance(module, SimplexWeights):
                    module.project()

    def make_combination(self) -> nn.Module | None:
        """Return the module that combines the outputs of this stack's layers, or None."""
        how = self.config.layer_aggregation
        if how in AGGREGATIONS:
            return AGGREGATIONS[how](self.config, len(self.layers), self.ffn_dim)
        return COMBINATIONS[how](self.config, len(self.layers)) if how in COMBINATIONS else None

    @property
    def ffn_dim(self) -> int:
        """The inner width of the stack's feed-forward networks."""
        raise NotImplementedError

    def inputs_of(self, layer: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the part of the stack's `inputs` that a layer reads. Layers are counted from 0."""
        return inputs

    def run_layers(
        self, hidden_states: torch.Tensor, *inputs: Any, posteriors: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Run the layers, `[B, T, D]` to `[B, T, D]`; see `Stack`.

        `posteriors` `[B]` are the indices of the sentences' languages; the model's argument has the same name.
        """
        if self.config.language_aware:
            check_posteriors(posteriors, hidden_states.shape[0], self.config)
            kwargs["languages"] = posteriors
        elif posteriors is not None:
            raise ValueError(
                "`posteriors` are the languages of a model that has parts for each, and `language_aware` is False; "
                "leave them out"
            )
        history: list[torch.Tensor] = []
        state = self.first_state(hidden_states, inputs)  # tensors that layers pass on beside their output
        skips = self.draw_skipped(kwargs.get("past_key_values"))
        for index, (layer, skipped) in enumerate(zip(self.layers, skips, strict=True)):
            own = self.inputs_of(index, inputs)
            hidden_states = self.combine(history, hidden_states)
            if skipped:
                tensors = [x for x in own if isinstance(x, torch.Tensor)]
                nothing = no_gradient(layer, *tensors)
                hidden_states, *state = (x + nothing for x in (hidden_states, *state))
            else:
                hidden_states, *state = as_state(layer(hidden_states, *own, *state, **kwargs))
        return self.with_state(self.combine(history, hidden_states), state)

    def combine(self, history: list[torch.Tensor], hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input, or the stack's output, `[B, T, D]`.

        The term that later sums read is added to `history`.
        """
        if self.combination is None:
            return hidden_states
        hidden_states, term = self.combination(history, hidden_states)
        history.append(term)
        return hidden_states

    def first_state(self, hidden_states: torch.Tensor, inputs: tuple[Any, ...]) -> Sequence[torch.Tensor]:
        """Return what the first layer reads beside the embeddings and the `inputs`: Luna's P, or nothing."""
        return ()

    def with_state(self, hidden_states: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the stack's output, made of the last layer's output and state."""
        return hidden_states


class VanillaTransformerEncoder(VanillaTransformerStack, Encoder):
    """Embeddings and a stack of encoder layers."""

    _can_record_outputs = Encoder._can_record_outputs | {
        "attentions": [
            Encoder._can_record_outputs["attentions"],
            *(OutputRecorder(part, index=1) for part in (LunaAttention, DynamicConvolution)),
        ]
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.solver = SolverGate(config.d_model) if config.encoder_solver == "rk2" else None
        languages = config.num_posteriors
        self.language_transform = LanguageTransform(config.d_model, languages) if config.language_aware else None
        if config.layer_aggregation == "transparent" and config.normalize_before:
            self.layer_norm = LayerNormEach(config.d_model)
        is_luna = config.layer_form == "luna"
        self.packed = PackedEmbeddings(config) if is_luna else None
        if is_luna and config.normalize_before:
            self.layer_norm = LunaLayerNorm(config)
        self.post_init()

    def make_combination(self) -> nn.Module | None:
        """Return the module that combines the outputs of the encoder's layers, or None."""
        if self.config.layer_aggregation == "transparent":
            return TransparentAttention(self.config, len(self.layers))
        return super().make_combination()

    @property
    def layer_class(self) -> type[EncoderLayer]:
        """The class of the layers that the config selects."""
        if self.config.layer_form in FORMS:
            return FORMS[self.config.layer_form][0]
        if self.config.language_aware:
            return LanguageAwareEncoderLayer
        return RungeKuttaEncoderLayer if self.config.encoder_solver == "rk2" else LAYERS[self.config.residual][0]

    @property
    def ffn_dim(self) -> int:
        """The inner width of the encoder's feed-forward networks."""
        return self.config.encoder_ffn_dim

    def run_layers(self, hidden_states: torch.Tensor, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers, `[B, S, D]` to `[B, S, D]`; see `Stack`."""
        if self.language_transform is not None:
            hidden_states = super().run_layers(hidden_states, *inputs, **kwargs)
            return self.language_transform(hidden_states, kwargs.get("posteriors"))
        if self.solver is None:
            return super().run_layers(hidden_states, *inputs, **kwargs)
        # A function, because accelerate would move a module among the arguments to the device of each layer.
        hidden_states = super().run_layers(hidden_states, *inputs, solver=lambda *f: self.solver(*f), **kwargs)
        may_skip_all = self.training and self.config.layer_drop > 0
        return hidden_states + no_gradient(self.solver) if may_skip_all else hidden_states

    def first_state(self, hidden_states: torch.Tensor, inputs: tuple[Any, ...]) -> Sequence[torch.Tensor]:
        """Return Luna's P for each sentence."""
        return () if self.packed is None else (self.packed(hidden_states),)

    def with_state(self, hidden_states: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the last layer's output, followed by Luna's P."""
        return hidden_states if self.packed is None else torch.cat([hidden_states, *state], dim=1)

    @can_return_tuple
    @functools.wraps(Encoder.forward)
    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutput:
        """Run the parent's forward pass, and adapt the recorded attention weights and hidden states.

        For a layer that is evaluated twice, the attention weights are those of the second evaluation. With transparent
        attention, the last hidden state `[B, S, D]` is the mean of the states that the decoder's layers read. Luna's
        P, which follows the states in the output, is left out of the hidden states.
        """
        outputs = super().forward(*args, return_dict=True, **kwargs)
        if self.solver is not None and outputs.attentions is not None:
            outputs.attentions = outputs.attentions[1::2]
        if isinstance(self.combination, TransparentAttention) and outputs.hidden_states is not None:
            mean = outputs.last_hidden_state.unflatten(-1, (-1, self.config.d_model)).mean(-2)
            outputs.hidden_states = (*outputs.hidden_states[:-1], mean)
        if self.packed is not None and outputs.hidden_states is not None:
            states, _ = split_memory(outputs.last_hidden_state, self.config)
            outputs.hidden_states = (*outputs.hidden_states[:-1], states)
        return outputs


class VanillaTransformerDecoder(VanillaTransformerStack, Decoder):
    """Embeddings and a stack of decoder layers."""

    _can_record_outputs = Decoder._can_record_outputs | {
        "attentions": [
            Decoder._can_record_outputs["attentions"],
            *(OutputRecorder(part, index=1) for part in (MeanOfValues, CausalLunaAttention, DynamicConvolution)),
        ],
        "cross_attentions": [
            Decoder._can_record_outputs["cross_attentions"],
            OutputRecorder(LunaAttention, index=1),
        ],
    }

    @property
    def has_twin(self) -> bool:
        """Return whether `decoding` has a twin of this decoder that reads single tokens."""
        return self.config.layer_form not in WITHOUT_TWIN

    @property
    def layer_class(self) -> type[DecoderLayer]:
        """The class of the layers that the config selects."""
        if self.config.layer_form in FORMS:
            return FORMS[self.config.layer_form][1]
        merged = self.config.decoder_attention == "merged"
        if self.config.language_aware:
            return LanguageAwareMergedLayer if merged else LanguageAwareDecoderLayer
        return MergedAttentionDecoderLayer if merged else LAYERS[self.config.residual][1]

    @property
    def ffn_dim(self) -> int:
        """The inner width of the decoder's feed-forward networks."""
        return self.config.decoder_ffn_dim

    def inputs_of(self, layer: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the masks and encoder states that a layer reads; in transparent attention, only its own states."""
        if self.config.layer_form == "luna":
            causal_mask, memory, *others = inputs
            return causal_mask, self.source_states(memory), *others
        if not self.is_transparent or inputs[1] is None:
            return inputs
        causal_mask, memory, *others = inputs
        width = self.config.d_model
        return causal_mask, memory.narrow(-1, layer * width, width), *others

    def source_states(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the states of the source tokens, without Luna's P."""
        return split_memory(memory, self.config)[0] if self.config.layer_form == "luna" else memory

    def first_state(self, hidden_states: torch.Tensor, inputs: tuple[Any, ...]) -> Sequence[torch.Tensor]:
        """Return Luna's P from the encoder's output."""
        return (split_memory(inputs[1], self.config)[1],) if self.config.layer_form == "luna" else ()

    def with_state(self, hidden_states: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the last layer's output.

        No module reads the last P of Luna. In training the parameters that compute it get gradients of zero, not None.
        """
        is_luna = self.config.layer_form == "luna" and self.training
        return hidden_states + state[0][:0].sum() if is_luna else hidden_states


class VanillaTransformerModel(VanillaTransformerPreTrainedModel, DeepWideModel):
    """Encoder and decoder without a head.

    With transparent attention the encoder returns `[B, S, M * D]`: the states for each of M decoder layers, side by
    side. With Luna it returns `[B, S + l, D]`: the states of the source, followed by P.
    """

    encoder_class = VanillaTransformerEncoder
    decoder_class = VanillaTransformerDecoder


class VanillaTransformerForConditionalGeneration(VanillaTransformerPreTrainedModel, WithPosteriors, GenerationMixin):
    """The baseline translation model."""

    model_class = VanillaTransformerModel

    @torch.no_grad()
    def training_logs(self) -> dict[str, float]:
        """Return the current values of the learned connections between layers. Layers are counted from 1.

        - `newest_weight/<stack>.<layer>`: the weight of a layer's output in the learned sum after this layer.
        - `earlier_weights/<stack>.<layer>`: in the same sum, the total of the absolute weights of all earlier outputs.
        - `top_weight/decoder.<layer>`: in transparent attention, the weight of the encoder's last layer in its mean.
        - `query_length/<stack>`, `stream_gain/<stack>` or `coefficient_scale/<stack>`: see `measure` of the joins.
        - `solver_gate/<layer>`: g of an encoder layer that is evaluated twice: its mean in this process's last batch.
        - `largest_kappa/<stack>`, `largest_alpha/<stack>`: the largest weights of a branched attention, averaged over
          the stack.
        """
        logs = {}
        for name in ("encoder", "decoder"):
            combination = getattr(self.model, name).combination
            if joins := [module for module in getattr(self.model, name).modules() if isinstance(module, Join)]:
                logs |= {f"{number}/{name}": value for number, value in type(joins[0]).measure(joins).items()}
            largest = largest_weights(getattr(self.model, name).modules())
            logs |= {f"{weight}/{name}": value for weight, value in largest.items()}
            if isinstance(combination, TransparentAttention):
                top = combination.mixture_logits.softmax(0)[-1].tolist()
                logs |= {f"top_weight/decoder.{layer}": weight for layer, weight in enumerate(top, start=1)}
            for layer, row in enumerate(combination.rows()[1:] if isinstance(combination, LayerSum) else (), start=1):
                logs[f"newest_weight/{name}.{layer}"] = row[layer].item()
                logs[f"earlier_weights/{name}.{layer}"] = row[:layer].abs().sum().item()
        for number, layer in enumerate(self.model.encoder.layers, start=1):
            if isinstance(layer, RungeKuttaEncoderLayer) and layer.mean_gate is not None:
                logs[f"solver_gate/{number}"] = layer.mean_gate.item()
        return logs
