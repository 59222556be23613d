"""The encoder-decoder that is the base class of every model family: model, language-model head, generation.

A family replaces the parts that it changes, and inherits the rest. Shapes: B batch, S source length, T target length,
D model width, V vocabulary.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .branches import is_own
from .cache_name import CACHE_NAME, NEW_NAME, given_cache, with_cache, with_old_name
from .configuration_base import DeepWideConfig
from .decoding import DecodingCache, can_decode
from .embeddings import SHORTER, check_length
from .loss import check_skip, cross_entropy, linear_cross_entropy
from .pretrained_model import DeepWidePreTrainedModel
from .search import BeamSearch, can_search, search_rows
from .stacks import Decoder, Encoder

_has_own_loop: ContextVar[bool] = ContextVar("whether the caller of `generate` brings a loop", default=False)


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
        """Return the source embedding. If embeddings are shared, its matrix is also the target embedding's."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the source embedding, and also the target embedding if they are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.shared = value
            self.decoder.embed_tokens = value

    def decoder_inputs(self) -> dict[str, Any]:
        """Return the extra arguments of a family's decoder, besides the states of the encoder."""
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
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encode source tokens `[B, S]` (unless `encoder_outputs` are given), and decode target tokens `[B, T]`.

        `cache` is another name of `past_key_values`.
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                return_dict=True,
                **kwargs,
            )
        elif not isinstance(encoder_outputs, BaseModelOutput):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoder_outputs.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=given_cache(past_key_values, cache),
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **self.decoder_inputs(),
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            **with_cache(getattr(decoder_outputs, CACHE_NAME)),
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def with_posteriors(parent: Callable[..., Any], method: Callable[..., Any]) -> inspect.Signature:
    """Return the parent's signature with the keyword `posteriors` of the overriding `method`, before `**kwargs`."""
    signature = inspect.signature(parent)
    *parameters, kwargs = signature.parameters.values()
    return signature.replace(parameters=[*parameters, inspect.signature(method).parameters["posteriors"], kwargs])


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
            base: a folder, a Hub id, or a loaded model: a vanilla model or a MAT of this library, Marian, BART, mBART,
                M2M100 or NLLB.
            config_overrides: fields of this family's config, e.g. `attention_branches=3, drop_branch=0.2`.
        """
        warm_start = importlib.import_module("hf_deepwide.warm_start")  # not in a shared model's code, as this file is
        return warm_start.from_base(cls, base, **config_overrides)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shift labels `[B, T]` right, after the start token; ignored positions (-100) become padding.

        Raises:
            ValueError: the config has no start token.
        """
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
        """Return the loss to minimise, given the cross-entropy `loss`. Both are None without `labels`.

        Families whose loss has more terms override this method.
        """
        return loss

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as Transformers does, with a faster cache inside.

        A returned cache is converted to Transformers' class. The caller's own loop (`custom_generate`) also gets a
        cache of this class.
        """
        before = _has_own_loop.set(callable(kwargs.get("custom_generate")))
        try:
            output = super().generate(*args, **kwargs)
        finally:
            _has_own_loop.reset(before)
        cache = getattr(output, CACHE_NAME, None)
        if isinstance(cache, DecodingCache):
            setattr(output, CACHE_NAME, cache.ordinary())
        return output

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Put a `DecodingCache` into `model_kwargs`, or Transformers' own cache if a `DecodingCache` does not work."""
        if self.training and self.get_decoder().gradient_checkpointing:
            # These layers take no cache. With a cache, `generate` would pass only one token at a time.
            generation_config.use_cache = model_kwargs["use_cache"] = False
        beams = max(generation_config.num_beams, generation_config.num_return_sequences)
        if _has_own_loop.get() or not can_decode(self, generation_config, generation_mode, model_kwargs):
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
            return
        encoder_outputs, mask = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
        memory, rows = encoder_outputs[0], len(encoder_outputs[0])
        if beams > 1:  # `generate` has repeated the states for each beam
            memory = memory[::beams].contiguous()
            model_kwargs["encoder_outputs"] = BaseModelOutput(**{**encoder_outputs, "last_hidden_state": memory})
        model_kwargs[CACHE_NAME] = DecodingCache(
            self,
            memory,
            None if mask is None else mask[::beams],
            rows,
            generation_config.num_beams,
            {name: model_kwargs[name] for name in ("posteriors",) if model_kwargs.get(name) is not None},
        )

    def _sample(self, input_ids: torch.Tensor, **asked: Any) -> Any:
        """Run greedy search or sampling: in `search.py` if it supports the call, else in Transformers."""
        if can_search(**(renamed := with_old_name(asked))):
            return search_rows(self, input_ids, **renamed)
        return super()._sample(input_ids, **asked)

    def _beam_search(self, input_ids: torch.Tensor, **asked: Any) -> Any:
        """Run beam search: in `search.py` if it supports the call, else in Transformers."""
        if can_search(**(renamed := with_old_name(asked))):
            return BeamSearch(self, input_ids, **renamed).run()
        return super()._beam_search(input_ids, **asked)

    def prepare_inputs_for_generation(
        self, input_ids: torch.LongTensor, *args: Any, past_key_values: Cache | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the model's inputs: with a `DecodingCache` only the cache and the tokens that it has not read."""
        cache = given_cache(past_key_values, kwargs.pop(NEW_NAME, None))
        if isinstance(cache, DecodingCache):
            return {"decoder_input_ids": input_ids[:, cache.get_seq_length() :], CACHE_NAME: cache}
        # a static cache's length is a tensor, which the embeddings do not check: that would synchronise
        check_length(input_ids.shape[1], self.config.max_position_embeddings, SHORTER)
        return super().prepare_inputs_for_generation(input_ids, *args, **with_cache(cache), **kwargs)

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
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Return the logits `[B, T, V]` of the next target token, and the cross-entropy if `labels` are given.

        Args:
            labels: target tokens `[B, T]`, -100 where there is none. Decoder inputs default to them, shifted right.
            skip_logits: compute the loss chunk by chunk and return no logits; `labels` are required. In training
                this saves the memory and the time of several `[B * T, V]` tensors.
            num_items_in_batch: target tokens on all devices and in all accumulation steps. The loss is the sum over
                this batch's tokens, divided by this number. None: the number of target tokens in this batch.
            cache: another name of `past_key_values`.
            label_smoothing: (in `kwargs`, because Trainer treats every parameter named "label..." as a label)
                epsilon: the loss is (1 - eps) * nll + eps / V * sum_v -log p_v (fairseq before 2021,
                `torch.nn.functional.cross_entropy`). Default: the model's `label_smoothing`, which is 0.
        """
        cache = given_cache(past_key_values, cache)
        if isinstance(cache, DecodingCache):
            logits = cache.logits(decoder_input_ids).clone()  # a hook may change these logits, but not the cache's own
            return Seq2SeqLMOutput(logits=logits, **with_cache(cache))
        check_skip(skip_logits, labels)
        label_smoothing = kwargs.pop("label_smoothing", self.label_smoothing)
        if labels is not None:
            use_cache = bool(use_cache)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
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
            **with_cache(getattr(outputs, CACHE_NAME)),
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )


class WithPosteriors(DeepWideForConditionalGeneration):
    """A mixin for families with parts that can be chosen by a sentence's language."""

    def forward(self, *args: Any, posteriors: torch.LongTensor | None = None, **kwargs: Any) -> Seq2SeqLMOutput:
        """Run the parent's method.

        Args:
            posteriors: index of each sentence's language, or of its posterior, `[B]`, if `num_posteriors` is more
                than 1. `generate` takes the same argument.
        """
        return super().forward(*args, posteriors=posteriors, **kwargs)

    # `generate` and `Trainer` read the model's inputs from this signature.
    forward.__signature__ = with_posteriors(DeepWideForConditionalGeneration.forward, forward)
