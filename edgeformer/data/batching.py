"""Which rows go into which batch, and the padded arrays of one batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.encoding import Encoded

Int64s = NDArray[np.int64]
WINDOW_BATCHES = 64
"""Rows are sorted by length within this many batches: little padding, and batches stay random."""


def plan_batches(
    lengths: NDArray[np.integer], batch_size: int, *, seed: int, epoch: int, bucketed: bool
) -> list[Int64s]:
    """Row numbers of every batch of one epoch: every row once, the same for the same arguments.

    Args:
        lengths: [n] tokens per row.
        bucketed: batches of similar length in random order, instead of plain shuffling.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths)).astype(np.int64)
    if not bucketed:
        return _cut(order, batch_size)
    batches: list[Int64s] = []
    for window in _cut(order, batch_size * WINDOW_BATCHES):
        batches.extend(_cut(window[np.argsort(lengths[window], kind="stable")], batch_size))
    return [batches[i] for i in generator.permutation(len(batches)).tolist()]


def ordered_batches(lengths: NDArray[np.integer], batch_size: int) -> list[Int64s]:
    """Row numbers of batches for evaluation, longest rows first: what needs most memory fails first."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").astype(np.int64)
    return _cut(order, batch_size)


def _cut(order: Int64s, size: int) -> list[Int64s]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def collate(encoded: Encoded, indices: NDArray[np.integer], pad_id: int) -> dict[str, Int64s]:
    """The rows at ``indices`` as ``input_ids`` and ``attention_mask``, int64 [B, S], S the longest row."""
    starts = encoded.offsets[indices]
    lengths = encoded.offsets[np.asarray(indices) + 1] - starts
    positions = np.arange(lengths.max(initial=0), dtype=np.int64)
    mask = positions < lengths[:, None]
    input_ids = np.full(mask.shape, pad_id, dtype=np.int64)
    input_ids[mask] = encoded.ids[(starts[:, None] + positions)[mask]]
    return {"input_ids": input_ids, "attention_mask": mask.astype(np.int64)}
