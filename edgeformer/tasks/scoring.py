"""Running a model over a whole set: logits of every row, or a score."""

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
"""Logits that one call may return: of 50,257 words, those of 1,273 tokens."""


def answer_rows(run: Run, encoded: Encoded, pad: int, batch: int) -> dict[str, NDArray[Any]]:
    """All outputs [n, …] of a model, in the order of the rows; every row goes through it once.

    Args:
        run: a session's.
        encoded: the rows.
        pad: the token that fills them up.
        batch: rows per call, which are of similar length, longest first.
    """
    if not len(encoded):
        raise ValueError("no rows to run")
    return answer_batches(run, encoded, pad, ordered_batches(encoded.lengths, batch))


def answer_batches(run: Run, encoded: Encoded, pad: int, batches: Iterable[Int64s]) -> dict[str, NDArray[Any]]:
    """As :func:`answer_rows`, in these batches; empty without any. ``batches``: row numbers of each, every row once."""
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
    """Add a model's answers on a whole set to ``meter``.

    Args:
        run: a session's.
        batches: the arrays of each call, as :meth:`Task.batch` makes them.
        warm_up: run the first batch once more, untimed and uncounted: it pays for every allocation.
        advance: is told of rows that are done.

    Returns:
        Seconds spent in the model, without tokenizing and padding (paper A, Table 6).
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


def cut_batches(lengths: Int64s, most: int, tokens: int) -> list[Int64s]:
    """Row numbers of batches, longest rows first: up to ``most`` rows and ``tokens`` padded tokens, at least a row."""
    (order,) = ordered_batches(lengths, max(1, len(lengths)))
    batches = []
    while len(order):
        count = max(1, min(most, tokens // int(lengths[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


# The validation split as every artifact of a bundle is scored on it: at export, or on the machine that it is for.


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
