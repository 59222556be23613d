"""The head of a masked language model, as RoBERTa has it (Liu et al. 2019).

Shapes: B batch, S length, D model width, V vocabulary.
"""

from typing import Any

import torch
from torch import nn

from .branches import is_own
from .loss import cross_entropy, linear_cross_entropy


class MaskedLMHead:
    """A transformation (dense, GELU, LayerNorm), and the projection to the vocabulary with a bias.

    This is a mixin for models. The model's class calls `add_head` when it is made, and `predict` in its forward pass.
    """

    supports_label_smoothing = True

    def add_head(self, config: Any, embedding: str) -> None:
        """Make the head; `embedding` is the name of the token embedding weight to which the head can be tied."""
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self._tied_weights_keys = {"lm_head.weight": embedding} if config.tie_word_embeddings else {}

    def predict(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        skip_logits: bool,
        label_smoothing: float,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss (None without labels) and the logits `[B, S, V]` (None if skipped) of states `[B, S, D]`.

        Args:
            hidden_states: the encoder's output.
            labels: the tokens to predict `[B, S]`, -100 at positions that are not masked.
            skip_logits: compute the loss from the masked positions alone and return no logits; needs `labels`.
            label_smoothing: epsilon, as in translation.
            num_items_in_batch: masked tokens on all devices and in all accumulation steps; None: those of this batch.
        """
        if skip_logits:
            masked = labels != -100
            hidden_states, targets = self._transform(hidden_states[masked])[None], labels[masked][None]
            rest = (targets, label_smoothing, num_items_in_batch)
            if is_own(self.lm_head, nn.Linear):
                return linear_cross_entropy(hidden_states, self.lm_head, *rest), None
            return cross_entropy(self.lm_head(hidden_states), *rest), None
        logits = self.lm_head(self._transform(hidden_states))
        if labels is None:
            return None, logits
        return cross_entropy(logits, labels, label_smoothing, num_items_in_batch), logits

    def _transform(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Transform `[…, D]` to `[…, D]`."""
        return self.layer_norm(nn.functional.gelu(self.dense(hidden_states)))
