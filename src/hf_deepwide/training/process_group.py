"""Leaving the group of processes when a script's work is done."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from .preemption import Interrupted


@contextmanager
def leaving_process_group() -> Iterator[None]:
    """Leave the group that several processes have formed, if any, when all of them are done or told to stop.

    A process that ends without leaving may be aborted by Gloo's threads after its work is done, and its launcher then
    reports a failure. After an error this process does not leave. The others may be waiting for it in a collective,
    and the launcher ends them only once this process has ended.
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
