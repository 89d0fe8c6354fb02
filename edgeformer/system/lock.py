"""Exclusive locks between processes: a lock file that names its owner, held through the operating system's file lock.

The system releases the lock when the owner dies. On file systems without locks, and for owners on other hosts, the
owner's record in the file decides.
"""

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
"""Seconds without a write after which a run on another host counts as killed: training logs far more often."""

_OWNER_AT = 1 if sys.platform == "win32" else 0
"""Offset of the owner record: on Windows other processes cannot read the first byte, which filelock locks."""


class LockedError(ArtifactError):
    """Another process holds the lock, or may hold it (on another host, which cannot be checked)."""


def lock_path(path: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a path that this process replaces, by a lock file in the same folder. Raises as :func:`lock_folder` does."""
    return _lock(whole(path).with_name(f".{whole(path).name}{LOCK_FILE}"), path, "is being replaced")


def lock_folder(folder: Path, work: str) -> contextlib.AbstractContextManager[None]:
    """Lock a folder for ``work``; a lock whose owner is dead is taken over.

    Raises LockedError, which names the process that holds the lock, or ArtifactError: the folder cannot be written.
    """
    return _lock(folder / LOCK_FILE, folder, work)


@contextlib.contextmanager
def wait_for_lock(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """Lock a path and raise as :func:`lock_path` does, but wait up to ``seconds`` for another process."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lock_path(path))
                break
            except LockedError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)
        yield


def has_live_owner(folder: Path) -> bool:
    """Return for display, without a lock, whether a live process works in ``folder``, from its owner record.

    A process on another host counts as alive while a file in the folder is younger than a day.
    """
    owner = _read_owner(folder / LOCK_FILE)
    if not _is_alive(owner):
        return False
    times = [time.time() if owner.get("host") == platform.node() else 0.0]
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # deleted in the meantime
            times.append(file.stat().st_mtime)
    return max(times) > time.time() - _STALE_S


def _read_owner(file: Path) -> dict[str, Any]:
    """Return the owner record; empty without a file, or if the owner was killed before it wrote its record."""
    try:
        with file.open("rb") as opened:
            opened.seek(_OWNER_AT)
            owner = json.loads(opened.read(4096))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


@contextlib.contextmanager
def _lock(file: Path, subject: Path, work: str) -> Iterator[None]:
    """Take the lock and write the owner record. ``subject`` and ``work`` are for messages."""
    from filelock import lock_descriptor  # import takes 10 ms

    from edgeformer.system.host import now  # imports psutil (20 ms), which readers of a bundle do not need

    while True:
        # 1. Take the lock of the file
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            problem = f"cannot be written, because {file.parent} is not writable ({error.strerror})"
            raise ArtifactError(f"{subject}: {problem}; change the permissions, or work on a copy") from None
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, handle)
            try:
                # filelock.FileLock leaves the file behind and cannot name an owner on file systems without locks.
                is_locked = not lock_descriptor(handle, blocking=False)
            except OSError as error:  # on a file system without locks the owner record decides
                is_locked = error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
            try:
                is_current = os.path.samestat(os.fstat(handle), file.stat())
            except FileNotFoundError:
                is_current = False
            if not is_current:  # the previous owner removed the file after this process opened it
                continue
            # 2. Respect a live owner
            owner = _read_owner(file)
            is_self = (owner.get("host"), owner.get("pid")) == (platform.node(), os.getpid())
            if is_locked or (not is_self and _is_alive(owner)):
                name = "another process"
                if owner:
                    name = f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
                remedy = "stop it first" if is_locked else f"stop it first; if it is gone, remove {file}"
                raise LockedError(f"{subject}: {work} by {name}; wait for it, or {remedy}")
            # 3. Be the owner
            record = {"pid": os.getpid(), "host": platform.node(), "process_started": _start_time(os.getpid())}
            os.ftruncate(handle, 0)
            os.lseek(handle, _OWNER_AT, os.SEEK_SET)
            os.write(handle, json.dumps({**record, "since": now()}).encode())
            try:
                yield
            finally:
                # Remove the file before the lock is released, or another process could take it in between. Windows
                # cannot remove an open file.
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, 0)
                    file.unlink()
            return


def _is_alive(owner: dict[str, Any]) -> bool:
    """Return whether the process of an owner record runs; one on another host counts as running."""
    if not owner:
        return False
    if owner.get("host") != platform.node():  # includes other containers, where many processes have PID 1
        return True
    import psutil

    try:
        return abs(_start_time(int(owner["pid"])) - float(owner["process_started"])) < _START_TOLERANCE_S
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _start_time(pid: int) -> float:
    """Return a process's start in seconds, independent of later changes of the clock. Raises psutil.NoSuchProcess."""
    import psutil

    if not psutil.LINUX:
        return psutil.Process(pid).create_time()
    # psutil adds the boot's time by the present clock, which Android does not show.
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
