"""The folder for files that a runtime compiled on this machine and can compile again."""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import ASIDE, TEMPORARY, replacing, whole
from edgeformer.system.cuda_driver import Device
from edgeformer.system.lock import LOCK_FILE, LockedError, claiming

VARIABLE = "EDGEFORMER_CACHE"


def cache_folder() -> Path:
    """Return the user's cache folder of edgeformer, which may not exist yet; ``EDGEFORMER_CACHE`` names another one."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "edgeformer"


def compiled_name(sha256: str, gpu: Device, version: str) -> str:
    """Name what was compiled from the file with this sha256, for one GPU, by one version of a runtime."""
    card = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return f"{sha256}-{card}-{gpu.compute_capability}-{version}"


# What killed processes leave of folders that they were making or replacing: put back, or removed by the next one.


_SWAP_S = 5.0
"""How long a reader waits for a living process that is between two renames, which takes it some microseconds."""


def restore_folder(path: Path) -> None:
    """Put back what :func:`~edgeformer.artifacts.files.replacing_folder` had moved aside when its process was killed.

    Nothing is done where ``path`` is there, or nothing is aside.

    Raises:
        LockedError: it belongs to another process still, which does not put it there; the message names it.
        ArtifactError: the folder around it cannot be written.
        OSError: it cannot be put back for another reason.
    """
    path, deadline = whole(path), time.monotonic() + _SWAP_S
    while not path.exists() and any(_set_aside(path)):
        try:
            with claiming(path):
                _put_back(path)
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def remove_leftovers(path: Path) -> None:
    """Put back or delete what killed processes left of replacing ``path``; for the process that claims it.

    Raises:
        OSError: what was moved aside cannot be put back.
    """
    path = whole(path)
    _put_back(path)
    for suffix in (ASIDE, TEMPORARY):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)  # rubbish that cannot be deleted is in nobody's way


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``parent``, removed at the end; and so are those that killed processes left under this prefix.

    Args:
        parent: a folder that can be written.
        prefix: that its name starts with, no other's but those of this function.

    Raises:
        OSError: it cannot be made.
    """
    remove_abandoned(parent, prefix)
    path = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
    with claiming(path):  # before it is there: nobody can take it for a dead process's
        try:
            path.mkdir()
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def replacing_alone(path: Path) -> Iterator[Path]:
    """As ``files.replacing``, by one process at a time; leftovers of killed processes are removed.

    Raises:
        LockedError: another process writes it; the message names it.
        ArtifactError: the folder around it cannot be written.
        OSError: it cannot be written for another reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with claiming(path):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}{glob.escape(path.suffix)}"):
            left.unlink()
        with replacing(path) as temporary:
            yield temporary


def new_folder(prefix: str, free: Callable[[], Path], fill: Callable[[Path], None]) -> Path:
    """Make a folder that appears complete, under a name that nobody has; returns it.

    Args:
        prefix: as of :func:`temporary_folder`; the folder is filled in such a one.
        free: the folder to make, which is not there; asked again where another process was faster. It may refuse.
        fill: makes what is in the folder that it is given, which is called as it will be.

    Raises:
        OSError: it cannot be made.
    """
    parent = free().parent
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(parent, prefix) as around:
        while True:
            folder = free()
            beginning = around / folder.name
            beginning.mkdir()
            fill(beginning)
            try:
                return beginning.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
                shutil.rmtree(beginning)  # another process was faster


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what killed processes left of :func:`temporary_folder`; what a living one has stays."""
    locks = (lock.name[1 : -len(LOCK_FILE)] for lock in parent.glob(f".{prefix}*{LOCK_FILE}"))
    for name in {*locks, *(left.name for left in parent.glob(f"{prefix}*"))}:
        with suppress(ArtifactError), claiming(parent / name):  # a living one's, or in a folder of somebody else's
            shutil.rmtree(parent / name, ignore_errors=True)


def _set_aside(path: Path) -> Iterator[Path]:
    name = glob.escape(path.name)
    return path.parent.glob(f".{name}.*{ASIDE}/{name}")


def _put_back(path: Path) -> None:
    newest = max(_set_aside(path), key=lambda aside: aside.parent.stat().st_mtime, default=None)
    if newest is not None and not path.exists():
        newest.replace(path)
        newest.parent.rmdir()
