"""Data of embedding models: pairs of texts with a score of how similar people found them, and plain texts.

A set of pairs is flat: rows 2i and 2i + 1 are the texts of pair i. Scores are kept as whole millionths, for labels are
whole numbers everywhere: in caches, in fingerprints and in golden inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from edgeformer.artifacts.data_config import PairsConfig, Source
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.data.rows import LabelledTexts, Row
from edgeformer.data.sources import Columns, pairs_source, read
from edgeformer.data.splits import IMPORTED_SETS, first_of, unknown_set

SCORE_UNIT = 1e-6
_MOST = 1e6


def pair_part(data: PairsConfig, split: str) -> str:
    """The part that a set is read from.

    Raises:
        InputError: no such set.
        DataError: the model was imported without the data of that set.
    """
    found = first_of(data.parts, *IMPORTED_SETS.get(split, (split,)))
    if found:
        return found[0]
    if split in IMPORTED_SETS:
        raise DataError(unknown_set(split, own_file=split != "train"))
    known = ", ".join(dict.fromkeys(("test", "validation", *(part for part in data.parts if part != "train"))))
    raise InputError(f"--split {split!r}: no such set; allowed: {known}")


def read_pairs(sources: Iterable[Source], name: str) -> LabelledTexts:
    """Pairs with their scores, flat.

    Args:
        name: of the set, for messages.

    Raises:
        DataError: a file or a row cannot be read, a row is no pair or its score no number; there are fewer than two
            different scores, by which nothing could be ranked.
    """
    texts: list[str] = []
    scores: list[float] = []
    for row in (row for source in sources for row in read(source)):
        first, second = _pair(row)
        texts += [first, second]
        scores.append(_score(row))
    if len(set(scores)) < 2:
        raise DataError(f"{name}: all {len(scores)} pairs have the same score; give pairs that differ in similarity")
    millionths = np.rint(np.repeat(np.array(scores), 2) / SCORE_UNIT).astype(np.int64)
    return LabelledTexts([*texts], millionths)


def read_texts(sources: Iterable[Source]) -> LabelledTexts:
    """Texts without scores, both of a pair each by itself. Raises DataError."""
    unlabelled = (_without_label(source) for source in sources)
    return LabelledTexts.unlabelled([text for source in unlabelled for row in read(source) for text in _each(row)])


def pairs_file(path: Path, data: PairsConfig, columns: Columns | None = None) -> LabelledTexts:
    """Scored pairs of a file whose columns are named, or called as those of ``data``, or have well-known names.

    Raises:
        DataError: as :func:`read_pairs`; it has no such columns (sentence1, sentence2, score).
    """
    scored = (source for part, sources in data.parts.items() if part != "train" for source in sources)
    like = next((source for source in scored if getattr(source, "text_pair", None) is not None), None)
    source = pairs_source(path, like, columns).model_copy(update={"skip_unlabelled": False})
    return read_pairs([source], str(path))


def _without_label(source: Source) -> Source:
    if source.kind == "synthetic-reviews":
        return source
    return source.model_copy(update={"label": None, "label_value": None, "skip_unlabelled": False})


def _each(row: Row) -> Iterator[str]:
    yield from (row.text,) if isinstance(row.text, str) else row.text


def _pair(row: Row) -> tuple[str, str]:
    if isinstance(row.text, str):
        raise DataError(f"{row.where}: is one text, not a pair; set the source's text_pair: to the column of the other")
    return row.text


def _score(row: Row) -> float:
    try:
        score = float(str(row.label))
    except ValueError:
        score = math.nan
    if not abs(score) <= _MOST:
        raise DataError(f"{row.where}: the score {str(row.label)[:40]!r} is no number up to {_MOST:g}; repair this row")
    return score
