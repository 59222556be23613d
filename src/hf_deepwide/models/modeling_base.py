"""The encoder-decoder that is the base of every family: stacks, model, language-model head.

A family replaces the parts that it changes (a layer class, a stack), and inherits the rest. Shapes: B batch, S source
length, T target length, D model width, V vocabulary.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import MultiBranchAttention
from .branches import BranchInput, BranchSum, is_own, no_gradient
from .configuration_base import DeepWideConfig
from .decoding import DecodingCache, can_decode
from .embeddings import Embeddings, SinusoidalPositions, embed
from .layers import DecoderLayer, EncoderLayer
from .loss import cross_entropy, linear_cross_entropy
from .relative_positions import RelativeKeys
from .search import BeamSearch, can_search, search_rows

_has_own_loop: ContextVar[bool] = ContextVar("whether the caller of `generate` brings a loop", default=False)


class DeepWidePreTrainedModel(PreTrainedModel):
    """The base class of all models: loading, saving, initialisation."""

    config_class = DeepWideConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    no_weight_decay: tuple[str, ...] = ()  # last parts of parameters' names, of scales that decay would distort
    # Set by a trainer, not saved:
    training_step: int = 0  # optimizer steps made so far, for schedules in the loss
    label_smoothing: float = 0.0  # where the model's call names none

    def training_logs(self) -> dict[str, float]:
        """Return numbers by name that a family logs beside the loss."""
        return {}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The papers' initialisation, or N(0, init_std) where the config gives one (specs: fairseq, MAT's fork).

        Embeddings N(0, 1/D), padding row 0; projections Xavier-uniform, each branch by its own fan-in and fan-out,
        q, k and v as one fused [3D, D] matrix; biases 0. A way of joining sub-layers may make some projections start
        smaller (`gain`).
        """
        std = self.config.init_std
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5 if std is None else std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            if module.bias is not None:
                init.zeros_(module.bias)
            if std is None and module is getattr(self, "lm_head", None):
                std = self.config.d_model**-0.5
            gain = module.gain if isinstance(module, BranchInput | BranchSum) else 1.0
            if std is not None:
                init.normal_(module.weight, std=gain * std)
                return
            fan_in, fan_out = module.in_features, module.out_features
            if isinstance(module, BranchSum):
                fan_in //= module.branches
            elif isinstance(module, BranchInput):
                fan_out = fan_out // module.branches * module.fused
            bound = gain * math.sqrt(6 / (fan_in + fan_out))
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, RelativeKeys):
            if std is None:
                bound = math.sqrt(6 / (module.vectors + module.weight.shape[1]))
                init.uniform_(module.weight, -bound, bound)
            else:
                init.normal_(module.weight, std=std)
        elif isinstance(module, SinusoidalPositions):
            init.copy_(module.table, module.build())
        elif isinstance(module, nn.LayerNorm):
            super()._init_weights(module)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """`{tied parameter: its source}`.

        Transformers switches all tying by `tie_word_embeddings`. Here, as in Marian, sharing the two embeddings
        (`share_encoder_decoder_embeddings`) and tying the output projection are independent choices.
        """
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize every table of a joint vocabulary; with two vocabularies, only the source's."""
        config, decoder, head = self.config, self.base_model.decoder, self.get_output_embeddings()
        joint = config.decoder_vocab_size == config.vocab_size
        if joint and not config.share_encoder_decoder_embeddings:
            decoder.embed_tokens = self._get_resized_embeddings(
                decoder.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
            )
        embeddings = super()._resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if joint:
            config.decoder_vocab_size = embeddings.num_embeddings
        elif head is not None:
            self.lm_head = head
        return embeddings


class WithoutDecoder:
    """A mixin for models that are an encoder: there is one vocabulary to resize."""

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = PreTrainedModel._resize_token_embeddings(self, *args, **kwargs)
        self.config.decoder_vocab_size = embeddings.num_embeddings
        return embeddings


