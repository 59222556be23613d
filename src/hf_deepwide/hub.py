"""Whether a name can be on the Hub, and whether the Hub can be reached.

The Hub is tried once, before its client asks for each file several times. Without the internet, huggingface_hub asks
for a missing file six times, with 23 seconds of pauses. Transformers looks for eight files of a model. So a mistyped
name would take three minutes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import get_session, validate_repo_id

TRIES, PAUSE = 2, 1.0  # a name server may fail once; seconds between two tries
_http = import_module(HTTPError.__module__.partition(".")[0])  # huggingface_hub's library: httpx, or httpx2 since 2.0
NO_WAY = (_http.ConnectError, _http.ConnectTimeout, _http.ProxyError)  # a slow answer is none of these


@contextmanager
def offline_where_unreachable() -> Iterator[None]:
    """Set the Hub's offline mode within the block if no connection to the Hub is possible.

    Files in the cache are then loaded, and other files are reported as missing at once. A slow connection counts as a
    connection.
    """
    if constants.HF_HUB_OFFLINE or _is_reachable():
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _is_reachable() -> bool:
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE)
        try:
            _reach(constants.ENDPOINT)
        except NO_WAY:
            continue
        return True
    return False


@cache  # a call that raised is not cached, so the next model tries again
def _reach(endpoint: str) -> None:
    """Connect to the Hub; any answer counts.

    Raises:
        HTTPError: one of `NO_WAY`.
    """
    try:
        get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except NO_WAY:
        raise
    except HTTPError:
        return  # the answer was late or broken: huggingface_hub itself tries again


def is_on_hub(name: str) -> bool:
    """Return True if a name can be a repository on the Hub: neither the name nor its first part is a local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    namespace = name.rpartition("/")[0]
    return not Path(name).exists() and not (namespace and Path(namespace).exists())
