"""The dropout of the naive transcriptions: `drop` is the identity until a test sets a fixed mask, `MASK`."""

from collections.abc import Callable

import torch

MASK: Callable[[str, int], torch.Tensor] | None = None  # from kind and width to a factor for each feature


def drop(x: torch.Tensor, kind: str = "dropout") -> torch.Tensor:
    """Apply dropout to vectors `[..., D]`; `kind` is the config field with the dropout rate."""
    return x if MASK is None else x * MASK(kind, x.shape[-1])
