"""Tasks: what a model is for. Each has one folder here, with its data, metric, scoring and golden inputs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import read_at_most
from edgeformer.artifacts.workspace import MOST_JSON_BYTES
from edgeformer.data.encoding import Prepared
from edgeformer.registry import Registry
from edgeformer.tasks.metric import Meter, Metric, ScoreColumn
from edgeformer.tasks.task import Origin, Run, Task, TextReader

__all__ = [
    "REGISTRY",
    "Meter",
    "Metric",
    "Origin",
    "Prepared",
    "Run",
    "ScoreColumn",
    "Task",
    "TextReader",
    "all_tasks",
    "import_task_of",
    "task_named",
]


REGISTRY: Registry[Task] = Registry(__name__, "TASK", Task, lambda task: (task.name,), modules=True)


def all_tasks() -> tuple[Task, ...]:
    """Every task, in alphabetical order."""
    return REGISTRY.all()


def task_named(name: str) -> Task:
    """The task that a recipe or manifest names. Raises ArtifactError for one that this edgeformer does not know."""
    task = REGISTRY.find(name)
    if task is not None:
        return task
    known = ", ".join(task.name for task in all_tasks())
    raise ArtifactError(f"task {name!r} is not known to this edgeformer; it knows {known}")


def import_task_of(manifest: Path) -> None:
    """Import the task that a manifest names, so that its scores and its data are recognised when it is read.

    Only that one: importing all, and looking for other packages' tasks, takes as long as opening a small model. What
    is wrong with the manifest is said by whoever reads it whole.
    """
    with suppress(OSError, ValueError, RecursionError):
        document = json.loads(read_at_most(manifest, MOST_JSON_BYTES))
        if isinstance(document, dict):
            REGISTRY.find(str(document.get("task")))
