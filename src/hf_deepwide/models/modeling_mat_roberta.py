"""MAT for language understanding: RoBERTa with multi-branch attention (Fan et al. 2020, section 6), arXiv 2006.10270.

Each attention sub-layer averages N_a independent multi-head attentions, and branches are dropped in training:

    LayerNorm(x + dropout(1/N_a sum_i beta_i attn_M(x, x, x; theta_i)))                               (Eq. 4 and 5)

The feed-forward sub-layer is dropped alike (Eq. 7). All else is RoBERTa (Liu et al. 2019, arXiv 1907.11692): post-norm
layers, learned positions, a LayerNorm behind the embeddings. RoBERTa's embedding of the token type, which is the same
for all tokens, is part of the positions here.

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
    """The base class: starting from a trained model."""

    config_class = MATRobertaConfig

    @classmethod
    def from_base(cls, base: Any, **config_overrides: Any) -> "MATRobertaPreTrainedModel":
        """Start from a trained RoBERTa; see `hf_deepwide.warm_start_roberta.from_base`.

        Args:
            base: a folder, a Hub id, or a loaded model: RoBERTa, XLM-R, CamemBERT, or a model of this family.
            config_overrides: fields of this family's config, e.g. `attention_branches=2, drop_branch=0.3`.
        """
        warm_start = importlib.import_module("hf_deepwide.warm_start_roberta")  # stays behind when this file is shared
        return warm_start.from_base(cls, base, **config_overrides)

    def post_init(self) -> None:
        """As the parent's, once all layer norms, those of a head included, have the config's epsilon."""
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
            attention_mask: `[B, S]`, 1 for real tokens. None: all tokens but padding are real.

        Raises:
            ValueError: `position_ids` are given. Positions are counted from the first real token.
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
    """The masked language model; its head is tied to the token embedding."""

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
        """Logits `[B, S, V]` of the token at each position, and, where `labels` are given, their cross-entropy.

        Args:
            labels: the tokens to predict `[B, S]`, -100 where none is masked.
            skip_logits: compute the loss from the masked positions alone and return no logits; needs `labels`.
            num_items_in_batch: masked tokens over all devices and accumulation steps; None: this batch's own count.
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
    """RoBERTa's head: W_2 dropout(tanh(W_1 dropout(x) + b_1)) + b_2 of the first token's state x."""

    def __init__(self, config: MATRobertaConfig) -> None:
        super().__init__()
        rate = config.dropout if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = Dropout(rate)
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.out_proj = nn.Linear(config.d_model, config.num_labels)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """`[B, D]` to `[B, C]`."""
        return self.out_proj(self.dropout(torch.tanh(self.dense(self.dropout(first)))))


class MATRobertaForSequenceClassification(MATRobertaPreTrainedModel):
    """A classifier of sentences and of pairs of sentences, or, with one label, a regression."""

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
        """Logits `[B, C]`, and, where `labels` `[B]` are given, the mean loss over the sentences.

        The loss is Transformers': cross-entropy for classes, squared error for one label, binary cross-entropy for
        several labels at once (`[B, C]`); `problem_type` of the config decides.
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        states = outputs.last_hidden_state
        if attention_mask is None:
            first = states[:, 0]
        else:  # padding may stand on the left
            first = states[torch.arange(len(states), device=states.device), attention_mask.int().argmax(1)]
        logits = self.classifier(first)
        loss = None if labels is None else self.loss_function(labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
