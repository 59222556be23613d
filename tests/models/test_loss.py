"""The loss of the translation models, against formulas written out: smoothing, counting, and skipping the logits."""

import math

import pytest
import torch
from model_cases import CASES, build, pair, source, tokens
from torch import nn

from hf_deepwide.models import loss as loss_module
from hf_deepwide.models.loss import cross_entropy, linear_cross_entropy


def naive_loss(logits, labels, eps):
    """Sum over real tokens of (1 - eps) * -log p(y) + eps/V * sum_v -log p(v), and the number of real tokens."""
    total, count = 0.0, 0
    for row, ys in zip(logits.double().tolist(), labels.tolist(), strict=True):
        for scores, y in zip(row, ys, strict=True):
            if y == -100:
                continue
            normaliser = math.log(sum(math.exp(s) for s in scores))
            total += (1 - eps) * (normaliser - scores[y]) + eps / len(scores) * sum(normaliser - s for s in scores)
            count += 1
    return total, count


def test_the_worked_number_of_the_specification():
    """Logits 2, 0, -1, 1, target 0, eps .1: .590190 (fairseq before 2021 and PyTorch), not .640190."""
    logits, labels = torch.tensor([[[2.0, 0, -1, 1]]]), torch.tensor([[0]])
    assert cross_entropy(logits, labels, 0.1).item() == pytest.approx(0.590190, abs=1e-6)
    head = nn.Linear(4, 4, bias=False)
    head.weight.data = torch.eye(4)
    assert linear_cross_entropy(logits, head, labels, 0.1).item() == pytest.approx(0.590190, abs=1e-6)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES)
def test_loss_is_the_smoothed_mean_over_real_target_tokens(case, eps):
    model, batch = build(case), pair()
    with torch.no_grad():
        out = model(**batch, label_smoothing=eps)
        chunked = model(**batch, label_smoothing=eps, skip_logits=True)
    total, count = naive_loss(out.logits, batch["labels"], eps)
    assert count == 13
    assert out.loss.item() == pytest.approx(total / count, rel=1e-5)
    assert chunked.loss.item() == pytest.approx(total / count, rel=1e-5)
    assert chunked.logits is None


@pytest.mark.parametrize("skip_logits", [False, True])
@pytest.mark.parametrize("count", [100, torch.tensor(100)], ids=["int", "tensor"])
def test_the_sum_is_divided_by_num_items_in_batch_when_given(count, skip_logits):
    """The losses of accumulation steps and devices then add up to the loss of one large batch."""
    model, batch = build("mat-3"), pair()
    with torch.no_grad():
        mean = model(**batch, skip_logits=skip_logits).loss
        assert model(**batch, skip_logits=skip_logits, num_items_in_batch=count).loss * 100 == pytest.approx(mean * 13)
        parts = [
            model(**{k: v[row : row + 1] for k, v in batch.items()}, skip_logits=skip_logits, num_items_in_batch=13)
            for row in range(3)
        ]
    assert sum(part.loss for part in parts) == pytest.approx(mean)


