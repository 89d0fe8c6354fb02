"""Running a model over a whole set: logits of every row, or a score."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.encoding import Encoded
from edgeformer.tasks.calls import Run
from edgeformer.tasks.metric import Arrays, Meter
from edgeformer.tasks.task import Int64s

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
