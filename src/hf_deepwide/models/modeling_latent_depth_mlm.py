"""The deep encoder with latent depth as a masked language model (Li et al. 2020, section 4.3 and Table 2).

The encoder and its posteriors are those of `modeling_latent_depth`; the head is RoBERTa's. With
`latent_encoder=False` the model is the static baseline of Table 2. Shapes: B batch, S length, D model width, V
vocabulary.
"""

import torch
from transformers.modeling_outputs import MaskedLMOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_latent_depth import LatentDepthConfig
from .loss import check_skip
from .masked_lm_head import MaskedLMHead
from .modeling_latent_depth import LatentDepthLoss, LatentEncoder
from .pretrained_model import WithoutDecoder


class LatentDepthForMaskedLM(MaskedLMHead, WithoutDecoder, LatentDepthLoss):
    """Encoder, a transformation (dense, GELU, LayerNorm), and the tied projection to the vocabulary with a bias.

    The decoder's fields of the config have no effect.
    """

    def __init__(self, config: LatentDepthConfig) -> None:
        super().__init__(config)
        self.encoder = LatentEncoder(config)
        self.add_head(config, "encoder.embed_tokens.weight")
        self.post_init()

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
        """Return the logits `[B, S, V]` of the token at each position, and the loss of Eq. 8 if `labels` are given.

        Args:
            labels: the tokens to predict `[B, S]`, -100 at positions that are not masked. The loss is the mean
                cross-entropy of these tokens, in training plus the terms of the posteriors.
            posteriors: index of each sentence's posterior `[B]`; required if `num_posteriors` is more than 1.
            skip_logits: compute the loss from the masked positions alone and return no logits; needs `labels`.
            num_items_in_batch: number of masked tokens over all devices and accumulation steps; None: in this batch.
            label_smoothing: (among `kwargs`) epsilon, as in translation.
        """
        label_smoothing = kwargs.pop("label_smoothing", self.label_smoothing)
        check_skip(skip_logits, labels)
        outputs = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            posteriors=posteriors,
            return_dict=True,
            **kwargs,
        )
        loss, logits = self.predict(
            outputs.last_hidden_state, labels, skip_logits, label_smoothing, num_items_in_batch
        )
        return MaskedLMOutput(
            loss=self.objective(loss, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
