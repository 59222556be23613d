"""Whether the Hub answers: asked once, before its client asks for each file again and again.

Without the internet, huggingface_hub asks for a missing file six times, with 23 seconds of pauses. Transformers looks
for eight files of a model. A mistyped name thus took three minutes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import get_session

TRIES, PAUSE = 2, 1.0  # a name server may fail once; seconds between two tries
_http = import_module(HTTPError.__module__.partition(".")[0])  # huggingface_hub's library: httpx, or httpx2 since 2.0
NO_WAY = (_http.ConnectError, _http.ConnectTimeout, _http.ProxyError)  # a slow answer is none of these


@contextmanager
def offline_where_unreachable() -> Iterator[None]:
    """Set the Hub's offline mode while this is open, if no connection to the Hub is to be had.

    What the cache holds is then loaded, and what it lacks is missed at once. A slow connection is a connection.
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


@cache  # a call that raised is not remembered: the next model is looked for anew
def _reach(endpoint: str) -> None:
    """Connect to the Hub; any answer will do.

    Raises:
        HTTPError: one of `NO_WAY`.
    """
    try:
        get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except NO_WAY:
        raise
    except HTTPError:
        return  # an answer that is late or broken is for huggingface_hub to ask for again
