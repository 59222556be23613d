"""A lock that lets only one process at a time write in a folder."""

import errno
import fcntl
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from .errors import UserError

logger = logging.getLogger(__name__)

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems

_held: set[int] = set()  # descriptors of the locks of this process


@contextmanager
def locked(folder: Path, option: str = "training.output_dir") -> Iterator[None]:
    """Lock a folder, which must exist, for this process alone.

    The lock is the system's (`flock`): it ends with its process, however the process ends. It also works between
    machines if their network file system has locks. The lock file names the process that holds the lock. On a file
    system without locks, the file alone counts. The file is out of date if its process has ended, but only the same
    machine can check that.

    Args:
        folder: the folder.
        option: the option that names the folder, for the message.

    Raises:
        UserError: another process has the folder; the message names its host, its process id and its start.
    """
    path = folder / LOCK
    descriptor = _take(path, option)
    _held.add(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)
        if _is_at(path, descriptor):
            path.unlink()
        os.close(descriptor)


def _take(path: Path, option: str) -> int:
    """Lock the file at `path`, write this process into it, and return its descriptor."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is a link. Runs do not create links; remove it") from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{path} is a pipe or a device. Runs do not create them; remove it")
            _lock(descriptor, path, option)
            # The process that held the lock before may have deleted the file after we opened it. The lock on a deleted
            # file protects nothing.
            if _is_at(path, descriptor):
                own = {"host": socket.gethostname(), "pid": os.getpid(), "started": _now()}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(own).encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path, option: str) -> None:
    holder = _read(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(_in_use(path, holder, option)) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks; see that no other machine works in the folder", path.parent)
        if holder and (holder["host"] != socket.gethostname() or _is_alive(holder)):
            raise UserError(f"{_in_use(path, holder, option)}. If that process has ended, remove {path}") from error
        return
    if holder and holder["host"] != socket.gethostname():
        logger.warning(
            "%s was locked by process %d on %s (started %s), which seems to have ended; if it still runs, stop this",
            path.parent, holder["pid"], holder["host"], holder["started"],
        )  # fmt: skip


def _in_use(path: Path, holder: dict[str, Any] | None, option: str) -> str:
    who = "another process"
    if holder:
        who = f"process {holder['pid']} on {holder['host']}, which began at {holder['started']}"
    return f"{path.parent} is in use by {who}; wait for its end, or give another {option}"


def _read(descriptor: int) -> dict[str, Any] | None:
    """Return the process that holds or held the lock; None if the file does not name one."""
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
    except ValueError:
        return None
    kinds = {"host": str, "pid": int, "started": str}
    is_whole = isinstance(holder, dict) and all(isinstance(holder.get(key), kind) for key, kind in kinds.items())
    return holder if is_whole and (holder["host"] + holder["started"]).isprintable() else None


def _is_alive(holder: dict[str, Any]) -> bool:
    """Return True if the process still runs on this machine, and no later process has taken over its id."""
    try:
        process = psutil.Process(holder["pid"])
        return process.create_time() <= datetime.fromisoformat(holder["started"]).timestamp() + 1
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _give_up() -> None:
    """Close the lock's descriptor in a forked child: a worker that outlives this process must not keep the lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_give_up)
