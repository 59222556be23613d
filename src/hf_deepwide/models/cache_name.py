"""The name of the cache in Transformers: `cache` since 5.24, and `past_key_values` before.

The models of this library accept both names in every version. They return the cache under the name of the installed
version. Inside the library the name is `past_key_values`.
"""

import dataclasses
import warnings
from typing import Any

from transformers.modeling_outputs import Seq2SeqLMOutput

OLD_NAME, NEW_NAME = CACHE_NAMES = ("past_key_values", "cache")
CACHE_NAME = NEW_NAME if NEW_NAME in {each.name for each in dataclasses.fields(Seq2SeqLMOutput)} else OLD_NAME


def given_cache(past_key_values: Any, cache: Any) -> Any:
    """Return the cache that a caller passed under one of its two names, or None.

    Warn about the old name if the installed version of Transformers has the new name.

    Raises:
        ValueError: both are given.
    """
    if past_key_values is not None and cache is not None:
        raise ValueError("`past_key_values` and `cache` are two names of one argument; give one of them")
    if past_key_values is None:
        return cache
    if CACHE_NAME != OLD_NAME:
        warnings.warn(f"`{OLD_NAME}` is deprecated; use `{NEW_NAME}` instead", FutureWarning, stacklevel=3)
    return past_key_values


def with_old_name(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with the cache named `past_key_values`."""
    return {OLD_NAME if name == NEW_NAME else name: value for name, value in arguments.items()}


def with_cache(cache: Any) -> dict[str, Any]:
    """Return the cache as a keyword argument for Transformers."""
    return {CACHE_NAME: cache}
