"""Training in processes of their own, to be killed at any moment, or at the k-th change that they make on the disk."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.progress import Progress
from edgeformer.models import load_recipe
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL

_CONTEXT = multiprocessing.get_context("forkserver")  # importing torch takes longer than what is trained here
_CONTEXT.set_forkserver_preload(["torch._dynamo", "edgeformer.models.encoder.adapter", "tests.torture.children"])
COUNTED = ("replace", "rename", "fsync", "link", "unlink", "rmdir", "mkdir")
"""What changes names on the disk, and what makes sure that it did."""

TINY = [
    *SMALL, "name=tiny", "data.parts.train.0.rows=400", "training.batch_size=80", "training.epochs=2",
    "training.log_every=2", "model.hidden_size=16", "model.ffn_size=32",
]  # fmt: skip
"""Four steps of 80 rows in each of two epochs."""
OFTEN = ["training.checkpoint_minutes=1e-9"]
"""A checkpoint after every step."""


def start(artifacts: Path, *, overrides: list[str], resume: bool = False, kill_at: int | None = None) -> BaseProcess:
    """Begin to train "run" in a process of its own, which kills itself before change ``kill_at`` on the disk."""
    return begin(_train, artifacts, overrides, resume, kill_at)


def begin(work: Callable[..., None], *given: Any) -> BaseProcess:
    """Do some work in a process of its own."""
    process = _CONTEXT.Process(target=work, args=given)
    process.start()
    return process


def ends(process: BaseProcess) -> int:
    """Its exit status: 0 finished, 2 or 1 or 130 as the command's, -9 killed."""
    process.join(timeout=300)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError("no end within 300 s")
    return process.exitcode


def kill(process: BaseProcess) -> int:
    """As ``kill -9`` does; its exit status, 0 where it was faster."""
    process.kill()
    return ends(process)


def _train(artifacts: Path, overrides: list[str], resume: bool, kill_at: int | None) -> None:
    changes = watch_changes(kill=kill_at)
    recipe = load_recipe("quickstart", [*TINY, *overrides])
    try:
        train(recipe, TrainOptions(artifacts, name="run", resume=resume, accelerator="cpu"), Progress())
    except EdgeformerError as error:
        (artifacts / "error.txt").write_text(str(error), encoding="utf-8")
        os._exit(error.exit_code)
    count = len(changes)
    (artifacts / "changes.txt").write_text(str(count), encoding="utf-8")


def watch_changes(
    under: Path | None = None, *, kill: int | str | None = None, when: str = "before", number: int = signal.SIGKILL,
    functions: Sequence[str] = COUNTED, log: Callable[[str], object] | None = None,
) -> list[str]:  # fmt: skip
    """Note every change that this process makes to names on the disk, and end it at one of them.

    Args:
        under: only changes below this folder; libraries have caches elsewhere.
        kill: the change's number, counted from 1, or its text: ``replace bundle``; ``when``: before or after it.
        number: the signal that the process sends itself.
        functions: of ``os``, that make changes.
        log: is given each change's number, name and path.
    """
    changes: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            path = str(arguments[0])
            # Deleting a tree names its files relative to an open folder.
            if under is not None and not path.startswith(str(under)) and named.get("dir_fd") is None:
                return function(*arguments, **named)
            changes.append(f"{name} {os.path.relpath(path, under) if under is not None else path}")
            is_chosen = kill in (len(changes), changes[-1])
            if log is not None:
                log(f"# {len(changes)} {name} {path}\n")
            if is_chosen and when == "before":
                os.kill(os.getpid(), number)
            result = function(*arguments, **named)
            if is_chosen and when == "after":
                os.kill(os.getpid(), number)
            return result

        return call

    for name in functions:
        setattr(os, name, watched(name, getattr(os, name)))
    return changes
