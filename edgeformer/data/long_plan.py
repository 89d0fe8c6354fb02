"""Which rows go into which batch where there are too many rows to write all their numbers down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from edgeformer.data.batching import WINDOW_BATCHES, cut
from edgeformer.data.encoding import TrainingRows

Int64s = NDArray[np.int64]
_ROUNDS = 8


def permuted(places: Int64s, count: int, keys: Sequence[int]) -> Int64s:
    """Where a random permutation of ``range(count)`` takes ``places``, computed for these alone.

    A Feistel network on the next even number of bits: each round changes one half of a number by what a hash makes of
    the other, which can be undone, so that no two numbers become the same. What falls outside the range goes round
    again until it is inside (Black and Rogaway, 2002: cycle walking), on average fewer than four times.

    Args:
        keys: random 64-bit numbers, one for each round.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=bool)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_hashed(right + np.uint64(key)) & mask)
        found[outside] = (left << half) | right
        outside = found >= np.uint64(count)
    return found.astype(np.int64)


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's last steps (Steele, Lea and Flood, 2014): every bit depends on every other."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers


class LongPlan(Sequence[Int64s]):
    """Row numbers of every batch of one epoch: every row once, the same for the same arguments.

    As :func:`~edgeformer.data.batching.plan_batches`, but for the order: it is computed for 64 batches at a time, when
    they are asked for, in memory for as many rows. Rows of all 64 are drawn from the whole set; sorted by length they
    become batches, which are shuffled among each other.

    Args:
        rows: the training set.
        bucketed: batches of similar length, instead of plain shuffling.
    """

    def __init__(self, rows: TrainingRows[Any], batch_size: int, *, seed: int, epoch: int, bucketed: bool) -> None:
        self._rows, self._batch_size, self._bucketed, self._seed = rows, batch_size, bucketed, (seed, epoch)
        generator = np.random.default_rng(self._seed)
        self._keys = generator.integers(2**64, size=_ROUNDS, dtype=np.uint64).tolist()
        self._numbers = range(-(-len(rows) // batch_size))
        self._window: tuple[int, list[Int64s]] = (-1, [])

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Int64s]:
        # Sequence's own takes any IndexError, also from within, for the end.
        return (self[number] for number in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Int64s: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Int64s | Self:
        if isinstance(index, slice):
            part = object.__new__(type(self))
            part.__dict__.update(vars(self), _numbers=self._numbers[index])
            return part
        window, place = divmod(self._numbers[index], WINDOW_BATCHES)
        if self._window[0] != window:
            self._window = window, self._batches(window)
        return self._window[1][place]

    def _batches(self, window: int) -> list[Int64s]:
        size = self._batch_size * WINDOW_BATCHES
        places = np.arange(window * size, min((window + 1) * size, len(self._rows)))
        numbers = permuted(places, len(self._rows), self._keys)
        if not self._bucketed:
            return cut(numbers, self._batch_size)
        batches = cut(numbers[np.argsort(self._rows.sizes(numbers), kind="stable")], self._batch_size)
        order = np.random.default_rng((*self._seed, window)).permutation(len(batches))
        return [batches[number] for number in order.tolist()]
