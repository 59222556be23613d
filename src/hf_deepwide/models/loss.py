"""Cross-entropy over the vocabulary, with label smoothing, per target token.

loss = sum over real tokens of [(1 - eps) * -log p(target) + eps / V * sum_v -log p(v)] / number of tokens
"""

import torch
from torch import nn


def token_count(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """What the summed loss is divided by: the count given, or the number of labels that are not -100."""
    if num_items_in_batch is None:
        return (labels != -100).sum().clamp(min=1)
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(labels.device)
    return num_items_in_batch


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Loss of logits `[batch, time, V]` against labels `[batch, time]` (-100: ignored), computed in float32."""
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten().to(logits.device),
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / token_count(labels, num_items_in_batch)


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    lm_head: nn.Linear,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The same loss from hidden states `[batch, time, D]`."""
    return cross_entropy(lm_head(hidden_states), labels, label_smoothing, num_items_in_batch)
