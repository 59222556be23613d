"""Encoder and decoder: embeddings, then layers that run one after another.

A family replaces the parts that it changes (a layer class, how layers are joined), and inherits the rest. Shapes:
B batch, S source length, T target length, D model width.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import MultiBranchAttention, cross_attention_name
from .branches import no_gradient
from .cache_name import given_cache, with_cache
from .configuration_base import DeepWideConfig
from .embeddings import Embeddings, embed
from .layers import DecoderLayer, EncoderLayer
from .pretrained_model import DeepWidePreTrainedModel


class Stack(DeepWidePreTrainedModel):
    """The base class of encoder and decoder: layers that run one after another."""

    layers: nn.ModuleList

    def run_layers(self, hidden_states: torch.Tensor, *inputs: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers one after another, before the final norm: `[B, time, D]` to `[B, time, D]`.

        A family overrides this method to change how its layers are joined. The arguments stay the same:

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
        """Draw the layers that this forward pass skips (LayerDrop).

        No layer is skipped in evaluation, or with a cache, which needs all layers. In training a decoder with
        LayerDrop makes no cache, but accepts one as an argument.

        There is one draw per layer and forward pass, for all sentences and positions. It uses the CPU's generator, so
        that on a GPU the decision needs no synchronisation.
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
    has_twin: bool = True  # whether `decoding` has a twin of it for single tokens
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
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decode target tokens `[B, T]` (or embeddings `[B, T, D]`) against the source `[B, S, D]` to `[B, T, D]`.

        Args:
            attention_mask: `[B, past + T]`, 1 for real target tokens.
            encoder_attention_mask: `[B, S]`, 1 for real source tokens.
            cache: another name for `past_key_values`.
        """
        past_key_values = given_cache(past_key_values, cache)
        if self.gradient_checkpointing and self.training:  # Transformers' layers drop it even without gradients
            past_key_values = no_cache(past_key_values)
        inputs_embeds = embed(
            self.embed_tokens, input_ids, inputs_embeds, "decoder_input_ids", "decoder_inputs_embeds"
        )
        if use_cache and past_key_values is None and not (self.training and self.layer_drop):
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        elif past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            # otherwise the source's keys would be appended to the target's
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
                **with_cache(past_key_values),
            )
        cross_mask = None
        if encoder_hidden_states is not None:
            config = self.config
            if (name := cross_attention_name(config)) != config._attn_implementation:
                config = copy.copy(config)
                config._attn_implementation = name
            cross_mask = create_bidirectional_mask(
                config=config,
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
            last_hidden_state=self.layer_norm(hidden_states), **with_cache(past_key_values)
        )

    def source_states(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the states of the source tokens `[B, S, D]`, which are part of the encoder's output."""
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
        """Decode one more token `[R, 1]` in each row to `[R, 1, D]`, with the result of `forward`.

        Only the decoder's twin runs this step. Its attentions keep the keys and values (see `DecodingCache`).
        """
        hidden_states = self.embeddings(self.embed_tokens(input_ids), None, past_length)
        return self.layer_norm(
            self.run_layers(hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, **inputs)
        )


def no_cache(cache: Cache | None) -> None:
    """Replace a cache by None. Gradient checkpointing computes a layer twice, and a cache would keep its tokens twice.

    Raises:
        ValueError: the cache already contains tokens, which would be lost.
    """
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "the cache begins with tokens (a prefix), but gradient checkpointing uses no cache, so these tokens would "
            "be lost; turn gradient checkpointing off"
        )


def check_prefix(cache: Cache | None, layers: int) -> None:
    """Refuse a cache that begins with tokens (PEFT's prefix tuning) in only some of the decoder's `layers`.

    PEFT makes a prefix with the number of the encoder's layers. If a cache contains tokens before any layer has
    attended to the source, these tokens are a prefix.

    Raises:
        ValueError: the prefix has too few layers. The message contains both numbers of layers, and the setting for
            PEFT.
    """
    held = len(cache.self_attention_cache.layers) if isinstance(cache, EncoderDecoderCache) else 0
    if 0 < held < layers and not any(cache.is_updated.values()) and cache.get_seq_length() > 0:
        raise ValueError(
            f"`past_key_values` begins with a prefix in {held} layers, and the decoder has {layers}; give the prefix "
            f"as many, in PEFT by PrefixTuningConfig(num_layers={layers})"
        )
