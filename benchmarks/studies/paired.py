"""Two runs that answer the same rows, compared row by row: McNemar, Holm, and a bootstrap interval."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy.stats import binom

from benchmarks.studies.specification import Several
from edgeformer.artifacts.base import Frozen
from edgeformer.tasks.risk_control import bootstrap_interval

Right = NDArray[np.bool_]
"""Whether each row of a set was answered right, [n]."""


class Paired(Frozen):
    """Accuracy of one run less that of another on the same rows of one set."""

    run: str
    against: str
    at: str = Field(description="test set")
    rows: int
    won: Several[int] = Field(description="per pair of seeds: rows that only this run answers right")
    lost: Several[int] = Field(description="per pair of seeds: rows that only the other one answers right")
    difference: float = Field(description="mean over the pairs of seeds")
    low: float = Field(description="95% bootstrap interval over the rows, for these seeds")
    high: float
    p: float = Field(description="exact, of these trained weights; one pair of seeds: McNemar's test")
    adjusted: float = Field(description="p after Holm's correction over the table")


def packed(right: Right) -> str:
    """Return the text that a JSON keeps: base64 of one bit per row."""
    return b64encode(np.packbits(right).tobytes()).decode()


def unpacked(text: str, rows: int) -> Right:
    """Return what :func:`packed` kept."""
    return np.unpackbits(np.frombuffer(b64decode(text), dtype=np.uint8), count=rows).astype(bool)


def compare(name: str, against: str, at: str, runs: Mapping[int, Right], others: Mapping[int, Right]) -> Paired | None:
    """Compare two runs on a set, seed by seed; a run with one seed is compared with all seeds of the other.

    None: they have no seed in common, or other rows. Of several pairs the differences in each row are added, so that
    seeds that contradict each other cancel out.
    """
    seeds = sorted(runs.keys() & others.keys())
    pairs = [(runs[seed], others[seed]) for seed in seeds]
    if 1 in (len(runs), len(others)):
        pairs = [(first, second) for first in runs.values() for second in others.values()]
    if not pairs or len({len(right) for pair in pairs for right in pair}) > 1:
        return None
    won = tuple(int((first & ~second).sum()) for first, second in pairs)
    lost = tuple(int((second & ~first).sum()) for first, second in pairs)
    change = np.sum([first.astype(int) - second for first, second in pairs], axis=0)
    p = sign_flip_test(change)
    change = change / len(pairs)
    low, high = bootstrap_interval(lambda rows: float(change[rows].mean()), len(change))
    return Paired(
        run=name, against=against, at=at, rows=len(change), won=won, lost=lost, difference=float(change.mean()),
        low=low, high=high, p=p, adjusted=p,
    )  # fmt: skip


def sign_flip_test(differences: NDArray[np.int64]) -> float:
    """Return the exact p-value of a sum of whole numbers [n] if each of their signs were as likely as the other.

    Of ones and minus ones it is McNemar's test.
    """
    sizes = np.abs(differences)
    chances = np.ones(1)
    for size in range(1, sizes.max(initial=0) + 1):  # the sum of c numbers of this size is size · (2 · B(c, ½) − c)
        count = int((sizes == size).sum())
        sums = np.zeros(2 * size * count + 1)
        sums[:: 2 * size] = binom.pmf(np.arange(count + 1), count, 0.5)
        chances = np.convolve(chances, sums)
    extreme = np.abs(np.arange(len(chances)) - len(chances) // 2) >= abs(differences.sum())
    return float(min(1.0, chances[extreme].sum()))


def adjust(pairs: Sequence[Paired]) -> tuple[Paired, ...]:
    """Return the comparisons with p-values that hold for all of them together (Holm, 1979)."""
    adjusted, largest = {}, 0.0
    for rank, place in enumerate(sorted(range(len(pairs)), key=lambda place: pairs[place].p)):
        largest = max(largest, min(1.0, (len(pairs) - rank) * pairs[place].p))
        adjusted[place] = pairs[place].model_copy(update={"adjusted": largest})
    return tuple(adjusted[place] for place in range(len(pairs)))