class Stack(DeepWidePreTrainedModel):
    """The base class of encoder and decoder: layers that run one after another."""

    layers: nn.ModuleList

    def run_layers(self, hidden_states: torch.Tensor, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers one after another, before the final norm: `[B, time, D]` to `[B, time, D]`.

        A family overrides this method to change how its layers are joined, and keeps the protocol:

        Args:
            hidden_states: the embeddings.
            inputs: the positional arguments of every layer after `hidden_states`. In an encoder: the attention mask.
                In a decoder: the causal mask, the encoder's states `[B, S, D]`, and the mask of these states. Each can
                be None. A family may add an argument before these (a cell of the depth-wise LSTM) or after these (a
                gate of latent depth).
            kwargs: the keyword arguments of every layer: in a decoder `past_key_values`, and arguments of the model's
                call for attention. A family removes its own arguments by naming them in its signature.
        """
        for layer, skipped in zip(self.layers, self.draw_skipped(kwargs.get("past_key_values")), strict=True):
            if skipped:
                hidden_states = hidden_states + no_gradient(layer, *(x for x in inputs if isinstance(x, torch.Tensor)))
            else:
                hidden_states = layer(hidden_states, *inputs, **kwargs)
        return hidden_states

    def draw_skipped(self, past_key_values: Any) -> list[bool]:
        """Which layers this forward pass skips (LayerDrop): none in evaluation, nor with a cache, which needs all.

        In training a decoder that drops layers makes no cache, but takes one that is given.

        There is one draw per layer and forward pass, for all sentences and positions. It is from the CPU's generator:
        so on a GPU the decision needs no synchronisation.
        """
        if not (self.training and self.layer_drop) or past_key_values is not None:
            return [False] * len(self.layers)
        return (torch.rand(len(self.layers), device="cpu") <= self.layer_drop).tolist()

    @property
    def layer_drop(self) -> float:
        """The rate of LayerDrop; 0 in families that do not have it."""
        return self.config.layer_drop if hasattr(type(self.config), "layer_drop") else 0.0


class Encoder(Stack):
    """Embeddings and a stack of encoder layers."""

    layer_class = EncoderLayer
    _can_record_outputs = {"hidden_states": EncoderLayer, "attentions": MultiBranchAttention}

    def __init__(self, config: DeepWideConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([self.layer_class(config) for _ in range(config.encoder_layers)])
        self.layer_norm = nn.LayerNorm(config.d_model) if config.normalize_before else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode source tokens `[B, S]` (or their unscaled embeddings `[B, S, D]`) to `[B, S, D]`."""
        inputs_embeds = embed(self.embed_tokens, input_ids, inputs_embeds, "input_ids", "inputs_embeds")
        hidden_states = self.embeddings(inputs_embeds, attention_mask)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        hidden_states = self.run_layers(hidden_states, mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class Decoder(Stack):
    """Embeddings and a stack of decoder layers."""

    layer_class = DecoderLayer
    has_twin: bool = True  # whether `decoding` can read single tokens as this decoder does
    _can_record_outputs = {
        "hidden_states": DecoderLayer,
        "attentions": OutputRecorder(MultiBranchAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(MultiBranchAttention, index=1, layer_name="encoder_attn"),
    }

    def __init__(self, config: DeepWideConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.decoder_vocab_size, config.d_model, config.pad_token_id)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.decoder_layers)])
        self.layer_norm = nn.LayerNorm(config.d_model) if config.normalize_before else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target tokens `[B, T]` (or embeddings `[B, T, D]`) against the source `[B, S, D]` to `[B, T, D]`.

        Args:
            attention_mask: `[B, past + T]`, 1 for real target tokens.
            encoder_attention_mask: `[B, S]`, 1 for real source tokens.
        """
        inputs_embeds = embed(
            self.embed_tokens, input_ids, inputs_embeds, "decoder_input_ids", "decoder_inputs_embeds"
        )
        if use_cache and past_key_values is None and not (self.training and self.layer_drop):
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        elif past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            # the source's keys must not stand behind the target's
            past_key_values = EncoderDecoderCache(past_key_values, DynamicCache(config=self.config))
        past_length = 0 if past_key_values is None else past_key_values.get_seq_length()
        check_prefix(past_key_values, len(self.layers))
        hidden_states = self.embeddings(inputs_embeds, attention_mask, past_length, is_causal=True)
        causal_mask = None
        one_more = type(past_length) is int and past_length > 0 and inputs_embeds.shape[1] == 1
        if attention_mask is not None or not one_more:  # a single new token may see the whole of a dynamic cache
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
            )
        cross_mask = None
        if encoder_hidden_states is not None:
            cross_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=self.source_states(encoder_hidden_states),
            )
        hidden_states = self.run_layers(
            hidden_states,
            causal_mask,
            encoder_hidden_states,
            cross_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(hidden_states), past_key_values=past_key_values
        )

    def source_states(self, memory: torch.Tensor) -> torch.Tensor:
        """The states of the source's tokens `[B, S, D]`, among what the encoder gives."""
        return memory

    def step(
        self,
        input_ids: torch.LongTensor,
        past_length: int,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None,
        **inputs: Any,
    ) -> torch.Tensor:
        """As `forward`, of one more token `[R, 1]` in each row, to `[R, 1, D]`.

        It is the decoder's twin that takes this step: its attentions keep what they need (see `DecodingCache`).
        """
        hidden_states = self.embeddings(self.embed_tokens(input_ids), None, past_length)
        return self.layer_norm(
            self.run_layers(hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, **inputs)
        )


