"""Exports in processes of their own, killed before or after the k-th change that they make to names on the disk."""

import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

from edgeformer.artifacts.workspace import BUNDLE_FOLDER
from edgeformer.bundle import Bundle
from edgeformer.inference.verify import verify
from tests.torture.children import ends, watch_changes

Kill = tuple[int | str, str]
_CONTEXT = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
OLD = Path(__file__).resolve().parents[1] / "old_format" / "classifier-v1"
"""A tiny classifier of 7,618 parameters, with eleven artifacts in its bundle."""


def copied_run(folder: Path) -> Path:
    """The run with its bundle."""
    return Path(shutil.copytree(OLD, folder / "artifacts" / "tiny"))


def export_in_child(
    run: Path, *options: str, kill: Kill | None = None, log: Path | None = None, signalled: int | None = None
) -> int:
    """Run ``edgeformer export`` in a process of its own; its exit status, negative for the signal that ended it.

    Args:
        kill: the change to names on the disk at which it sends itself ``signalled``, as ``(5, "before")``.
        log: gets the name and the path of every change, and what the process prints.
    """
    arguments = (run, options, kill, log or run.with_suffix(".log"), signalled or signal.SIGKILL, dict(os.environ))
    process = _CONTEXT.Process(target=_export, args=arguments)
    process.start()
    return ends(process)


def _export(
    run: Path, options: tuple[str, ...], kill: Kill | None, log: Path, signalled: int, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    place, when = kill or (None, "before")
    watch_changes(run, kill=place, when=when, number=signalled, log=lambda line: os.write(out, line.encode()))
    sys.argv = ["edgeformer", "export", str(run), *options, "--artifacts", str(run.parent)]
    from edgeformer.cli import main

    main()


def changes(log: Path) -> list[str]:
    """What a process changed, in order."""
    return [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]


def assert_whole(run: Path) -> set[str]:
    """The bundle opens, every file of it is intact and every artifact answers. Ids of those that were built."""
    results = verify(Bundle.open(run / BUNDLE_FOLDER))
    assert {check.status for check in results.files} == {"intact"}
    answers = {check.artifact: check.status for check in results.artifacts if check.status != "unavailable"}
    assert set(answers.values()) == {"verified"}, answers
    return set(answers)
