"""Proof of an import: texts are answered by edgeformer and by the library that the model came from, and compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.manifest import ImportProof
from edgeformer.data.rows import Text, join_pair
from edgeformer.runtimes.session import Array

TOLERANCE = 1e-4
"""Largest allowed absolute difference of a number of an answer, relative to the largest number above 1."""
_SHOWN = 80
"""Characters of a text in a message."""


class Compared(NamedTuple):
    """Both answers to a text: logits, probabilities, a vector, scores of spans, or token ids, which are ``exact``."""

    text: Text
    expected: Array
    actual: Array
    exact: bool = False


def prove(
    library: str, answers: Iterable[Compared], *, allow_difference: bool, tolerance: float = TOLERANCE
) -> ImportProof:
    """Compare the answers of edgeformer with those of ``library`` (name and version).

    Args:
        allow_difference: a difference marks the import as unproven instead of refusing it.
        tolerance: of a number, relative to the largest number of its expected answer if that exceeds 1.

    Raises:
        InputError: an answer differs; the message has the text with the largest difference.
    """
    worst, reason, largest, texts = 0.0, None, 0.0, 0
    for text, expected, actual, exact in answers:
        texts += 1
        is_comparable = expected.shape == actual.shape
        error = float(np.abs(expected.astype(np.float64) - actual).max(initial=0.0)) if is_comparable else np.inf
        relative = error / max(1.0, float(np.abs(expected).max(initial=0.0)))
        if exact and error:
            error = relative = np.inf
        largest = max(largest, error)
        if not relative <= tolerance and not relative <= worst:  # NaN differs, too
            worst = relative
            shown = [np.array2string(a.ravel()[:6], precision=4, threshold=6) for a in (expected, actual)]
            joined = join_pair(text)
            place = f"{joined[:_SHOWN]!r}{'…' if len(joined) > _SHOWN else ''}"
            difference = f"by {error:.1e}" if is_comparable else f"in shape, {actual.shape} instead of {expected.shape}"
            difference = "in its tokens" if exact else difference
            reason = (
                f"the answer to {place} differs {difference} from that of {library}: {shown[1]} instead of {shown[0]}"
            )
    if not texts:
        return unproven(f"no probe text has an answer to compare with that of {library}")
    if reason is not None:
        unproven(reason, allowed=allow_difference)
    finite = largest if np.isfinite(largest) else None
    return ImportProof(library=library, texts=texts, largest_difference=finite, tolerance=tolerance, reason=reason)


def unproven(reason: str, *, allowed: bool = True) -> ImportProof:
    """Return the record of an import that is not proven, for this ``reason``. Raises InputError: it is not allowed."""
    if not allowed:
        raise InputError(f"{reason}; import it unproven, and marked so, with --unproven") from None
    return ImportProof(reason=reason)
