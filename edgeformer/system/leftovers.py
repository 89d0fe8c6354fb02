"""Cache folder, temporary folders, and cleanup after killed processes."""

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
from edgeformer.system.lock import LOCK_FILE, LockedError, lock_path

VARIABLE = "EDGEFORMER_CACHE"


def cache_folder() -> Path:
    """Return the user's cache folder of edgeformer, which may not exist yet; ``EDGEFORMER_CACHE`` overrides it."""
    if override := os.environ.get(VARIABLE):
        return Path(override)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "edgeformer"


def compiled_name(sha256: str, gpu: Device, version: str) -> str:
    """Return the cache name of a file (by sha256) compiled for one GPU by one version of a runtime."""
    card = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return f"{sha256}-{card}-{gpu.compute_capability}-{version}"


_SWAP_S = 5.0  # maximum wait in seconds for a live process between its two renames, which take microseconds


def restore_folder(path: Path) -> None:
    """Restore a folder that a killed ``files.replacing_folder`` had moved aside; no effect if ``path`` exists.

    Raises as :func:`lock_path` does, and OSError if it cannot be restored for another reason.
    """
    path, deadline = whole(path), time.monotonic() + _SWAP_S
    while not path.exists() and any(path.parent.glob(f".{glob.escape(path.name)}.*{ASIDE}")):
        try:
            with lock_path(path):
                _put_back(path)
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def remove_leftovers(path: Path) -> None:
    """Restore or delete leftovers of processes killed while replacing ``path``. The caller holds the lock of ``path``.

    Raises OSError: the folder that was moved aside cannot be restored.
    """
    path = whole(path)
    _put_back(path)
    for suffix in (ASIDE, TEMPORARY):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)  # a leftover that cannot be deleted does no harm


def _put_back(path: Path) -> None:
    name = glob.escape(path.name)
    aside = path.parent.glob(f".{name}.*{ASIDE}/{name}")
    newest = max(aside, key=lambda folder: folder.parent.stat().st_mtime, default=None)
    if newest is not None and not path.exists():
        newest.replace(path)
        newest.parent.rmdir()


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Create a folder in ``parent`` and remove it at the end, together with leftovers of killed processes.

    Only folders of this function may start with ``prefix``. Raises OSError: the folder cannot be created.
    """
    remove_abandoned(parent, prefix)
    path = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
    with lock_path(path):  # lock before creation, or another process could remove it as a leftover
        try:
            path.mkdir()
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def replace_exclusively(path: Path) -> Iterator[Path]:
    """Replace a file as ``files.replacing`` does, under a lock; leftovers of killed processes are removed.

    Raises as :func:`lock_path` does, and OSError if the file cannot be written for another reason.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path(path):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY}{glob.escape(path.suffix)}"):
            leftover.unlink()
        with replacing(path) as temporary:
            yield temporary


def new_folder(prefix: str, free: Callable[[], Path], fill: Callable[[Path], None]) -> Path:
    """Create a folder that appears complete, under a free name; returns it. Raises OSError.

    It is filled in a :func:`temporary_folder` with this ``prefix``, where it has its final name. ``free`` returns a
    path that is free, and is called again if another process took it; it may raise.
    """
    parent = free().parent
    parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(parent, prefix) as temporary:
        while True:
            folder = free()
            draft = temporary / folder.name
            draft.mkdir()
            fill(draft)
            try:
                return draft.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
                shutil.rmtree(draft)  # another process took the name


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove temporary folders of killed processes; those of live processes stay."""
    locks = (lock.name[1 : -len(LOCK_FILE)] for lock in parent.glob(f".{prefix}*{LOCK_FILE}"))
    for name in {*locks, *(folder.name for folder in parent.glob(f"{prefix}*"))}:
        with suppress(ArtifactError), lock_path(parent / name):  # locked by a live process, or not writable
            shutil.rmtree(parent / name, ignore_errors=True)
