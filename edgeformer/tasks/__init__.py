"""Tasks: what a model is for. Each has one folder here, with its data, metric, scoring and golden inputs."""

from __future__ import annotations

from edgeformer.discovery import discover
from edgeformer.formats.errors import ArtifactError
from edgeformer.tasks.task import Meter, Metric, Origin, Prepared, Run, ScoreColumn, Task, TextReader

__all__ = [
    "Meter",
    "Metric",
    "Origin",
    "Prepared",
    "Run",
    "ScoreColumn",
    "Task",
    "TextReader",
    "all_tasks",
    "task_named",
]


def all_tasks() -> tuple[Task, ...]:
    """Every task, in alphabetical order."""
    return discover(__name__, "TASK")


def task_named(name: str) -> Task:
    """The task that a recipe or manifest names. Raises ArtifactError for one that this edgeformer does not know."""
    for task in all_tasks():
        if task.name == name:
            return task
    known = ", ".join(task.name for task in all_tasks())
    raise ArtifactError(f"task {name!r} is not known to this edgeformer; it knows {known}")
