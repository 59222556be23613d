"""Fields of a config beside those of its class, which stay with a model in every form: pruned, wider, converted."""

import copy
from typing import Any

LIMITS = ("max_length_factor", "max_length_offset")  # with which limit of length the model was scored
FIELDS = ("translation_pairs", "trained_pairs", "source_lang", "target_lang", *LIMITS)


def keep_fields(old: Any, new: Any) -> None:
    """Let a config say of languages and lengths what another config says."""
    for name in FIELDS:
        if (value := getattr(old, name, None)) is not None:
            setattr(new, name, copy.deepcopy(value))
