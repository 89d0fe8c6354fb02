"""Fewer rows than there are: samples with the same shares of labels, equal numbers of them, the longest or shortest.

All of them are drawn by a seed, and keep the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.data_config import Amount
from edgeformer.artifacts.errors import DataError
from edgeformer.data.rows import Row, Told

Int64s = NDArray[np.int64]


def count_of(amount: Amount, rows: int, key: str) -> int:
    """Rows that ``amount`` stands for, of ``rows``: of a fraction the nearest number, but at least one.

    Args:
        key: that says it, for the message.

    Raises:
        DataError: more than there are.
    """
    count = max(1, round(amount * rows)) if isinstance(amount, float) else amount
    if count > rows:
        raise DataError(f"{key}: {count:,} of {rows:,} rows cannot be taken; lower it, or leave it out to take all")
    return count


def sampled_rows(
    rows: Callable[[Told], Iterator[Row]], amount: Amount, seed: int, key: str, empty: Told
) -> Iterator[Row]:
    """Some rows of a source, with the shares that labels have in it. It is read twice: labels first, 8 bytes a row.

    Args:
        rows: of the source, from its beginning; it tells of those without a text.
        empty: is told of these, once.
        key: as :func:`count_of` has it.

    Raises:
        DataError: fewer rows than that; whatever ``rows`` raises.
    """
    numbers: dict[str, int] = {}
    strata = np.fromiter((numbers.setdefault(str(row.label), len(numbers)) for row in rows(_silent)), np.int64)
    chosen = np.zeros(len(strata), dtype=bool)
    chosen[sample(strata, count_of(amount, len(strata), key), seed)] = True
    yield from compress(rows(empty), chosen.tolist())


def _silent(row: Row) -> None:
    """The second reading tells of it."""


def sample(strata: Int64s, count: int, seed: int) -> Int64s:
    """Row numbers of ``count`` rows in order, of each stratum its share, rounded by the largest remainders."""
    found, sizes = np.unique(strata, return_counts=True)
    return _drawn(strata, found, apportioned(sizes.tolist(), count), seed)


def equal(groups: Int64s, seed: int) -> Int64s:
    """Row numbers in order, of each group as many as the smallest one has."""
    found, sizes = np.unique(groups, return_counts=True)
    return _drawn(groups, found, [int(min(sizes, default=0))] * len(found), seed)


def apportioned(sizes: Sequence[int], count: int) -> list[int]:
    """``count`` split in proportion to ``sizes`` (Hamilton's method); among equal remainders the first ones win."""
    total = max(1, sum(sizes))
    shares = [divmod(size * count, total) for size in sizes]
    left = count - sum(whole for whole, _ in shares)
    rounded_up = set(sorted(range(len(sizes)), key=lambda place: -shares[place][1])[:left])
    return [whole + (place in rounded_up) for place, (whole, _) in enumerate(shares)]


def _drawn(strata: Int64s, found: Int64s, counts: Sequence[int], seed: int) -> Int64s:
    """Of each of the strata ``found`` so many rows. Smaller counts by the same seed lie inside larger ones."""
    generator = np.random.default_rng(seed)
    drawn = [np.empty(0, dtype=np.int64)]
    for stratum, count in zip(found.tolist(), counts, strict=True):
        drawn.append(generator.permutation(np.flatnonzero(strata == stratum))[:count])
    return np.sort(np.concatenate(drawn))


def extreme(words: Int64s, share: float, *, longest: bool) -> Int64s:
    """Row numbers in order of the ``share`` of texts with the most words, or the fewest; ties in the order of rows."""
    order = np.argsort(-words if longest else words, kind="stable")
    return np.sort(order[: round(share * len(words))])
