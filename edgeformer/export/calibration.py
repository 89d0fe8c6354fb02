"""Real rows that builders find the ranges of activations with: of the training split, never of what scores are of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeformer.artifacts.errors import DataError, InputError, MissingDependencyError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import collate
from edgeformer.data.encoding import encode_texts
from edgeformer.runtimes.runtime import Calls
from edgeformer.tasks import Task, TextReader

ROWS = 300
"""What NNCF calibrates with by default. Rows go through the model one by one: padding would be in the ranges."""

_SEED = 0


@dataclass(frozen=True)
class Calibration:
    """Rows of the training split, or why there are none."""

    calls: Callable[[], Calls] | None
    missing: str | None = None

    def read(self) -> Calls:
        """Inputs of one row each. Raises DataError where there are none."""
        if self.calls is None:
            raise DataError(str(self.missing))
        return self.calls()


def training_rows(recipe: Recipe, task: Task, reader: TextReader, trained_on: str | None) -> Calibration:
    """A fixed sample of the texts that the model was trained on, as it reads them; nothing is read yet.

    Args:
        recipe: of the run.
        task: of the model.
        reader: its tokenizer.
        trained_on: the training set's fingerprint, as training recorded it; None: not known.
    """
    if task.predicts is None or type(task).known_sets is Task.known_sets:
        return Calibration(
            None, f"rows of the training split are read of texts with labels only, not for a {task.noun}"
        )

    if trained_on is None:
        return Calibration(None, "what the model was trained on is not known")

    def calls() -> Calls:
        data: Any = recipe.data
        try:
            texts = task.known_sets(data).get("train")
        except (InputError, MissingDependencyError) as error:
            raise DataError(f"the training split cannot be read: {error}") from None
        if texts is None or not len(texts):
            raise DataError("the training split cannot be read: its data names no such part")
        if texts.fingerprint() != trained_on:
            raise DataError("the training split is not the one of this model's training; its data changed since")
        order = np.random.default_rng(_SEED).permutation(len(texts))[:ROWS]
        encoded, _ = encode_texts(reader.tokenizer, texts.take(order).texts, data.tokens_at_once)
        return [collate(encoded, np.array([row]), reader.pad) for row in range(len(encoded))]

    return Calibration(calls)