def check_prefix(cache: Cache | None, layers: int) -> None:
    """Refuse a cache that begins with tokens (PEFT's prefix tuning) in some of the decoder's `layers` alone.

    PEFT makes a prefix for as many layers as the encoder has. A cache with tokens begins where no sentence has been
    attended to yet.
    """
    held = len(cache.self_attention_cache.layers) if isinstance(cache, EncoderDecoderCache) else 0
    if 0 < held < layers and not any(cache.is_updated.values()) and cache.get_seq_length() > 0:
        raise ValueError(
            f"`past_key_values` begins with a prefix in {held} layers, and the decoder has {layers}; give the prefix "
            f"as many, in PEFT by PrefixTuningConfig(num_layers={layers})"
        )


class DeepWideModel(DeepWidePreTrainedModel):
    """Encoder and decoder without a head."""

    encoder_class = Encoder
    decoder_class = Decoder

    def __init__(self, config: DeepWideConfig) -> None:
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
            self._tied_weights_keys = {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
            }
        self.encoder = self.encoder_class(config)
        self.decoder = self.decoder_class(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The source embedding, which is also the target's where they are shared."""
        return self.shared if self.config.share_encoder_decoder_embeddings else self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the source embedding, and the target's where they are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    def decoder_inputs(self) -> dict[str, Any]:
        """What a family hands its decoder beside the states of the encoder."""
        return {}

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode `[B, S]` source tokens (unless `encoder_outputs` are given) and decode `[B, T]` target tokens."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **self.decoder_inputs(),
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def with_parameter(parent: Callable[..., Any], method: Callable[..., Any], name: str) -> inspect.Signature:
    """The parent's signature, and before its `**kwargs` the keyword `name` of the method that overrides it."""
    signature = inspect.signature(parent)
    *parameters, kwargs = signature.parameters.values()
    return signature.replace(parameters=[*parameters, inspect.signature(method).parameters[name], kwargs])


class DeepWideForConditionalGeneration(DeepWidePreTrainedModel, GenerationMixin):
    """Encoder, decoder and language-model head: a translation model."""

    model_class = DeepWideModel
    supports_label_smoothing = True

    def __init__(self, config: DeepWideConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.d_model, config.decoder_vocab_size, bias=config.lm_head_bias)
        if config.share_encoder_decoder_embeddings:
            source = "model.shared.weight"
            self._tied_weights_keys = {
                "model.encoder.embed_tokens.weight": source,
                "model.decoder.embed_tokens.weight": source,
            }
        else:
            source = "model.decoder.embed_tokens.weight"
            self._tied_weights_keys = {}
        if config.tie_word_embeddings:
            self._tied_weights_keys["lm_head.weight"] = source
        self.post_init()

    @classmethod
    def from_base(cls, base: Any, **config_overrides: Any) -> "DeepWideForConditionalGeneration":
        """Start from a trained base model; see `hf_deepwide.warm_start.from_base`.

        Args:
            base: a folder, a Hub id, or a loaded model: a vanilla model of ours, Marian, BART, mBART, M2M100 or NLLB.
            config_overrides: fields of this family's config, e.g. `attention_branches=3, drop_branch=0.2`.
        """
        warm_start = importlib.import_module("hf_deepwide.warm_start")  # stays behind when this file is shared
        return warm_start.from_base(cls, base, **config_overrides)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels `[B, T]` shifted right behind the start token; ignored positions (-100) become padding."""
        if self.config.decoder_start_token_id is None:
            raise ValueError("`decoder_start_token_id` is None; set it to the id that decoder inputs start with")
        start = labels.new_full((labels.shape[0], 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def objective(
        self,
        loss: torch.Tensor | None,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | None:
        """The loss to minimise, made of the cross-entropy `loss`; both are None without `labels`.

        A family with further terms overrides this hook.
        """
        return loss

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As Transformers' own. A cache that it returns is an ordinary one, and a loop of the caller's gets one."""
        before = _has_own_loop.set(callable(kwargs.get("custom_generate")))
        try:
            output = super().generate(*args, **kwargs)
        finally:
            _has_own_loop.reset(before)
        if isinstance(getattr(output, "past_key_values", None), DecodingCache):
            output.past_key_values = output.past_key_values.ordinary()
        return output

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Put a `DecodingCache` into `model_kwargs`, or where it does not serve, what Transformers puts there."""
        beams = max(generation_config.num_beams, generation_config.num_return_sequences)
        if _has_own_loop.get() or not can_decode(self, generation_config, generation_mode, model_kwargs):
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
            return
        encoder_outputs, mask = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
        memory, rows = encoder_outputs[0], len(encoder_outputs[0])
        if beams > 1:  # `generate` has repeated it for each beam
            memory = memory[::beams].contiguous()
            model_kwargs["encoder_outputs"] = BaseModelOutput(**{**encoder_outputs, "last_hidden_state": memory})
        model_kwargs["past_key_values"] = DecodingCache(
            self,
            memory,
            None if mask is None else mask[::beams],
            rows,
            generation_config.num_beams,
            {name: model_kwargs[name] for name in ("posteriors",) if model_kwargs.get(name) is not None},
        )

    def _sample(self, input_ids: torch.Tensor, **asked: Any) -> Any:
        """Greedy search and sampling: by `search` where it serves, else by Transformers."""
        if can_search(**asked):
            return search_rows(self, input_ids, **asked)
        return super()._sample(input_ids, **asked)

    def _beam_search(self, input_ids: torch.Tensor, **asked: Any) -> Any:
        """Beam search: by `search` where it serves, else by Transformers."""
        if can_search(**asked):
            return BeamSearch(self, input_ids, **asked).run()
        return super()._beam_search(input_ids, **asked)

    def prepare_inputs_for_generation(
        self, input_ids: torch.LongTensor, *args: Any, past_key_values: Cache | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """What the model is called with: all, or with a `DecodingCache` the tokens that it has not read."""
        if isinstance(past_key_values, DecodingCache):
            new = input_ids[:, past_key_values.get_seq_length() :]
            return {"decoder_input_ids": new, "past_key_values": past_key_values}
        return super().prepare_inputs_for_generation(input_ids, *args, past_key_values=past_key_values, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        skip_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Logits `[B, T, V]` of the next target token, and, where `labels` are given, their cross-entropy.

        Args:
            labels: target tokens `[B, T]`, -100 where there is none. Decoder inputs default to them, shifted right.
            skip_logits: compute the loss chunk by chunk and return no logits; `labels` are required. In training
                this saves the memory and the time of several `[B * T, V]` tensors.
            num_items_in_batch: target tokens over all devices and accumulation steps; the loss is the sum over this
                batch's tokens divided by it. None: this batch's own count.
            label_smoothing: (among `kwargs`, because Trainer takes every parameter called "label..." for a label)
                epsilon: the loss is (1 - eps) * nll + eps / V * sum_v -log p_v (fairseq before 2021,
                `torch.nn.functional.cross_entropy`). Default: the model's `label_smoothing`, which is 0.
        """
        if isinstance(past_key_values, DecodingCache):
            logits = past_key_values.logits(decoder_input_ids).clone()  # a hook may change them, and not those inside
            return Seq2SeqLMOutput(logits=logits, past_key_values=past_key_values)
        label_smoothing = kwargs.pop("label_smoothing", self.label_smoothing)
        if labels is not None:
            use_cache = bool(use_cache)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        elif skip_logits:
            raise ValueError("`skip_logits=True` leaves nothing to return without `labels`")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        loss = logits = None
        if skip_logits and is_own(self.lm_head, nn.Linear):
            loss = linear_cross_entropy(
                outputs.last_hidden_state, self.lm_head, labels, label_smoothing, num_items_in_batch
            )
        else:
            logits = self.lm_head(outputs.last_hidden_state)
            if labels is not None:
                loss = cross_entropy(logits, labels, label_smoothing, num_items_in_batch)
        return Seq2SeqLMOutput(
            loss=self.objective(loss, labels, num_items_in_batch),
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )
