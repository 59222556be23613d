"""Products with one matrix that many steps of decoding read, from a copy in the order that is the fastest here.

Two libraries multiply in PyTorch on a processor: MKL, which is made for Intel's processors, and oneDNN. For few rows,
MKL is faster with a matrix whose columns stand together, and oneDNN with one in blocks of its own.
"""

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
FEW = 2  # up to so many rows a float32 product waits for memory alone, and no copy is faster; for MKL one row more
SOME = 12  # from so many rows on a copy for MKL pays for each matrix; for fewer rows it costs what it saves
LARGE = 2**20  # a matrix of so many numbers, such as the vocabulary's, pays for its copy with fewer rows, too
AHEAD = 2**15  # a matrix of so many numbers does not stay in the processor's caches between two steps
LINE = 16  # float32 numbers that a processor fetches at once


class MatrixProduct:
    """`act(x W^T + b)` with weights that stay as they are, `[..., in]` to `[..., out]`.

    With few rows, as in decoding, a processor spends its time on reading W. A copy of W in the right order takes a
    quarter to three quarters of the time. Making the copy takes as long as several products. For a large matrix a copy
    pays where it does not for others. With one to three rows MKL reads W as it is at the speed of memory. With more,
    oneDNN's blocks of a large matrix are made in half the time of MKL's order. MKL has blocks of its own, too. They
    serve one number of rows, and sentences leave the batch.

    On other processors than Intel's, MKL reads W more slowly than the memory could give it. It reads several rows of W
    at once, a few numbers of each, and the processor cannot foresee which come next. So W is read ahead: one number of
    each cache line, in order.
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
        is_full = self.dtype == torch.float32 and weight.device.type == "cpu"
        is_large = weight.numel() >= LARGE
        if is_full and prefers_mkl():
            self.by_onednn = is_large and rows > FEW + 1 and can_pack(self.weight)
            is_turned = rows >= SOME and not self.by_onednn
            is_read_ahead = False
        else:
            self.by_onednn = not (is_full and rows <= FEW) and can_pack(self.weight)
            is_turned = is_full and is_large and not self.by_onednn
            is_read_ahead = is_full and weight.numel() >= AHEAD and not (self.by_onednn or is_turned)
        if self.by_onednn:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())
            self.multiply, self.activation = torch.ops.mkldnn._linear_pointwise.default, "relu" if relu else "none"
        elif is_turned:
            self.weight = self.weight.t().contiguous().t()
        self.ahead = self.weight[:, ::LINE] if is_read_ahead else None

    def __call__(self, x: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Multiply. Arguments that only dropped branches need (`kept`, `gates`) are None in decoding."""
        if x.dtype != self.dtype:  # under autocast: norms and residuals are float32
            x = x.to(self.dtype)
        if self.by_onednn:
            return self.multiply(x, self.weight, self.bias, self.activation, [], "")
        if self.ahead is not None:
            self.ahead.sum()  # brings W into the caches
        product = nn.functional.linear(x, self.weight, self.bias)
        return product.relu_() if self.relu else product


@functools.cache
def prefers_mkl() -> bool:
    """Whether float32 products are to be MKL's here: PyTorch has it, and the processor is one of Intel's."""
    cpuinfo = Path("/proc/cpuinfo")
    processor = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" in processor


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by such a matrix on this processor."""
    if not HAS_ONEDNN or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
