"""The validation split, found again through the recipe: what an artifact's task score is measured on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeformer.formats.errors import DataError, InputError, MissingDependencyError
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import Score
from edgeformer.tasks import Origin, Run, TextReader, task_named
from edgeformer.tasks.running import score_batches

SCORED_TOKENS = 2048
"""Tokens of the validation text that every artifact of a task that counts tokens is scored on: enough to see 2 %."""

_BATCH = 32


Validation = Callable[[Run, int], Score]
"""A session's ``run`` and the loop that answers → its score on the validation split."""


def open_validation(
    recipe: Recipe, reader: TextReader, origin: Origin, progress: Progress
) -> tuple[Validation | None, str | None]:
    """The split that training validated on, and why it cannot be found (None: it can).

    Args:
        recipe: of the run.
        reader: the model's own tokenizer, or the one of a trimmed vocabulary.
        origin: what is known of the run's data.
    """
    task = task_named(recipe.task)
    try:
        rows = task.read_set(recipe.data, reader, "validation", origin)
    except (DataError, InputError, MissingDependencyError) as error:
        return None, (
            f"the validation split cannot be read ({error}), so task scores and the bars on them are those of the "
            f"golden inputs; {task.few}"
        )
    used = len(rows)
    if task.unit == "tokens":
        used = min(used, int(np.searchsorted(np.cumsum(rows.lengths), SCORED_TOKENS)) + 1)
    batches = task.call_batches(rows, _BATCH, reader.vocabulary, first=used)

    def judge(run: Run, loop: int) -> Score:
        meter = task.meter((loop,))
        progress.start("Scoring on the validation split", used, "rows")
        try:
            arrays = (task.batch(rows, numbers, reader.pad) for numbers in batches)
            score_batches(run, arrays, meter, warm_up=False, advance=progress.advance)
        finally:
            progress.finish()
        return meter.score()

    return judge, None
