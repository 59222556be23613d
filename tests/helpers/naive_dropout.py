"""Where dropout stands in the naive transcriptions: `drop` is the identity until a test puts a fixed mask there."""

from collections.abc import Callable

import torch

MASK: Callable[[str, int], torch.Tensor] | None = None  # kind and width to what each feature is multiplied by


def drop(x: torch.Tensor, kind: str = "dropout") -> torch.Tensor:
    """Dropout of vectors `[..., D]`; `kind` is the field of the config that holds its rate."""
    return x if MASK is None else x * MASK(kind, x.shape[-1])
