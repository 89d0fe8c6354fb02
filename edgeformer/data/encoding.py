"""Encoded: a labelled set as token numbers, flat, with the row boundaries beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_CHUNK = 2048


@dataclass(frozen=True)
class Encoded:
    """Row ``i`` is ``ids[offsets[i]:offsets[i + 1]]`` (special tokens included), its class ``labels[i]``."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per row, int64 [n]."""
        return np.diff(self.offsets)

    def row(self, index: int) -> NDArray[np.int32]:
        """Token numbers of one row."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


def encode(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    labels: NDArray[np.int64],
    max_length: int,
    advance: Callable[[int], None] = lambda rows: None,
) -> Encoded:
    """Encode texts, each cut to ``max_length`` tokens (its final special token is kept).

    Args:
        labels: int64 [n], stored as they are.
        advance: called with the number of rows done since the last call.
    """
    pieces: list[NDArray[np.int32]] = []
    lengths: list[int] = []
    truncated = 0
    with cutting(tokenizer, max_length):
        for start in range(0, len(texts), _CHUNK):
            encodings = tokenizer.encode_batch_fast(list(texts[start : start + _CHUNK]))
            rows = [encoding.ids for encoding in encodings]
            truncated += sum(bool(encoding.overflowing) for encoding in encodings)
            lengths.extend(map(len, rows))
            pieces.append(np.fromiter((token for row in rows for token in row), dtype=np.int32))
            advance(len(rows))
    ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    return Encoded(ids, _offsets(lengths), np.asarray(labels, dtype=np.int64), truncated)


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> tuple[Encoded, NDArray[np.bool_]]:
    """Encode a few texts that nobody labelled, and say which of them were cut to ``max_length`` tokens, bool [n].

    Args:
        tokenizer: cuts its texts here and nowhere else.
        texts: one or more.
        max_length: tokens, special ones included.
    """
    with cutting(tokenizer, max_length):
        encodings = tokenizer.encode_batch_fast(list(texts))
    cut = np.array([bool(encoding.overflowing) for encoding in encodings])
    ids = np.array([token for encoding in encodings for token in encoding.ids], dtype=np.int32)
    offsets = _offsets([len(encoding.ids) for encoding in encodings])
    return Encoded(ids, offsets, np.zeros(len(texts), dtype=np.int64), int(cut.sum())), cut


@contextmanager
def cutting(tokenizer: Tokenizer, max_length: int) -> Iterator[None]:
    """Texts are cut to ``max_length`` tokens inside of the block: a setting that would be saved with the tokenizer."""
    tokenizer.enable_truncation(max_length)
    try:
        yield
    finally:
        tokenizer.no_truncation()


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
