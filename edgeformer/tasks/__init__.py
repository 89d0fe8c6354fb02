"""Tasks: what a model is for. One module per task holds its recipe, data, scores and golden inputs."""

import json
from contextlib import suppress
from pathlib import Path

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import read_at_most
from edgeformer.artifacts.workspace import MOST_JSON_BYTES
from edgeformer.data.encoding import Prepared
from edgeformer.registry import Registry
from edgeformer.tasks.metric import Meter, Metric, ScoreColumn
from edgeformer.tasks.task import Origin, RowSource, Run, Task, TextReader

__all__ = [
    "REGISTRY", "Meter", "Metric", "Origin", "Prepared", "RowSource", "Run", "ScoreColumn", "Task", "TextReader",
    "all_tasks", "get_task", "import_task",
]  # fmt: skip

REGISTRY: Registry[Task] = Registry(__name__, "TASK", Task, lambda task: (task.name,), modules=True)


def all_tasks() -> tuple[Task, ...]:
    """Return every task, in alphabetical order."""
    return REGISTRY.all()


def get_task(name: str) -> Task:
    """Return the task that a recipe or manifest names. Raises ArtifactError for an unknown name."""
    task = REGISTRY.find(name)
    if task is not None:
        return task
    names = ", ".join(task.name for task in all_tasks())
    raise ArtifactError(f"unknown task {name!r}; this version has {names}")


def import_task(manifest: Path) -> None:
    """Import the task that a manifest names, to recognise its types; importing all takes as long as opening a model."""
    with suppress(OSError, ValueError, RecursionError):  # reported by the function that reads all of the manifest
        document = json.loads(read_at_most(manifest, MOST_JSON_BYTES))
        if isinstance(document, dict):
            REGISTRY.find(str(document.get("task")))
