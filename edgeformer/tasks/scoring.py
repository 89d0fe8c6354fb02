"""Running a model over a whole set: logits of every row of a labelled one, losses of every token of a text."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.batching import collate, ordered_batches
from edgeformer.data.encoding import Encoded
from edgeformer.data.language import TextRows, text_batch
from edgeformer.data.language_rows import IGNORED
from edgeformer.tasks.language_modeling import LanguageMeter, token_losses

Array = NDArray[Any]
Int64s = NDArray[np.int64]
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Inputs by name → outputs by name: a session's ``run``."""

LOGITS_BYTES = 256 * 10**6
"""Logits that one call may return: of 50,257 words, those of 1,273 tokens."""


def run_rows(
    run: Run, encoded: Encoded, pad: int, batch: int, advance: Callable[[int], None] = lambda rows: None
) -> tuple[NDArray[np.float32], float]:
    """Logits [n, C] of every row, and the seconds spent in the model (without tokenizing and padding).

    Batches hold rows of similar length, longest first. The first one runs once untimed: it pays for every allocation.
    """
    pieces: list[tuple[Sequence[int], NDArray[np.float32]]] = []
    seconds = 0.0
    batches = ordered_batches(encoded.lengths, batch)
    run(collate(encoded, batches[0], pad))
    for rows in batches:
        inputs = collate(encoded, rows, pad)
        started = time.perf_counter()
        output = run(inputs)["logits"]
        seconds += time.perf_counter() - started
        pieces.append((rows.tolist(), output))
        advance(len(rows))
    logits = np.empty((len(encoded), pieces[0][1].shape[-1]), dtype=np.float32)
    for numbers, output in pieces:
        logits[numbers] = output
    return logits, seconds


def cut_batches(lengths: Int64s, most: int, tokens: int) -> list[Int64s]:
    """Row numbers of batches, longest rows first: up to ``most`` rows and ``tokens`` padded tokens, at least a row."""
    (order,) = ordered_batches(lengths, max(1, len(lengths)))
    batches = []
    while len(order):
        count = max(1, min(most, tokens // int(lengths[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


def run_texts(
    run: Run,
    rows: TextRows,
    batches: Sequence[Int64s],
    meter: LanguageMeter,
    context: tuple[tuple[int, ...], int],
    advance: Callable[[int], None] = lambda rows: None,
) -> float:
    """Add the losses of all rows to ``meter``; returns the seconds spent in the model.

    Args:
        context: the exits that answer, and the token between documents.
    """
    exits, boundary = context
    seconds = 0.0
    for numbers in batches:
        batch = text_batch(rows, numbers, boundary)
        started = time.perf_counter()
        outputs = run(batch)
        seconds += time.perf_counter() - started
        meter.add(_losses(outputs, batch["targets"], exits))
        advance(len(numbers))
    return seconds


def _losses(outputs: Mapping[str, Array], targets: Int64s, exits: Sequence[int]) -> dict[int, NDArray[np.float64]]:
    """Loop → loss of every predicted token, from logits [B, S, V] of the last loop or from losses [B, S] of each."""
    counted = targets != IGNORED
    if "logits" not in outputs:
        return {loop: outputs[f"loss_exit{loop}"][counted].astype(np.float64) for loop in exits}
    pieces = [
        token_losses(logits[there], wanted[there])
        for logits, wanted, there in zip(outputs["logits"], targets, counted, strict=True)
    ]
    return {exits[-1]: np.concatenate(pieces)}
