"""The validation split as every artifact of a bundle is scored on it: at export, or on the machine that it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgeformer.formats.errors import DataError, InputError, MissingDependencyError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.scores import Score
from edgeformer.tasks.calls import Run
from edgeformer.tasks.metric import Arrays
from edgeformer.tasks.reading import Origin, TextReader
from edgeformer.tasks.running import score_batches
from edgeformer.tasks.task import Task

Validation = Callable[[Run, int], Score]
"""A session's ``run`` and the loop that answers → its score on the validation split."""

SCORED_TOKENS = 2048
"""Tokens of the validation text that every artifact of a task that counts tokens is scored on: enough to see 2 %."""

_BATCH = 32


def open_validation(
    task: Task, data: Any, reader: TextReader, origin: Origin, progress: Progress, split: str = "validation"
) -> tuple[Validation | None, str | None]:
    """The split that training validated on, and why it cannot be found (None: it can).

    Args:
        task: of the model.
        data: its own data section.
        reader: the model's own tokenizer, or the one of a trimmed vocabulary.
        origin: what is known of the run's data.
        progress: is told of rows.
        split: another one, of a model that was not trained here.
    """
    try:
        rows = task.read_set(data, reader, split, origin)
    except (DataError, InputError, MissingDependencyError) as error:
        return None, f"the validation split cannot be read ({error})"
    used = len(rows)
    if task.unit == "tokens":
        used = min(used, int(np.searchsorted(np.cumsum(rows.lengths), SCORED_TOKENS)) + 1)
    batches = task.call_batches(rows, _BATCH, reader.vocabulary, first=used)

    def judge(run: Run, loop: int) -> Score:
        meter = task.meter((loop,), data=data)
        with bar(progress, "Scoring on the validation split", used, "rows"):
            arrays = (task.batch(rows, numbers, reader.pad) for numbers in batches)
            score_batches(run, arrays, meter, warm_up=False, advance=progress.advance)
        return meter.score()

    return judge, None


def most_rows(artifact: ArtifactManifest) -> int | None:
    """Rows that one call of an artifact takes; None: any number."""
    shapes = artifact.engine.shapes.values() if artifact.engine is not None else ()
    return min((shape[-1][0] for shape in shapes if len(shape[-1]) > 1), default=None)  # others are no rows of text


def in_pieces(run: Run, most: int | None) -> Run:
    """The same ``run`` for any number of rows, of which one call takes ``most`` (None: any number).

    All outputs must have a row per row of the inputs.
    """
    if most is None:
        return run

    def pieces(inputs: Arrays) -> Arrays:
        rows = max(len(array) for array in inputs.values())
        starts = range(0, rows, most)
        found = [run({name: array[start : start + most] for name, array in inputs.items()}) for start in starts]
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    return pieces
