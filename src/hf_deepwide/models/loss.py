"""Cross-entropy over the vocabulary, with label smoothing, per target token.

    loss = 1/n sum over n real tokens of  (1 - eps) * -log p(target) + eps/V * sum_v -log p(v)

There are two functions: one takes logits. The other takes hidden states, and never holds the logits of all tokens.
"""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable

LOG2_E = math.log2(math.e)
CHUNK = 512  # tokens per chunk of logits: enough for full GEMM speed, few enough to stay near a CPU's cache
GPU_LOGITS = 2**26  # logits per chunk on a GPU, 256 MiB in float32: there each chunk costs two dozen launches


def token_count(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """Return the divisor of the summed loss: the given count, or the number of labels that are not -100; at least 1.

    The count can be 0: for a masked language model, if no token in a step's batches was drawn for masking.
    """
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        return num_items_in_batch.to(labels.device).clamp(min=1)
    return max(num_items_in_batch, 1)


def check_smoothing(label_smoothing: float) -> None:
    """Check that `label_smoothing` is from 0 to 1; PyTorch would treat a negative number, and NaN, as 0.

    Raises:
        ValueError: it is not a number from 0 to 1.
    """
    if not (isinstance(label_smoothing, float | int) and 0 <= label_smoothing <= 1):
        raise ValueError(f"`label_smoothing` must be a number from 0 to 1, got {str(label_smoothing)[:40]!r}")


def check_skip(skip_logits: bool, labels: torch.Tensor | None) -> None:
    """Raise a ValueError for `skip_logits` without `labels`: there would be nothing to return."""
    if skip_logits and labels is None:
        raise ValueError("`skip_logits=True` leaves nothing to return without `labels`")


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Compute the loss of logits `[batch, time, V]` in float32 or better; labels `[batch, time]`, -100: ignored."""
    check_smoothing(label_smoothing)
    labels = labels.to(logits.device)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
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
    """Return the loss of `cross_entropy`, from hidden states `[batch, time, D]` and the output projection `[V, D]`.

    `torch.nn.functional.linear_cross_entropy` of PyTorch 2.13 computes in chunks only without label smoothing.
    """
    check_smoothing(label_smoothing)
    labels = labels.to(hidden_states.device)
    real = labels != -100
    factors = hidden_states[real], lm_head.weight, lm_head.bias
    if not torch.is_grad_enabled():  # `needs_input_grad` ignores `no_grad`
        factors = [None if each is None else each.detach() for each in factors]
    total = LinearCrossEntropy.apply(*factors, labels[real], label_smoothing)
    return total / token_count(labels, num_items_in_batch)


def chunk_size(device: torch.device, vocabulary: int) -> int:
    """Return the number of tokens per chunk, whose logits exist at the same time."""
    return CHUNK if device.type == "cpu" else max(CHUNK, GPU_LOGITS // vocabulary)


class LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits h W^T + b. The forward pass also computes the gradients, chunk by chunk.

    With p = softmax(logits) and y the one-hot target, the gradient with respect to the logits is
    p - (1 - eps) y - eps/V. Only p needs products over the vocabulary. The other two terms have closed forms: rows of
    W at the targets, and the sum of all rows. Matrix products run in the autocast type, everything else in float32.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Sum the loss of `n` tokens: hidden `[n, D]`, weight `[V, D]`, bias `[V]` or None, targets `[n]`."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        full = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = grad_weight = grad_bias = None
        vocabulary = weight.shape[0]
        with torch.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            row_sum = weight.to(full).sum(0)
            bias_sum = 0.0 if bias is None else bias.to(full).sum()
            total = torch.zeros((), dtype=full, device=hidden.device)
            if needs_hidden:
                grad_hidden = torch.empty_like(hidden, dtype=full)
            if needs_weight:
                grad_weight = torch.zeros_like(weight, dtype=full)
            if needs_bias:
                grad_bias = torch.zeros_like(bias, dtype=full)
            chunk = chunk_size(hidden.device, vocabulary)
            for start in range(0, hidden.shape[0], chunk):
                here = slice(start, start + chunk)
                h, target = hidden[here].to(dtype), targets[here]
                logits = nn.functional.linear(h, matrix, offset).to(full)
                at_target = logits.gather(1, target[:, None])[:, 0]
                largest = logits.amax(-1, keepdim=True)
                p = logits.sub_(largest).mul_(LOG2_E).exp2_()  # in place; MKL's exp is slow on AMD
                z = p.sum(-1, keepdim=True)
                log_z = (largest + z.log())[:, 0]
                mean_logit = (hidden[here].to(full) @ row_sum + bias_sum) / vocabulary
                total += (log_z - (1 - eps) * at_target - eps * mean_logit).sum()
                if not any(ctx.needs_input_grad):
                    continue
                p /= z
                if needs_bias:
                    grad_bias += p.sum(0)
                p = p.to(dtype)
                if needs_hidden:
                    smooth = (1 - eps) * weight[target] + eps / vocabulary * row_sum
                    grad_hidden[here] = (p @ matrix).to(full) - smooth
                if needs_weight:
                    grad_weight += p.T @ h
            if needs_weight:
                tokens = hidden.to(full)
                grad_weight -= eps / vocabulary * tokens.sum(0)
                grad_weight.index_add_(0, targets, tokens, alpha=-(1 - eps))
            if needs_bias:
                counts = torch.bincount(targets, minlength=vocabulary).to(full)
                grad_bias -= (1 - eps) * counts + eps / vocabulary * len(targets)
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
            ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        """Scale the gradients that the forward pass has computed."""
        hidden_dtype, weight_dtype = ctx.dtypes
        dtypes = hidden_dtype, weight_dtype, weight_dtype
        gradients = (
            None if each is None else (each * grad).to(dtype)
            for each, dtype in zip(ctx.saved_tensors, dtypes, strict=True)
        )
        return (*gradients, None, None)
