"""Additional config fields that a model keeps when it is pruned, widened or converted."""

import copy
from typing import Any

LIMITS = ("max_length_factor", "max_length_offset")  # the length limit with which the model was scored
FIELDS = ("translation_pairs", "trained_pairs", "source_lang", "target_lang", *LIMITS)


def keep_fields(old: Any, new: Any) -> None:
    """Copy the fields about languages and lengths that the config `old` sets to the config `new`."""
    for name in FIELDS:
        if (value := getattr(old, name, None)) is not None:
            setattr(new, name, copy.deepcopy(value))
