"""One process at a time in a folder that is written."""

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
    """Keep a folder for this process alone; it must exist.

    The lock is the system's (`flock`): it ends with its process, however the process ends. It also holds between
    machines if their network file system has locks. The file says who holds the lock. Where a file system has no
    locks, the file alone counts. It is out of date if its process has ended, which only the same machine can know.

    Args:
        folder: the folder.
        option: what names it, for the message.

    Raises:
        UserError: another process has the folder; names its host, its number and its start.
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
    """The descriptor of the lock that is at the path, and ours."""
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
            # Whoever held the lock before may have deleted the file after we opened it: then it protects nothing.
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
            "%s: process %d on %s, of %s, left the folder locked and is taken to have ended",
            path.parent, holder["pid"], holder["host"], holder["started"],
        )  # fmt: skip


def _in_use(path: Path, holder: dict[str, Any] | None, option: str) -> str:
    who = "another process"
    if holder:
        who = f"process {holder['pid']} on {holder['host']}, which began at {holder['started']}"
    return f"{path.parent} is in use by {who}; wait for its end, or give another {option}"


def _read(descriptor: int) -> dict[str, Any] | None:
    """Who holds the lock or held it, if the file says so."""
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
    except ValueError:
        return None
    kinds = {"host": str, "pid": int, "started": str}
    is_whole = isinstance(holder, dict) and all(isinstance(holder.get(key), kind) for key, kind in kinds.items())
    return holder if is_whole and (holder["host"] + holder["started"]).isprintable() else None


def _is_alive(holder: dict[str, Any]) -> bool:
    """True if the process still runs on this machine, and is not a later one with the same number."""
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
    """Release the lock in a child that was forked: a worker may outlive this process."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_give_up)
