"""Running a model over a whole set: outputs of every row, or a score."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import DataError, InputError, MissingDependencyError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.scores import Score
from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.encoding import Encoded
from edgeformer.tasks.metric import Arrays, Meter
from edgeformer.tasks.task import Int64s, Origin, Run, Task, TextReader

LOGITS_BYTES = 256 * 10**6
"""Size of the logits that one call may return: 1,273 tokens of a vocabulary of 50,257."""

SCORED_TOKENS = 2048
"""Validation tokens on which artifacts of a task that counts tokens are scored: enough to detect a change of 2 %."""

Validation = Callable[[Run, int], Score]
"""Maps the ``run`` method of a session and the loop that answers to a score on the validation split."""


def answer_rows(run: Run, encoded: Encoded, pad: int, batch: int) -> dict[str, NDArray[Any]]:
    """Return all outputs [n, …] of a model in the order of the rows.

    Args:
        run: ``run`` method of a session.
        encoded: rows; each is run once, with rows of similar length, longest first.
        pad: padding token.
        batch: rows per call.
    """
    if not len(encoded):
        raise ValueError("no rows to run")
    return answer_batches(run, encoded, pad, ordered_batches(encoded.lengths, batch))


def answer_batches(run: Run, encoded: Encoded, pad: int, batches: Iterable[Int64s]) -> dict[str, NDArray[Any]]:
    """Return outputs as :func:`answer_rows`, with the row numbers of each call in ``batches``."""
    answers: dict[str, NDArray[Any]] = {}
    for numbers in batches:
        for name, output in run(collate(encoded, numbers, pad)).items():
            if name not in answers:
                answers[name] = np.empty((len(encoded), *output.shape[1:]), dtype=output.dtype)
            answers[name][numbers] = output
    return answers


def score_batches(
    run: Run, batches: Iterable[Arrays], meter: Meter, *, warm_up: bool, advance: Callable[[int], None]
) -> float:
    """Run a model on all batches and add its answers to ``meter``.

    Args:
        run: ``run`` method of a session.
        batches: arrays of each call, from :meth:`Task.batch`.
        warm_up: run the first batch once more, untimed and not counted; the extra run pays for allocations.
        advance: is called with the number of finished rows.

    Returns:
        Seconds in the model, without tokenizing and padding (paper A, Table 6).
    """
    seconds = 0.0
    for inputs in batches:
        if warm_up:
            run(inputs)
            warm_up = False
        started = time.perf_counter()
        outputs = run(inputs)
        seconds += time.perf_counter() - started
        meter.add(outputs, inputs)
        advance(len(inputs["input_ids"]))
    return seconds


def cut_batches(lengths: Int64s, max_rows: int, tokens: int) -> list[Int64s]:
    """Return row numbers of batches, longest rows first, with at most ``max_rows`` rows and ``tokens`` padded tokens.

    A batch has at least one row.
    """
    (order,) = ordered_batches(lengths, max(1, len(lengths)))
    batches = []
    while len(order):
        count = max(1, min(max_rows, tokens // int(lengths[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


def open_validation(
    task: Task, data: Any, reader: TextReader, origin: Origin, progress: Progress, split: str = "validation"
) -> tuple[Validation | None, str | None]:
    """Read the validation split and return a function that scores an artifact on it, or why it cannot be read.

    Args:
        task: task of the model.
        data: data section of the model.
        reader: tokenizer of the model, or of its trimmed vocabulary.
        origin: origin of the run's data.
        progress: receives rows.
        split: another split, for imported models.
    """
    try:
        rows = task.read_set(data, reader, split, origin)
    except (DataError, InputError, MissingDependencyError) as error:
        return None, f"the validation split cannot be read ({error})"
    count = len(rows)
    if task.unit == "tokens":
        count = min(count, int(np.searchsorted(np.cumsum(rows.lengths), SCORED_TOKENS)) + 1)
    batches = task.call_batches(rows, 32, reader.vocabulary, first=count)

    def validate(run: Run, loop: int) -> Score:
        meter = task.meter((loop,), data=data)
        with bar(progress, "Scoring on the validation split", count, "rows"):
            arrays = (task.batch(rows, numbers, reader.pad) for numbers in batches)
            score_batches(run, arrays, meter, warm_up=False, advance=progress.advance)
        return meter.score()

    return validate, None


def max_batch_rows(artifact: ArtifactManifest) -> int | None:
    """Return the largest batch of an artifact; None: any number of rows."""
    shapes = artifact.engine.shapes.values() if artifact.engine is not None else ()
    return min((shape[-1][0] for shape in shapes if len(shape[-1]) > 1), default=None)  # inputs [B, …] only


def split_calls(run: Run, max_rows: int | None) -> Run:
    """Return a ``run`` for any number of rows that calls ``run`` with at most ``max_rows`` rows (None: any number).

    All outputs must have one row per input row.
    """
    if max_rows is None:
        return run

    def run_in_pieces(inputs: Arrays) -> Arrays:
        count = max(len(array) for array in inputs.values())
        pieces = [
            run({name: array[start : start + max_rows] for name, array in inputs.items()})
            for start in range(0, count, max_rows)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    return run_in_pieces
