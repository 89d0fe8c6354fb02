"""Training in processes of their own, to be killed at any moment, or at the k-th change that they make on the disk."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.progress import Silent
from edgeformer.models import load_recipe
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL

_CONTEXT = multiprocessing.get_context("forkserver")  # importing torch takes longer than what is trained here
_CONTEXT.set_forkserver_preload(["torch._dynamo", "edgeformer.models.encoder.adapter", "tests.torture.children"])
COUNTED = ("replace", "rename", "fsync", "link", "unlink", "rmdir", "mkdir")
"""What changes names on the disk, and what makes sure that it did."""

TINY = [
    *SMALL,
    "name=tiny",
    "data.parts.train.0.rows=400",
    "training.batch_size=80",
    "training.epochs=2",
    "training.log_every=2",
    "model.hidden_size=16",
    "model.ffn_size=32",
]
"""Four steps of 80 rows in each of two epochs."""
OFTEN = ["training.checkpoint_minutes=1e-9"]
"""A checkpoint after every step."""


def start(artifacts: Path, *, overrides: list[str], resume: bool = False, kill_at: int | None = None) -> BaseProcess:
    """Begin to train the run "run" of the tiny recipe in a process of its own.

    Args:
        overrides: of the recipe, beside TINY.
        kill_at: the process kills itself before the k-th of its changes on the disk, counted from 1.
    """
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
    count = itertools.count(1)
    for name in COUNTED:
        setattr(os, name, _counted(getattr(os, name), count, kill_at))
    recipe = load_recipe("quickstart", [*TINY, *overrides])
    try:
        train(recipe, TrainOptions(artifacts, name="run", resume=resume, accelerator="cpu"), Silent())
    except EdgeformerError as error:
        (artifacts / "error.txt").write_text(str(error), encoding="utf-8")
        os._exit(error.exit_code)
    (artifacts / "changes.txt").write_text(str(next(count) - 1), encoding="utf-8")


def _counted(function: Callable[..., Any], count: itertools.count[int], kill_at: int | None) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        if next(count) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    return counted
