"""Leaving the process group when a script's work is done."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .preemption import Interrupted


@contextmanager
def leaving_process_group() -> Iterator[None]:
    """Leave the process group, if there is one, when all processes are done or stopped by a signal.

    A process that ends without leaving may be aborted by Gloo's threads after its work is done, and its launcher then
    reports a failure. After an error this process does not leave. The other processes may be waiting for it in a
    collective, and the launcher ends them only after this process has ended.
    """
    try:
        yield
    except Interrupted:
        _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
