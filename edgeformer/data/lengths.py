"""How long texts are: their words once they are cleaned, which subsets are cut by; and what is said of a whole set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.manifest import Lengths
from edgeformer.data.cleaning import clean
from edgeformer.data.encoding import TrainingRows
from edgeformer.data.rows import Text

Int64s = NDArray[np.int64]
_BINS = 40
_SHOWN = 0.99
"""Share of the texts that the bins of equal width hold: a few very long texts would leave no picture of the others."""
_ROWS_AT_ONCE = 1 << 20


def count_words(texts: Iterable[Text], cleaning: str) -> Int64s:
    """Words of each text, of both texts of a pair, int64 [n].

    Args:
        cleaning: of the recipe: ``paper`` or ``none``. Words are what white space parts.
    """
    return np.fromiter((_words(text, cleaning) for text in texts), np.int64)


def _words(text: Text, cleaning: str) -> int:
    parts = (text,) if isinstance(text, str) else text
    return sum(len((clean(part) if cleaning == "paper" else part).split()) for part in parts)


def tally(lengths: Int64s) -> Counter[int]:
    """Length → texts of that length."""
    found, counts = np.unique(lengths, return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def tally_tokens(rows: TrainingRows) -> Counter[int]:
    """The same of a set's rows in tokens, wherever they are."""
    counts: Counter[int] = Counter()
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        counts += tally(rows.sizes(np.arange(start, min(start + _ROWS_AT_ONCE, len(rows)))))
    return counts


def edges_of(sets: Iterable[Mapping[int, int]]) -> tuple[int, ...]:
    """Bins of equal, round width for nearly all texts of each set, so that pictures of them can be compared."""
    most = 1
    for counts in sets:
        lengths, until = sorted(counts), np.cumsum([counts[length] for length in sorted(counts)])
        most = max(most, lengths[int(np.searchsorted(until, _SHOWN * until[-1]))] + 1)
    widths = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    width = next(width for width in widths if width * _BINS >= most)
    return tuple(range(0, most + width, width))


def lengths_of(counts: Mapping[int, int], edges: tuple[int, ...]) -> Lengths:
    """What is said of a set.

    Args:
        counts: length → texts, at least one.
        edges: of the bins, from 0.
    """
    lengths = np.array(sorted(counts), dtype=np.int64)
    texts = np.array([counts[length] for length in lengths.tolist()], dtype=np.int64)
    until, total = np.cumsum(texts), int(texts.sum())
    middle = lengths[np.searchsorted(until, [(total - 1) // 2, total // 2], side="right")]
    bins = np.minimum(np.searchsorted(edges, lengths, side="right") - 1, len(edges) - 2)
    held = np.bincount(bins, weights=texts, minlength=len(edges) - 1)
    return Lengths(
        min=int(lengths[0]),
        median=float(middle.mean()),
        mean=round(float(lengths @ texts) / total, 3),
        max=int(lengths[-1]),
        edges=edges,
        texts=tuple(int(count) for count in held),
    )


def lengths_of_sets(counts: Mapping[str, Mapping[int, int]]) -> dict[str, Lengths]:
    """Set → what is said of it, all in the same bins; sets of which nothing was counted are left out."""
    known = {name: found for name, found in counts.items() if found}
    edges = edges_of(known.values())
    return {name: lengths_of(found, edges) for name, found in known.items()}
