"""The base class of every model: the interface to Transformers, and the papers' initialisation.

Shapes: D model width, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from .branches import fans
from .cache_name import CACHE_NAMES
from .configuration_base import DeepWideConfig


class DeepWidePreTrainedModel(PreTrainedModel):
    """The base class of all models: loading, saving, initialisation."""

    config_class = DeepWideConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    no_weight_decay: tuple[str, ...] = ()  # last parts of the names of scales that decay would distort
    label_smoothing: float = 0.0  # the default of the model's call; set by a trainer, not saved

    def __init__(self, config: DeepWideConfig, *args: Any, **kwargs: Any) -> None:
        # Fields may have been set since the config was made: `from_pretrained(folder, field=value)` does so.
        config.validate()
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """Call the parent's method, and keep in `_no_split_modules` only the classes that this model contains.

        Accelerate (FSDP) refuses a model whose `_no_split_modules` contains another class.
        """
        super().post_init()
        present = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = set(self._no_split_modules) & present

    @property
    def training_step(self) -> int:
        """The number of optimizer steps so far, for schedules in the loss. A trainer sets it; it is not saved."""
        return getattr(self, "_training_step", 0)

    @training_step.setter
    def training_step(self, step: int) -> None:
        self._training_step = step
        self.begin_step(step)

    def begin_step(self, step: int) -> None:
        """Update the model after `step` optimizer steps; a family overrides this hook."""

    def training_logs(self) -> dict[str, float]:
        """Return the numbers that a family logs beside the loss, by name."""
        return {}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as the papers do, or with N(0, init_std^2) if the config sets it (specs: fairseq, MAT's fork).

        Embeddings and `lm_head` start as N(0, 1/D), with a padding row of 0. Projections are Xavier-uniform by the
        fan-in and fan-out of one branch; q, k and v count as one fused [3D, D] matrix. Biases are 0. Some residual
        connections make projections start smaller (`gain`). A module with weights of another kind fills them itself
        (`initialise`).
        """
        std = self.config.init_std
        if hasattr(module, "initialise"):
            module.initialise(self.config)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.d_model**-0.5 if std is None else std)
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            if module.bias is not None:
                init.zeros_(module.bias)
            if std is None and module is getattr(self, "lm_head", None):
                std = self.config.d_model**-0.5
            gain = getattr(module, "gain", 1.0)
            if std is not None:
                init.normal_(module.weight, std=gain * std)
                return
            bound = gain * math.sqrt(6 / sum(fans(module)))
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            super()._init_weights(module)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Return `{tied parameter: its source}`.

        In Transformers `tie_word_embeddings` switches all tying. Here, as in Marian, two choices are independent:
        sharing the two embeddings (`share_encoder_decoder_embeddings`), and tying the output projection.
        """
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        return dict(self._tied_weights_keys or {})

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize all embeddings of a joint vocabulary; with two vocabularies, resize only the source embedding."""
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
    """A mixin for encoder-only models, which have one vocabulary and one embedding table."""

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.base_model.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.base_model.encoder.embed_tokens = value

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = PreTrainedModel._resize_token_embeddings(self, *args, **kwargs)
        self.config.decoder_vocab_size = embeddings.num_embeddings
        return embeddings
