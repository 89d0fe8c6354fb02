"""Exclusive locks between processes: a lock file that names its owner, held through the operating system's file lock.

The system releases the lock when the owner dies. On file systems without locks, and for owners on other hosts, the
owner's record in the file decides.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import whole

LOCK_FILE = ".lock"
_START_TOLERANCE_S = 2.0  # process starts are counted in clock ticks, the boot time in seconds
_POLL_S = 0.05
_STALE_S = 24 * 3600.0
"""A run on another host that wrote nothing for this long was killed: training logs much more often."""

_OWNER_AT = 1 if sys.platform == "win32" else 0
"""Offset of the owner record: on Windows other processes cannot read the first byte, which filelock locks."""


class LockedError(ArtifactError):
    """Another process holds the lock, or may hold it (on another host, which cannot be checked).

    Args:
        held: the operating system reports the lock as held, not only the owner record.
    """

    def __init__(self, message: str, *, held: bool) -> None:
        super().__init__(message)
        self.held = held


def lock_folder(folder: Path, work: str) -> contextlib.AbstractContextManager[None]:
    """Lock a folder for ``work``; a lock whose owner is dead is taken over.

    Raises:
        LockedError: another process holds the lock; the message names it.
        ArtifactError: the folder cannot be written.
    """
    return _hold(folder / LOCK_FILE, folder, work)


def lock_path(path: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a path that this process creates or replaces; the path need not exist, its lock file is a sibling.

    Raises:
        LockedError: another process holds the lock; the message names it.
        ArtifactError: the parent folder cannot be written.
    """
    return _hold(whole(path).with_name(f".{whole(path).name}{LOCK_FILE}"), path, "is being replaced")


@contextlib.contextmanager
def wait_for_lock(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """Lock a path as :func:`lock_path` does, but wait up to ``seconds`` for another process of this host.

    Raises:
        LockedError: another process still holds the lock after that time, or may hold it on another host.
        ArtifactError: the parent folder cannot be written.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_path(path))
                break
            except LockedError as error:
                if not error.held or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
        yield


def has_live_owner(folder: Path) -> bool:
    """Return whether a live process works in ``folder``, from its owner record; takes no lock.

    For display only. A process on another host counts as alive while a file in the folder is younger than a day.
    """
    owner = _read_owner_file(folder)
    if not _is_alive(owner):
        return False
    if _is_local(owner):
        return True
    times = [0.0]
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # deleted in the meantime
            times.append(file.stat().st_mtime)
    return max(times) > time.time() - _STALE_S


def remote_owner(folder: Path) -> str | None:
    """Return "HOST, since TIME" for an owner on another host; None without an owner or for one on this host."""
    owner = _read_owner_file(folder)
    return None if not owner or _is_local(owner) else f"{owner.get('host')}, since {owner.get('since')}"


def _read_owner_file(folder: Path) -> dict[str, Any]:
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:
        return {}
    try:
        return _read_owner(handle)
    finally:
        os.close(handle)


def _read_owner(handle: int) -> dict[str, Any]:
    os.lseek(handle, _OWNER_AT, os.SEEK_SET)
    try:
        owner = json.loads(os.read(handle, 4096))
    except ValueError:  # empty: the owner was killed before it wrote its record
        return {}
    return owner if isinstance(owner, dict) else {}


@contextlib.contextmanager
def _hold(file: Path, subject: Path, work: str) -> Iterator[None]:
    handle = _acquire(file, subject, work)
    try:
        yield
    finally:
        # Remove the file before the lock is released, or another process could take it in between. Windows cannot
        # remove an open file.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            file.unlink()
        os.close(handle)


def _acquire(file: Path, subject: Path, work: str) -> int:
    """Take the lock and write the owner record; returns the open file. ``subject`` and ``work`` are for messages."""
    from edgeformer.system.host import now  # imports psutil (20 ms), which readers of a bundle do not need

    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            problem = f"cannot be written, because {file.parent} cannot ({error.strerror})"
            raise ArtifactError(f"{subject}: {problem}; allow it, or work on a copy elsewhere") from None
        try:
            held = _is_held(handle)
            owner = _read_owner(handle)
            is_self = _is_local(owner) and owner.get("pid") == os.getpid()
            if held or (not is_self and _is_alive(owner)):
                name = "another process"
                if owner:
                    name = f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
                remedy = "stop it first" if held else f"stop it first; if it is gone, remove {file}"
                raise LockedError(f"{subject}: {work} by {name}; wait for it, or {remedy}", held=held)
            try:
                is_current = os.path.samestat(os.fstat(handle), file.stat())
            except FileNotFoundError:
                is_current = False
            if not is_current:  # the previous owner removed the file after this process opened it
                os.close(handle)
                continue
            record = {"pid": os.getpid(), "host": platform.node(), "process_started": _start_time(os.getpid())}
            os.ftruncate(handle, 0)
            os.lseek(handle, _OWNER_AT, os.SEEK_SET)
            os.write(handle, json.dumps({**record, "since": now()}).encode())
        except BaseException:
            os.close(handle)
            raise
        return handle


def _is_held(handle: int) -> bool:
    """Take the operating system's lock; return True if another process holds it."""
    from filelock import lock_descriptor  # import takes 10 ms

    # filelock.FileLock leaves the file behind and cannot name an owner on file systems without locks.
    try:
        return not lock_descriptor(handle, blocking=False)
    except OSError as error:
        # On a file system without locks the owner record decides.
        return error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def _is_local(owner: dict[str, Any]) -> bool:
    return bool(owner.get("host") == platform.node())


def _is_alive(owner: dict[str, Any]) -> bool:
    """Return whether the process of an owner record runs; one on another host counts as running."""
    if not owner:
        return False
    if not _is_local(owner):  # includes other containers, where many processes have PID 1
        return True
    import psutil

    try:
        return abs(_start_time(int(owner["pid"])) - float(owner["process_started"])) < _START_TOLERANCE_S
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _start_time(pid: int) -> float:
    """Return a process's start in seconds, independent of later changes of the clock."""
    import psutil

    # Linux counts from the boot, and psutil adds the boot's time by the present clock.
    return psutil.Process(pid).create_time() - (psutil.boot_time() if psutil.LINUX else 0.0)
