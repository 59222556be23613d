"""Products with one matrix that many steps of decoding read, from a copy in the order that is the fastest here."""

from typing import Any

import torch
from torch import nn

HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class MatrixProduct:
    """`x W^T + b` with weights that stay as they are, `[..., in]` to `[..., out]`.

    With few rows, as in decoding, a processor spends its time on reading W. oneDNN reads a copy of W in blocks, which
    takes a quarter to three quarters of the time. Making the copy takes as long as a few products.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None) -> None:
        """`weight` is W `[out, in]`, `bias` is b `[out]`; `dtype` is what they are cast to, None leaves them."""
        self.dtype = weight.dtype if dtype is None else dtype
        self.weight, self.bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        self.is_packed = can_pack(self.weight)
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous())
            self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, **unused: Any) -> torch.Tensor:
        """Multiply. Arguments that only dropped branches need (`kept`, `gates`) are None in decoding."""
        if x.dtype != self.dtype:  # under autocast: norms and residuals are float32
            x = x.to(self.dtype)
        if self.is_packed:
            return self.multiply(x, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(x, self.weight, self.bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by such a matrix on this processor."""
    if not HAS_ONEDNN or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
