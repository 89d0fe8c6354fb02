"""Processes of a study's runs: what they share the machine by, what their logs end with, and how all are stopped."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeformer.machine.host import default_threads, usable_cores
from edgeformer.machine.signals import catching


def environment(jobs: int) -> dict[str, str]:
    """Of a child among ``jobs``: they share the cores, and are not bound to the same ones."""
    found = dict(os.environ)
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, default_threads() // jobs)))
        found.setdefault("OMP_PROC_BIND", "false")
    return found


def threads(jobs: int) -> set[int]:
    """How many threads a child among ``jobs`` may have: alone it takes all cores, or processors, by its library."""
    said = environment(jobs).get("OMP_NUM_THREADS", "")
    return {int(said)} if said.isdecimal() else {default_threads(), usable_cores()}


def tail(path: Path, most: int = 4096) -> str:
    """The end of a file, at most so many bytes. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read().decode("utf-8", errors="replace")


def last_line(log: Path) -> str:
    """What a process said last."""
    return next((line for line in reversed(tail(log).splitlines()) if line.strip()), "it said nothing")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask every process to end, and wait for it; a training saves its state first."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, and a terminal that is gone, end the block as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with catching(("SIGTERM", "SIGHUP"), stop):
        yield
