"""The deep encoder of latent depth as a masked language model (Li et al. 2020, section 4.3 and Table 2).

The encoder and its posteriors are those of `modeling_latent_depth`; the head is RoBERTa's. With
`latent_encoder=False` it is the table's static baseline. Shapes: B batch, S length, D model width, V vocabulary.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_latent_depth import LatentDepthConfig
from .loss import cross_entropy, linear_cross_entropy
from .modeling_latent_depth import LatentDepthLoss, LatentEncoder


class LatentDepthForMaskedLM(LatentDepthLoss):
    """Encoder, a transformation (dense, GELU, LayerNorm), and the tied projection to the vocabulary with a bias.

    Fields of the config that concern the decoder have no effect.
    """

    supports_label_smoothing = True

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.encoder = LatentEncoder(config)
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self._tied_weights_keys = (
            {"lm_head.weight": "encoder.embed_tokens.weight"} if config.tie_word_embeddings else {}
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.encoder.embed_tokens = value

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = PreTrainedModel._resize_token_embeddings(self, *args, **kwargs)  # there is no decoder to resize
        self.config.decoder_vocab_size = embeddings.num_embeddings
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        posteriors: torch.LongTensor | None = None,
        skip_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Logits `[B, S, V]` of the token at each position, and, where `labels` are given, the loss of Eq. 8.

        Args:
            labels: the tokens to predict `[B, S]`, -100 where none is masked. The loss is their mean cross-entropy,
                in training with the terms of the posteriors.
            posteriors: index of each sentence's posterior `[B]`, where `num_posteriors` is more than 1.
            skip_logits: compute the loss from the masked positions alone and return no logits; needs `labels`.
            num_items_in_batch: masked tokens over all devices and accumulation steps; None: this batch's own count.
            label_smoothing: (among `kwargs`) epsilon, as in translation.
        """
        label_smoothing = kwargs.pop("label_smoothing", self.label_smoothing)
        if skip_logits and labels is None:
            raise ValueError("`skip_logits=True` leaves nothing to return without `labels`")
        outputs = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            posteriors=posteriors,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        if skip_logits:
            masked = labels != -100
            hidden_states, targets = self._transform(hidden_states[masked]), labels[masked]
            loss = linear_cross_entropy(hidden_states, self.lm_head, targets, label_smoothing, num_items_in_batch)
        else:
            logits = self.lm_head(self._transform(hidden_states))
            if labels is not None:
                loss = cross_entropy(logits, labels, label_smoothing, num_items_in_batch)
        return MaskedLMOutput(
            loss=self.objective(loss, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[…, D]` to the same."""
        return self.layer_norm(nn.functional.gelu(self.dense(hidden_states)))
