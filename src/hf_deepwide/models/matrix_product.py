"""Products with one matrix that many steps of decoding read, from a copy in the order that is the fastest here."""

import functools
import time
from typing import Any

import torch
from torch import nn

HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
FEW = 2  # rows with which float32 products wait for memory alone, so that blocks gain nothing
LARGE = 2**20  # numbers in a matrix whose transpose pays nevertheless: the vocabulary's


class MatrixProduct:
    """`act(x W^T + b)` with weights that stay as they are, `[..., in]` to `[..., out]`.

    With few rows, as in decoding, a processor spends its time on reading W. oneDNN reads a copy of W in blocks, which
    takes a quarter to three quarters of the time. Making the copy takes as long as several products. With one row or
    two a copy pays for a large matrix alone. It is then the transpose, on processors that read it faster.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
        dtype: torch.dtype | None = None,
        relu: bool = False,
    ) -> None:
        """Choose the copy.

        Args:
            weight: W `[out, in]`.
            bias: b `[out]`, or None.
            rows: how many rows x will have.
            dtype: what weight and bias are cast to; None leaves them.
            relu: whether act is ReLU; otherwise there is none.
        """
        self.dtype, self.relu = weight.dtype if dtype is None else dtype, relu
        self.weight, self.bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        is_single = rows <= FEW and self.dtype == torch.float32
        is_large = weight.device.type == "cpu" and weight.numel() >= LARGE
        self.is_packed = not is_single and can_pack(self.weight)
        self.is_transposed = is_single and is_large and reads_transposes_faster()
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())
            self.multiply, self.activation = torch.ops.mkldnn._linear_pointwise.default, "relu" if relu else "none"
        elif self.is_transposed:
            self.weight = self.weight.t().contiguous().t()

    def __call__(self, x: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Multiply. Arguments that only dropped branches need (`kept`, `gates`) are None in decoding."""
        if x.dtype != self.dtype:  # under autocast: norms and residuals are float32
            x = x.to(self.dtype)
        if self.is_packed:
            return self.multiply(x, self.weight, self.bias, self.activation, [], "")
        product = nn.functional.linear(x, self.weight, self.bias)
        return product.relu_() if self.relu else product


@functools.cache
def reads_transposes_faster() -> bool:
    """Whether this processor multiplies one row by a transposed matrix in two thirds of the time, or less.

    Both ways read the same numbers. PyTorch's library reads them at the speed of memory on some processors, and on
    others in one of the two orders alone. This is measured once in a process, and takes a few milliseconds.
    """
    matrix, row = torch.ones(1024, LARGE // 1024), torch.ones(1, LARGE // 1024)
    as_it_is, transposed = (shortest_time(row, each) for each in (matrix, matrix.t().contiguous().t()))
    return transposed * 3 < as_it_is * 2


def shortest_time(row: torch.Tensor, matrix: torch.Tensor) -> float:
    """Seconds of the fastest of several products."""
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        nn.functional.linear(row, matrix)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by such a matrix on this processor."""
    if not HAS_ONEDNN or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
