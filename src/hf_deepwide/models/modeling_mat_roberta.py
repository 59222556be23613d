"""MAT for language understanding: RoBERTa with multi-branch attention (Fan et al. 2020, section 6), arXiv 2006.10270.

Each attention sub-layer averages N_a independent multi-head attentions, and branches are dropped in training:

    LayerNorm(x + dropout(1/N_a sum_i beta_i attn_M(x, x, x; theta_i)))                               (Eq. 4 and 5)

The feed-forward sub-layer is dropped in the same way (Eq. 7). The rest is RoBERTa (Liu et al. 2019, arXiv 1907.11692):
post-norm layers, learned positions, a LayerNorm after the embeddings. RoBERTa adds the same token-type embedding to
all tokens. Here this vector is part of the position embeddings.

The paper starts from a trained RoBERTa by proximal initialisation: `MATRobertaForSequenceClassification.from_base`.
Shapes: B batch, S length, D model width, V vocabulary, C classes.
"""

import importlib
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import can_return_tuple

from .configuration_mat_roberta import MATRobertaConfig
from .dropout import Dropout
from .loss import check_skip
from .masked_lm_head import MaskedLMHead
from .pretrained_model import DeepWidePreTrainedModel, WithoutDecoder
from .stacks import Encoder


class MATRobertaPreTrainedModel(WithoutDecoder, DeepWidePreTrainedModel):
    """The base class of these models, which can start from a trained model."""

    config_class = MATRobertaConfig

    @classmethod
    def from_base(cls, base: Any, **config_overrides: Any) -> "MATRobertaPreTrainedModel":
        """Start from a trained RoBERTa; see `hf_deepwide.warm_start_roberta.from_base`.

        Args:
            base: a folder, a Hub id, or a loaded model: RoBERTa, XLM-R, CamemBERT, or a model of this family.
            config_overrides: fields of this family's config, e.g. `attention_branches=2, drop_branch=0.3`.
        """
        # A shared checkpoint contains this file, but not `warm_start_roberta`.
        warm_start = importlib.import_module("hf_deepwide.warm_start_roberta")
        return warm_start.from_base(cls, base, **config_overrides)

    def post_init(self) -> None:
        """Set the config's epsilon in all layer norms, those of a head included, then call the parent's method."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = self.config.layer_norm_eps
        super().post_init()


class MATRobertaModel(MATRobertaPreTrainedModel):
    """The encoder without a head."""

    def __init__(self, config: MATRobertaConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encode tokens `[B, S]`, or their embeddings `[B, S, D]`, to `[B, S, D]`.

        Args:
            attention_mask: `[B, S]`, 1 for real tokens. None: all tokens except padding are real; with
                `inputs_embeds`, all positions are.

        Raises:
            ValueError: `position_ids` are passed. Positions are counted from the first real token.
        """
        if kwargs.pop("position_ids", None) is not None:
            raise ValueError("`position_ids` are not accepted: positions are counted from the first real token")
        if attention_mask is None and input_ids is not None:
            attention_mask = (input_ids != self.config.pad_token_id).long()
        return self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )


class MATRobertaForMaskedLM(MaskedLMHead, MATRobertaPreTrainedModel):
    """The masked language model; its head is tied to the token embedding unless `tie_word_embeddings` is False."""

    def __init__(self, config: MATRobertaConfig) -> None:
        super().__init__(config)
        self.model = MATRobertaModel(config)
        self.add_head(config, "model.encoder.embed_tokens.weight")
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        skip_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        """Return the logits `[B, S, V]` of the token at each position, and the cross-entropy if `labels` are given.

        Args:
            labels: the tokens to predict `[B, S]`, -100 at positions that are not masked.
            skip_logits: compute the loss from the masked positions alone and return no logits; needs `labels`.
            num_items_in_batch: number of masked tokens over all devices and accumulation steps; None: in this batch.
            label_smoothing: (among `kwargs`) epsilon, as in translation.
        """
        label_smoothing = kwargs.pop("label_smoothing", self.label_smoothing)
        check_skip(skip_logits, labels)
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        loss, logits = self.predict(
            outputs.last_hidden_state, labels, skip_logits, label_smoothing, num_items_in_batch
        )
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ClassificationHead(nn.Module):
    """RoBERTa's head, W_2 dropout(tanh(W_1 dropout(x) + b_1)) + b_2, where x is the first token's state."""

    def __init__(self, config: MATRobertaConfig) -> None:
        super().__init__()
        rate = config.dropout if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = Dropout(rate)
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.num_labels)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """Map `[B, D]` to `[B, C]`."""
        return self.out_proj(self.dropout(torch.tanh(self.dense(self.dropout(first)))))


class MATRobertaForSequenceClassification(MATRobertaPreTrainedModel):
    """A classifier of sentences or sentence pairs; with one label it is a regression model."""

    accepts_loss_kwargs = False  # the loss is the mean over the sentences of a batch: Trainer averages over batches

    def __init__(self, config: MATRobertaConfig) -> None:
        super().__init__(config)
        self.model = MATRobertaModel(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Return the logits `[B, C]`, and the mean loss over the sentences if `labels` `[B]` are given.

        The config's `problem_type` selects the loss of Transformers: cross-entropy for classes, squared error for one
        label, or binary cross-entropy for several labels per sentence (`labels` `[B, C]`).
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        states = outputs.last_hidden_state
        if attention_mask is None:
            first = states[:, 0]
        else:  # padding may be on the left
            first = states[torch.arange(len(states), device=states.device), attention_mask.int().argmax(1)]
        logits = self.classifier(first)
        loss = None if labels is None else self.loss_function(labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
