"""The name of the cache in Transformers: `cache` since 5.24, and `past_key_values` before.

Our models take both names in every version, and give the cache back under the name of the version that runs. Inside,
it is `past_key_values`.
"""

import dataclasses
import warnings
from typing import Any

from transformers.modeling_outputs import Seq2SeqLMOutput

OLD_NAME, NEW_NAME = CACHE_NAMES = ("past_key_values", "cache")
CACHE_NAME = NEW_NAME if NEW_NAME in {each.name for each in dataclasses.fields(Seq2SeqLMOutput)} else OLD_NAME


def given_cache(past_key_values: Any, cache: Any) -> Any:
    """The cache that a caller has given by one of its names, or None.

    The old name warns if the Transformers that is installed has the new one.

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
    """Arguments of a call, with the cache named `past_key_values`."""
    return {OLD_NAME if name == NEW_NAME else name: value for name, value in arguments.items()}


def with_cache(cache: Any) -> dict[str, Any]:
    """The cache as a keyword argument of Transformers."""
    return {CACHE_NAME: cache}
