"""A folder that one process at a time replaces; and what is done about those that were killed while they did."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from edgeformer.formats.errors import InputError
from edgeformer.formats.files import ASIDE, TEMPORARY

_OWNER_BYTES = 64
_SWAP_S = 5.0
"""How long a reader waits for a living process that is between two renames, which takes it some microseconds."""


class ClaimedError(InputError):
    """Another process, which is alive, is replacing it."""


@contextmanager
def claiming(path: Path) -> Iterator[None]:
    """Keep other processes from replacing ``path``. The system ends the claim of a process that dies, however it dies.

    Raises:
        ClaimedError: another process is replacing it.
    """
    lock = path.with_name(f".{path.name}.lock")
    with _locked(lock, path) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()}".encode())
        file.flush()
        try:
            yield
        finally:
            # Windows deletes nothing that is open: there the file stays, and the next process takes it over.
            with suppress(PermissionError):
                lock.unlink(missing_ok=True)


def restore_folder(path: Path) -> None:
    """Put back what :func:`~edgeformer.formats.files.replacing_folder` had moved aside when its process was killed.

    Nothing is done where ``path`` is there, or nothing is aside.

    Raises:
        OSError: it cannot be put back, in a folder that cannot be written for instance.
    """
    if path.exists() or not any(_set_aside(path)):
        return
    try:
        with claiming(path):
            _put_back(path)
    except ClaimedError:
        deadline = time.monotonic() + _SWAP_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def remove_leftovers(path: Path) -> None:
    """Put back or delete what killed processes left of replacing ``path``; for the process that claims it.

    Raises:
        OSError: what was moved aside cannot be put back.
    """
    _put_back(path)
    for suffix in (ASIDE, TEMPORARY):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)  # rubbish that cannot be deleted is in nobody's way


def _set_aside(path: Path) -> Iterator[Path]:
    name = glob.escape(path.name)
    return path.parent.glob(f".{name}.*{ASIDE}/{name}")


def _put_back(path: Path) -> None:
    newest = max(_set_aside(path), key=lambda aside: aside.parent.stat().st_mtime, default=None)
    if newest is not None and not path.exists():
        newest.replace(path)
        newest.parent.rmdir()


@contextmanager
def _locked(lock: Path, path: Path) -> Iterator[IO[bytes]]:
    """The lock's file, open and locked. Raises ClaimedError."""
    while True:
        with lock.open("a+b") as file:
            try:
                _lock(file)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                owner = file.read(_OWNER_BYTES).decode(errors="replace") or "another process"
                raise ClaimedError(f"{path}: {owner} is replacing it; wait until that has ended") from None
            # Its last owner may have deleted it since we opened it; then others would lock another of the same name.
            if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                yield file
                return


def _lock(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(2**30)  # beyond what is written: a locked byte cannot be read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
