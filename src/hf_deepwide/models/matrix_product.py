"""Products with one matrix that many decoding steps read, from a copy in the memory order that is fastest here.

PyTorch has two libraries for products on a CPU: MKL, which is made for Intel's processors, and oneDNN. For few rows of
x, MKL is faster with a matrix in column-major order. OneDNN is faster with a matrix in its own order of blocks.
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
FEW = 2  # with at most this many rows only memory limits a float32 product, so a copy is no faster; one more for MKL
SOME = 12  # from this many rows, a copy for MKL pays off for any matrix; with fewer it costs as much as it saves
LARGE = 2**20  # for a matrix of this many numbers, such as the vocabulary's, a copy pays off with fewer rows, too
AHEAD = 2**15  # a matrix of this many numbers does not stay in the processor's caches between two steps
LINE = 16  # float32 numbers that a processor fetches at once


class MatrixProduct:
    """`act(x W^T + b)` with constant weights, `[..., in]` to `[..., out]`.

    With few rows of x, as in decoding, a processor spends its time on reading W. A product with a copy of W in the
    right order takes a quarter to three quarters of the time. Making the copy takes as long as several products, so it
    pays off earlier for large matrices. With one to three rows MKL reads the original W at the speed of memory. With
    more rows, oneDNN's blocks of a large matrix are made in half the time of MKL's order. MKL has its own blocks, too,
    but they work only for one number of rows, and sentences leave the batch.

    On processors that are not Intel's, MKL reads W more slowly than memory allows. It reads several rows of W at once,
    a few numbers of each, and the processor cannot predict the next addresses. So `__call__` first reads one number of
    each cache line, in order, which brings W into the caches.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
        dtype: torch.dtype | None = None,
        relu: bool = False,
    ) -> None:
        """Choose and make the copy of W.

        Args:
            weight: W `[out, in]`.
            bias: b `[out]`, or None.
            rows: the number of rows of x.
            dtype: dtype of the product, to which weight and bias are cast. None: the dtype of the weight.
            relu: whether act is ReLU; otherwise there is no act.
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
        """Multiply. `unused`: the arguments for dropped branches (`kept`, `gates`), which are None in decoding."""
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
    """Return whether to use MKL for float32 products: PyTorch has MKL, and the processor is from Intel."""
    cpuinfo = Path("/proc/cpuinfo")
    processor = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" in processor


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether oneDNN can multiply by this matrix (its dtype and device) on this processor."""
    if not HAS_ONEDNN or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
