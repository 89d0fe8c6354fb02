"""One process at a time: a lock file that names its owner, and that the system holds for as long as the owner lives."""

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
_SAME_START_S = 2.0  # processes start at whole clock ticks, and a boot's moment is known to the second
_TURN_S = 0.05
_SILENT_S = 24 * 3600.0
"""A run on another host that wrote nothing for so long was killed: training logs much more often."""

_OWNER_AT = 1 if sys.platform == "win32" else 0
"""Where the owner's name begins: Windows lets no other process read the first byte, which filelock locks."""


class LockedError(ArtifactError):
    """Another process has it, or may have it: on another host nobody can know.

    Args:
        held: the system says so, not only what the owner left in the file.
    """

    def __init__(self, message: str, *, held: bool) -> None:
        super().__init__(message)
        self.held = held


def locked(folder: Path, work: str) -> contextlib.AbstractContextManager[None]:
    """Be the only process that does ``work`` in ``folder``; a lock whose owner is dead is taken over.

    Raises:
        LockedError: another process does it; the message names it.
        ArtifactError: the folder cannot be written.
    """
    return _held(folder / LOCK_FILE, folder, work)


def claiming(path: Path) -> contextlib.AbstractContextManager[None]:
    """Be the only process that makes or replaces ``path``, which need not be there: the lock lies beside it.

    Raises:
        LockedError: another process does; the message names it.
        ArtifactError: the folder around it cannot be written.
    """
    return _held(whole(path).with_name(f".{whole(path).name}{LOCK_FILE}"), path, "is being replaced")


@contextlib.contextmanager
def in_turn(path: Path, seconds: float = 30.0) -> Iterator[None]:
    """As :func:`claiming`, for what takes a moment: another process of this host is waited for, but not for ever.

    Args:
        path: what is made or replaced.
        seconds: how long is waited at most.

    Raises:
        LockedError: another process still has it then, or may have it on another host.
        ArtifactError: the folder around it cannot be written.
    """
    until = time.monotonic() + seconds
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(claiming(path))
                break
            except LockedError as error:
                if not error.held or time.monotonic() > until:
                    raise
            time.sleep(_TURN_S)
        yield


def owned(folder: Path) -> bool:
    """Whether a living process works in ``folder``, by what its lock file says; nothing is locked to find out.

    A process on another host counts as alive for as long as some file in the folder is not older than a day: nobody
    here can know. Only what is shown goes by that; no lock is taken over for it.
    """
    owner = _owner(folder)
    return _lives(owner) and (_is_here(owner) or _written(folder) > time.time() - _SILENT_S)


def owner_elsewhere(folder: Path) -> str | None:
    """The host whose process works in ``folder``, and since when; None: nobody does, or a process of this host."""
    owner = _owner(folder)
    return None if not owner or _is_here(owner) else f"{owner.get('host')}, since {owner.get('since')}"


def _owner(folder: Path) -> dict[str, Any]:
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError:
        return {}
    try:
        return _read(handle)
    finally:
        os.close(handle)


def _is_here(owner: dict[str, Any]) -> bool:
    return bool(owner.get("host") == platform.node())


def _written(folder: Path) -> float:
    """When a file in a folder was last written, in seconds."""
    times = [0.0]
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # it is gone by now
            times.append(file.stat().st_mtime)
    return max(times)


@contextlib.contextmanager
def _held(file: Path, what: Path, work: str) -> Iterator[None]:
    handle = _acquire(file, what, work)
    try:
        yield
    finally:
        # While it is held, or another process could have it between the two; Windows removes no open file.
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            file.unlink()
        os.close(handle)


def _acquire(path: Path, what: Path, work: str) -> int:
    from edgeformer.system.host import now  # imports psutil, see _started

    while True:
        handle = _opened(path, what)
        try:
            held = _is_held(handle)
            owner = _read(handle)
            if held or _lives_elsewhere(owner):
                raise LockedError(_refusal(path, what, owner, work, held), held=held)
            if not _is_at(handle, path):  # its owner removed it after we opened it
                os.close(handle)
                continue
            me = {"pid": os.getpid(), "host": platform.node(), "process_started": _started(os.getpid())}
            os.ftruncate(handle, 0)
            os.lseek(handle, _OWNER_AT, os.SEEK_SET)
            os.write(handle, json.dumps({**me, "since": now()}).encode())
        except BaseException:
            os.close(handle)
            raise
        return handle


def _opened(path: Path, what: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        problem = f"cannot be written, because {path.parent} cannot ({error.strerror})"
        raise ArtifactError(f"{what}: {problem}; allow it, or work on a copy elsewhere") from None


def _is_held(handle: int) -> bool:
    """Take the system's lock; True where another process has it."""
    from filelock import lock_descriptor  # takes 10 ms, see _started

    # Not its FileLock: that leaves the file behind, and cannot say who has it where a file system knows no locks.
    try:
        return not lock_descriptor(handle, blocking=False)
    except OSError as error:
        # A file system without locks leaves what the file says of its owner.
        return error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def _read(handle: int) -> dict[str, Any]:
    os.lseek(handle, _OWNER_AT, os.SEEK_SET)
    try:
        found = json.loads(os.read(handle, 4096))
    except ValueError:  # empty: its owner was killed before it wrote its name
        return {}
    return found if isinstance(found, dict) else {}


def _lives_elsewhere(owner: dict[str, Any]) -> bool:
    """Whether the process that the file names is another one, and alive."""
    mine = owner.get("host") == platform.node() and owner.get("pid") == os.getpid()
    return not mine and _lives(owner)


def _lives(owner: dict[str, Any]) -> bool:
    """Whether the process that the file names is alive; on another host nobody here can know."""
    if not owner:
        return False
    if not _is_here(owner):  # in containers, which have a name each, many are process 1
        return True
    import psutil

    try:
        return abs(_started(int(owner["pid"])) - float(owner["process_started"])) < _SAME_START_S
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _started(pid: int) -> float:
    """Seconds, the same at every call of every process, also after the clock was set."""
    import psutil  # here: it takes 20 ms, and who only reads a bundle locks nothing

    # Linux counts from the boot, and psutil adds the boot's moment by the clock as it stands now.
    return psutil.Process(pid).create_time() - (psutil.boot_time() if psutil.LINUX else 0.0)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _refusal(path: Path, what: Path, owner: dict[str, Any], work: str, held: bool) -> str:
    name = "another process"
    if owner:
        name = f"process {owner.get('pid')} on {owner.get('host')}, since {owner.get('since')}"
    remedy = "stop it first" if held else f"stop it first; if it is gone, remove {path}"
    return f"{what}: {work} by {name}; wait for it, or {remedy}"