@pytest.mark.parametrize(("case", "chunk"), [*((case, 4) for case in CASES), ("vanilla", 512), ("mat-2-prenorm", 512)])
def test_skipping_the_logits_changes_neither_loss_nor_gradients(case, chunk, monkeypatch):
    """With several chunks, the last one not full; and with one chunk, for a head without and with a bias."""
    monkeypatch.setattr(loss_module, "CHUNK", chunk)
    results = []
    for skip_logits in (False, True):
        model = build(case).double().train()
        loss = model(**pair(), label_smoothing=0.1, skip_logits=skip_logits, num_items_in_batch=7).loss
        (3 * loss).backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert None not in results[1][1].values()
    torch.testing.assert_close(results[0], results[1], atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("frozen", ["head", "body"])
@pytest.mark.parametrize("case", ["vanilla", "mat-2-prenorm"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_its_own(case, frozen):
    """With adapters, for example, the base is frozen. The two cases have a head without and with a bias."""
    results = []
    for skip_logits in (False, True):
        model = build(case, tie_word_embeddings=False).double().train()
        for part in (model.lm_head, model.model):
            part.requires_grad_((part is model.lm_head) == (frozen == "body"))
        loss = model(**pair(), label_smoothing=0.1, skip_logits=skip_logits).loss
        loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    frozen_parts = {name for name, gradient in results[1].items() if gradient is None}
    assert frozen_parts == {name for name in results[1] if name.startswith("lm_head") == (frozen == "head")}
    torch.testing.assert_close(results[1], results[0], atol=1e-10, rtol=1e-8)


def test_a_loss_without_gradients_computes_none(monkeypatch):
    needed, forward = [], loss_module.LinearCrossEntropy.forward

    def watched(ctx, *args):
        needed.append(ctx.needs_input_grad)
        return forward(ctx, *args)

    model = build("vanilla")
    monkeypatch.setattr(loss_module.LinearCrossEntropy, "forward", staticmethod(watched))
    with torch.no_grad():
        model(**pair(), skip_logits=True)
    model(**pair(), skip_logits=True)
    assert [any(each) for each in needed] == [False, True]


def test_a_gpu_takes_the_logits_in_few_chunks():
    """On a GPU a chunk costs two dozen launches, whatever its size. On a CPU a small chunk stays near the cache."""
    assert loss_module.chunk_size(torch.device("cpu"), 32_000) == loss_module.CHUNK
    assert loss_module.chunk_size(torch.device("cuda"), 32_000) == 2097
    assert loss_module.chunk_size(torch.device("cuda"), 10**6) == loss_module.CHUNK


@pytest.mark.parametrize("bias", [False, True])
def test_skipping_the_logits_under_autocast_is_as_exact_as_keeping_them(bias):
    """Both ways use bfloat16 and stay near float32. The chunked way has at most twice the error of the other way."""
    torch.manual_seed(0)
    head = nn.Linear(32, 200, bias=bias)
    states, labels = torch.randn(4, 30, 32), torch.randint(200, (4, 30))
    labels[:, -5:] = -100

    def run(skip, dtype):
        head.zero_grad()
        hidden = states.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = (
                linear_cross_entropy(hidden, head, labels, 0.1) if skip else cross_entropy(head(hidden), labels, 0.1)
            )
        loss.backward()
        return [loss.detach(), hidden.grad, *(p.grad.clone() for p in head.parameters())]

    truth = run(False, None)
    kept, skipped = run(False, torch.bfloat16), run(True, torch.bfloat16)
    for exact, one, other in zip(truth, kept, skipped, strict=True):
        assert other.dtype == exact.dtype
        scale = exact.abs().max()
        assert (other - exact).abs().max() <= 2 * (one - exact).abs().max() + 1e-4 * scale
        assert (other - exact).abs().max() < 0.02 * scale


def test_gradients_of_the_chunked_loss_are_those_of_finite_differences():
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])
    for eps in (0.0, 0.2):
        assert torch.autograd.gradcheck(
            lambda h, w, b, e=eps: loss_module.LinearCrossEntropy.apply(h, w, b, targets, e), (hidden, weight, bias)
        )


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)], ids=["counted here", "int", "tensor"])
def test_a_batch_without_real_targets_has_no_loss_and_no_gradient(count):
    """Also if the Trainer has counted the targets of the whole step and found none."""
    for skip_logits in (False, True):
        model, batch = build("mat-3").train(), pair()
        batch["labels"].fill_(-100)
        loss = model(**batch, skip_logits=skip_logits, num_items_in_batch=count).loss
        assert loss == 0
        loss.backward()
        assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_labels_are_shifted_once_behind_the_start_token(case):
    model, batch = build(case), pair()
    shifted = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    rows = [[2] + [1 if y == -100 else y for y in row[:-1]] for row in batch["labels"].tolist()]
    assert shifted.tolist() == rows
    with torch.no_grad():
        given = model(**source(), decoder_input_ids=shifted).logits
        torch.testing.assert_close(model(**batch).logits, given)
        embeds = model.model.decoder.embed_tokens(shifted)
        from_embeds = model(**source(), decoder_inputs_embeds=embeds, labels=batch["labels"]).logits
        torch.testing.assert_close(from_embeds, given)
        loss = model(**source(), decoder_input_ids=shifted, labels=batch["labels"]).loss
        torch.testing.assert_close(model(**batch).loss, loss)


def test_without_labels_there_is_nothing_to_skip_logits_for():
    model = build("vanilla")
    with pytest.raises(ValueError, match=r"`skip_logits=True`.*`labels`"):
        model(**source(), decoder_input_ids=tokens((3, 3, 3))[0], skip_logits=True)
    with pytest.raises(ValueError, match="exactly one of `decoder_input_ids` and `decoder_inputs_embeds`"):
        model(**source())
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
        model(decoder_input_ids=tokens((3, 3, 3))[0])


def test_without_a_start_token_there_are_no_decoder_inputs():
    with pytest.raises(ValueError, match="`decoder_start_token_id` is None"):
        build("vanilla", decoder_start_token_id=None)(**pair())


@pytest.mark.parametrize("eps", [-0.1, 1.5, float("nan"), None, "0.1"])
@pytest.mark.parametrize("skip_logits", [False, True])
def test_smoothing_that_is_no_share_is_refused(eps, skip_logits):
    """PyTorch treats -0.1 and NaN as 0."""
    with pytest.raises(ValueError, match="`label_smoothing` must be a number from 0 to 1"):
        build("vanilla")(**pair(), label_smoothing=eps, skip_logits=skip_logits)
