"""Checks that the tests of several models share: equations, gradients, checkpointing, a few steps, refusals."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from model_cases import build, pair, source
from transformers import PreTrainedModel

WAYS = ({"use_reentrant": False}, {"use_reentrant": True})  # the options of gradient checkpointing


def check_equations(
    model: PreTrainedModel,
    logits: torch.Tensor,
    weights: dict[str, torch.Tensor],
    expected: Iterable[torch.Tensor],
    tolerance: float = 1e-9,
) -> None:
    """Compare logits `[B, T, V]`, and the gradients of a random weighted sum of them, with naive equations.

    Args:
        model: the model that computed the logits, in float64.
        logits: the model's logits.
        weights: copies of the model's parameters (`model_cases.leaves`).
        expected: the naive logits `[t, V]` of each sentence, computed from `weights`.
        tolerance: absolute and relative tolerance of logits; that of gradients is ten times as large.
    """
    loss = expected_loss = 0
    for row, theirs in enumerate(expected):
        ours = logits[row, : len(theirs)]
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        direction = torch.randn(theirs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(row))
        loss, expected_loss = loss + (ours * direction).sum(), expected_loss + (theirs * direction).sum()
    loss.backward()
    expected_loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name}: DistributedDataParallel would wait for its gradient"
        gradient = weights[name.removeprefix("model.")].grad
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        torch.testing.assert_close(
            parameter.grad, gradient, atol=10 * tolerance, rtol=10 * tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def check_checkpointing(make: Callable[[], PreTrainedModel], *options: dict[str, Any] | None, **inputs: Any) -> None:
    """Check that gradient checkpointing, with each of `options`, changes neither loss nor gradients in training.

    The backward pass runs layers again. Dropout and the choice of dropped branches or layers must then use the same
    random numbers. `inputs`: inputs of the model besides source and labels.
    """

    def trained(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        torch.manual_seed(3)
        loss = model(**pair(), **inputs).loss
        loss.backward()
        return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}

    plain = trained(make().train())
    for each in options:
        model = make().train()
        model.gradient_checkpointing_enable(each)
        assert model.is_gradient_checkpointing
        torch.testing.assert_close(trained(model), plain)


def check_learning(model: PreTrainedModel, after_backward: Callable[[], None] = lambda: None) -> None:
    """Check that thirty steps on one batch lower the loss to less than 60%."""
    model, batch, losses = model.train(), pair(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        after_backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-5:]) < 0.6 * losses[0]


def check_padding_before_targets(case: str) -> None:
    """Check that left padding of the target changes the logits without a mask, but not if a mask excludes it."""
    model = build(case, position_embedding_type="learned")
    model.model.decoder.embeddings.positions.weight.data.zero_()
    batch, ids = source((5,)), torch.tensor([[2, 7, 9]])
    padded = torch.tensor([[1, 1, 2, 7, 9]])
    with torch.no_grad():
        alone = model(**batch, decoder_input_ids=ids).logits
        behind = model(**batch, decoder_input_ids=padded, decoder_attention_mask=(padded != 1).long()).logits
        unmasked = model(**batch, decoder_input_ids=padded).logits
    torch.testing.assert_close(behind[:, 2:], alone)
    assert not torch.allclose(unmasked[:, 2:], alone, atol=1e-2)


def check_refused(config_class: type, fields: dict[str, Any], words: list[str]) -> None:
    """Check that the config refuses these fields, with a message that contains all of these words."""
    with pytest.raises(ValueError, match=r".") as error:
        config_class(**fields)
    assert [word for word in words if word not in str(error.value)] == []


def check_masks_are_needed(case: str, words: str) -> None:
    """Check that an attention implementation without position masks (flex) is refused, with a message."""
    model = build(case)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match=words):
        model(**pair())
