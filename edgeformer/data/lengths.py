"""How long texts are: their words once they are cleaned, which subsets are cut by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.cleaning import clean
from edgeformer.data.rows import Text

Int64s = NDArray[np.int64]


def count_words(texts: Iterable[Text], cleaning: str) -> Int64s:
    """Words of each text, of both texts of a pair, int64 [n].

    Args:
        cleaning: of the recipe: ``paper`` or ``none``. Words are what white space parts.
    """
    return np.fromiter((_words(text, cleaning) for text in texts), np.int64)


def _words(text: Text, cleaning: str) -> int:
    parts = (text,) if isinstance(text, str) else text
    return sum(len((clean(part) if cleaning == "paper" else part).split()) for part in parts)
