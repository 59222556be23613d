"""The base class of every model: what Transformers asks of a model, and how the papers initialise one.

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
    no_weight_decay: tuple[str, ...] = ()  # last parts of parameters' names, of scales that decay would distort
    label_smoothing: float = 0.0  # where the model's call names none; set by a trainer, not saved

    def __init__(self, config: DeepWideConfig, *args: Any, **kwargs: Any) -> None:
        # Fields may have been set since the config was made: `from_pretrained(folder, field=value)` does so.
        config.validate()
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """As the parent's; of the layers that may not be split, only the classes that this model has are named.

        Accelerate (FSDP) refuses a model that names another class.
        """
        super().post_init()
        present = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = set(self._no_split_modules) & present

    @property
    def training_step(self) -> int:
        """Optimizer steps made so far, for schedules in the loss; set by a trainer, not saved."""
        return getattr(self, "_training_step", 0)

    @training_step.setter
    def training_step(self, step: int) -> None:
        self._training_step = step
        self.begin_step(step)

    def begin_step(self, step: int) -> None:
        """What the model does once `step` optimizer steps were made; a family overrides this hook."""

    def training_logs(self) -> dict[str, float]:
        """Return numbers by name that a family logs beside the loss."""
        return {}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The papers' initialisation, or N(0, init_std) where the config gives one (specs: fairseq, MAT's fork).

        Embeddings N(0, 1/D), padding row 0; projections Xavier-uniform, each branch by its own fan-in and fan-out,
        q, k and v as one fused [3D, D] matrix; biases 0. A way of joining sub-layers may make some projections start
        smaller (`gain`). A module that has weights of another kind fills them itself (`initialise`).
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
    """A mixin for models that are an encoder: there is one vocabulary, with one table of embeddings."""

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
