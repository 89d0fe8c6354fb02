"""Running a model over a whole set: logits of every row, or a score."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.encoding import Encoded
from edgeformer.tasks.metric import Meter
from edgeformer.tasks.task import Int64s, Run, Task

LOGITS_BYTES = 256 * 10**6
"""Logits that one call may return: of 50,257 words, those of 1,273 tokens."""


def run_rows(
    run: Run, encoded: Encoded, pad: int, batch: int, advance: Callable[[int], None] = lambda rows: None
) -> NDArray[np.float32]:
    """Logits [n, C] of every row, as :func:`answer_rows` gives them."""
    return answer_rows(run, encoded, pad, batch, advance)["logits"]


def answer_rows(
    run: Run, encoded: Encoded, pad: int, batch: int, advance: Callable[[int], None] = lambda rows: None
) -> dict[str, NDArray[Any]]:
    """All outputs [n, …] of a model, in the order of the rows; every row goes through it once.

    Args:
        run: a session's.
        encoded: the rows.
        pad: the token that fills them up.
        batch: rows per call, which are of similar length, longest first.
        advance: is told of rows that are done.
    """
    answers: dict[str, NDArray[Any]] = {}
    for numbers in ordered_batches(encoded.lengths, batch):
        for name, output in run(collate(encoded, numbers, pad)).items():
            if name not in answers:
                answers[name] = np.empty((len(encoded), *output.shape[1:]), dtype=output.dtype)
            answers[name][numbers] = output
        advance(len(numbers))
    if not answers:
        raise ValueError("no rows to run")
    return answers


@dataclass(frozen=True)
class Calls:
    """A set, cut into calls of a model.

    Attributes:
        rows: of one set, as the task encodes them.
        pad: the token that fills up rows.
        batches: row numbers of each call; see :meth:`Task.call_batches`.
    """

    task: Task
    rows: Any
    pad: int
    batches: Sequence[Int64s]

    def batch(self, numbers: Int64s) -> dict[str, Int64s]:
        """One call's arrays."""
        return self.task.batch(self.rows, numbers, self.pad)


def score_calls(
    run: Run, calls: Calls, meter: Meter, *, warm_up: bool = True, advance: Callable[[int], None] = lambda rows: None
) -> float:
    """Add a model's answers on a whole set to ``meter``.

    Args:
        run: a session's.
        warm_up: run the first batch once more, untimed and uncounted: it pays for every allocation.

    Returns:
        Seconds spent in the model, without tokenizing and padding (paper A, Table 6).
    """
    seconds = 0.0
    if warm_up:
        run(calls.batch(calls.batches[0]))
    for numbers in calls.batches:
        inputs = calls.batch(numbers)
        started = time.perf_counter()
        outputs = run(inputs)
        seconds += time.perf_counter() - started
        meter.add(outputs, inputs)
        advance(len(numbers))
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
