"""Products with one matrix that many steps of decoding read, from a copy in the order that is the fastest here.

Two libraries multiply in PyTorch on a processor. MKL is made for Intel's processors, and oneDNN serves the others.
Each has an order of its own for a matrix that is read again and again.
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
HAS_MKL = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
FEW = 2  # rows with which float32 products wait for memory alone, so that blocks gain nothing
SOME = 8  # rows from which on MKL's blocks pay: for fewer rows it takes as long to make them as they can save
LARGE = 2**20  # numbers in a matrix whose transpose pays nevertheless: the vocabulary's


class MatrixProduct:
    """`act(x W^T + b)` with weights that stay as they are, `[..., in]` to `[..., out]`.

    With few rows, as in decoding, a processor spends its time on reading W. A copy of W in blocks takes a quarter to
    three quarters of the time. Making the copy takes as long as several products. For a large matrix the transpose
    pays where blocks do not. With one row or two MKL reads W as it is at the speed of memory, so no copy pays.
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
        has_mkl = is_full and prefers_mkl()
        self.by_mkl = has_mkl and rows >= SOME
        self.by_onednn = not has_mkl and not (is_full and rows <= FEW) and can_pack(self.weight)
        if self.by_mkl:
            self.blocks, self.blocks_rows = self.weight, 0
        elif self.by_onednn:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())
            self.multiply, self.activation = torch.ops.mkldnn._linear_pointwise.default, "relu" if relu else "none"
        elif is_full and weight.numel() >= LARGE and not (has_mkl and rows <= FEW):
            self.weight = self.weight.t().contiguous().t()

    def __call__(self, x: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Multiply. Arguments that only dropped branches need (`kept`, `gates`) are None in decoding."""
        if x.dtype != self.dtype:  # under autocast: norms and residuals are float32
            x = x.to(self.dtype)
        if self.by_onednn:
            return self.multiply(x, self.weight, self.bias, self.activation, [], "")
        product = self._multiply_blocks(x) if self.by_mkl else nn.functional.linear(x, self.weight, self.bias)
        return product.relu_() if self.relu else product

    def _multiply_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by MKL's blocks, which are made for one number of rows: anew when sentences have left the batch."""
        rows = x.numel() // x.shape[-1]
        if rows != self.blocks_rows:
            self.blocks = torch.ops.mkl._mkl_reorder_linear_weight(self.weight.contiguous(), rows)
            self.blocks_rows = rows
        return torch.ops.mkl._mkl_linear.default(x, self.blocks, self.weight, self.bias, rows)


@functools.cache
def prefers_mkl() -> bool:
    """Whether float32 products are MKL's here: PyTorch has it, and the processor is one of Intel's."""
    cpuinfo = Path("/proc/cpuinfo")
    told = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else platform.processor()
    return HAS_MKL and "GenuineIntel" in told


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by such a matrix on this processor."""
    if not HAS_ONEDNN or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
