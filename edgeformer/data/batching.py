"""Rows of a language model's text, which rows go into which batch, and the padded arrays of one batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.encoding import Encoded

Int64s = NDArray[np.int64]
IGNORED = -100
"""The target of an input after which nothing is predicted (padding); torch's cross-entropy leaves it out."""
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
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths)).astype(np.int64)
    if not bucketed:
        return cut(order, batch_size)
    batches: list[Int64s] = []
    for window in cut(order, batch_size * WINDOW_BATCHES):
        batches.extend(cut(window[np.argsort(lengths[window], kind="stable")], batch_size))
    return [batches[i] for i in generator.permutation(len(batches)).tolist()]


def ordered_batches(lengths: NDArray[np.integer], batch_size: int) -> list[Int64s]:
    """Row numbers of batches for evaluation, longest rows first: what needs most memory fails first."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").astype(np.int64)
    return cut(order, batch_size)


def cut(order: Int64s, size: int) -> list[Int64s]:
    """``order`` in pieces of ``size``, the last perhaps shorter. Raises ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, not {size}")
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


_FILLING = {"attention_mask": 0, "targets": IGNORED, "positions": 0}
"""Of arrays with one number for each token: what padding has there."""


def lengthened(batch: dict[str, Int64s], length: int, pad: int) -> dict[str, Int64s]:
    """A batch whose rows have ``length`` tokens: padding that is no text and predicts nothing goes behind them.

    Args:
        batch: of :func:`collate` or :func:`text_batch`; arrays by row stay as they are.
        length: at least that of the batch.
        pad: the token that fills up rows.
    """
    more = length - batch["input_ids"].shape[1]
    filling = {"input_ids": pad, **_FILLING}
    return {
        name: np.pad(array, ((0, 0), (0, more)), constant_values=filling[name]) if name in filling else array
        for name, array in batch.items()
    }


def few_lengths(longest: int, count: int) -> Int64s:
    """At most ``count`` lengths, rising evenly up to ``longest``: int64 [n]."""
    return np.unique(-(-longest * np.arange(1, count + 1) // count)).astype(np.int64)


@dataclass(frozen=True)
class TextRows:
    """Row ``i`` is ``ids[offsets[i]:offsets[i + 1]]``: inputs are all but the last token, targets all but the first.

    ``starts``      packed rows: each token's place in its document, 0 for the boundary token in front of it and for
                    the first token of a row; None: every row is one paragraph from its start
    ``tokens``      tokens to be predicted in all rows
    ``words``       words (between white space) that these tokens spell in full, plus one for each predicted end
    ``paragraphs``  paragraphs that the rows were made of
    ``truncated``   paragraphs cut to the sequence length; packed rows cut none
    """

    ids: NDArray[np.int32]
    offsets: Int64s
    starts: NDArray[np.int32] | None
    tokens: int
    words: int
    paragraphs: int
    truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64s:
        """Inputs per row, int64 [n]."""
        return np.diff(self.offsets) - 1

    def sizes(self, numbers: Int64s) -> Int64s:
        """Tokens of the rows ``numbers``, int64 [n]."""
        return np.diff(self.offsets)[numbers]

    def loaded(self, numbers: Int64s) -> tuple[TextRows, Int64s]:
        """As of :class:`~edgeformer.data.encoding.TrainingRows`: all rows are in memory."""
        return self, numbers


def paragraph_rows(encoded: Encoded, words: int, boundary: int, sequence_length: int) -> TextRows:
    """One row per paragraph: boundary, tokens, boundary; cut to ``sequence_length`` + 1 tokens.

    Args:
        words: of what is left of the paragraphs.
    """
    sizes = np.minimum(encoded.lengths + 2, sequence_length + 1)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    of_text = (places >= 1) & (places <= np.repeat(encoded.lengths, sizes))
    ids = np.full(len(places), boundary, dtype=np.int32)
    ids[of_text] = encoded.ids[(np.repeat(encoded.offsets[:-1], sizes) + places - 1)[of_text]]
    cut = cut_paragraphs(encoded, sequence_length)
    return TextRows(ids, offsets, None, int((sizes - 1).sum()), words, len(encoded), len(cut))


def cut_paragraphs(encoded: Encoded, sequence_length: int) -> Int64s:
    """Numbers of the paragraphs of which :func:`paragraph_rows` leaves something out, be it their end only."""
    return np.flatnonzero(encoded.lengths + 2 > sequence_length + 1).astype(np.int64)


class Packer:
    """Packs documents into rows, whatever pieces they come in: boundary d₁ boundary d₂ … boundary.

    Rows have ``sequence_length`` + 1 tokens, the last may be shorter. They overlap by one token, so that each token but
    the very first is predicted exactly once. A document that goes on in the next row starts there at place 0 again: a
    row knows nothing of the one in front of it.
    """

    def __init__(self, boundary: int, sequence_length: int) -> None:
        self._boundary, self._length = boundary, sequence_length
        # What is in no row yet, from the token on that the next row begins with.
        self._ids = np.array([boundary], dtype=np.int32)
        self._is_boundary = np.ones(1, dtype=bool)

    def rows(self, encoded: Encoded, words: int, *, last: bool) -> TextRows:
        """The rows that are full with these documents, which have ``words`` words. ``last``: no more follow."""
        is_boundary = np.zeros(len(encoded.ids) + len(encoded), dtype=bool)
        is_boundary[encoded.offsets[1:] + np.arange(len(encoded))] = True
        ids = np.full(len(is_boundary), self._boundary, dtype=np.int32)
        ids[~is_boundary] = encoded.ids
        ids, is_boundary = np.append(self._ids, ids), np.append(self._is_boundary, is_boundary)
        end = len(ids) - 1 if last else (len(ids) - 1) // self._length * self._length
        self._ids, self._is_boundary = ids[end:], is_boundary[end:]

        begins = np.arange(0, end, self._length)
        sizes = np.minimum(begins + self._length, end) + 1 - begins
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        places = np.arange(offsets[-1])
        source = places + np.repeat(begins - offsets[:-1], sizes)
        first = is_boundary[source]
        first[offsets[:-1]] = True
        starts = (places - np.maximum.accumulate(np.where(first, places, 0))).astype(np.int32)
        return TextRows(ids[source], offsets, starts, end, words, len(encoded), 0)


def packed_rows(encoded: Encoded, words: int, boundary: int, sequence_length: int) -> TextRows:
    """All documents as :class:`Packer` packs them."""
    return Packer(boundary, sequence_length).rows(encoded, words, last=True)


def text_batch(
    rows: TextRows, indices: NDArray[np.integer], boundary: int, *, pad_to: int | None = None
) -> dict[str, Int64s]:
    """The rows at ``indices`` as int64 [B, S]: ``input_ids``, ``targets`` and, for packed rows, ``positions``.

    S is the longest row. Behind a shorter one there are boundary tokens that predict nothing (``IGNORED``) and that
    are documents of their own (position 0).

    Args:
        pad_to: S is this, and the padding is to be predicted like text (training.score_padding).

    Raises:
        ValueError: a row is longer than ``pad_to``.
    """
    begins = rows.offsets[indices]
    lengths = rows.lengths[indices]
    longest = int(lengths.max(initial=0))
    if pad_to is not None and longest > pad_to:
        raise ValueError(f"a row of {longest} inputs cannot be padded to {pad_to}")
    places = np.arange(longest if pad_to is None else pad_to, dtype=np.int64)
    there = places < lengths[:, None]
    source = (begins[:, None] + places)[there]
    batch = {
        "input_ids": np.full(there.shape, boundary, dtype=np.int64),
        "targets": np.full(there.shape, IGNORED if pad_to is None else boundary, dtype=np.int64),
    }
    batch["input_ids"][there] = rows.ids[source]
    batch["targets"][there] = rows.ids[source + 1]
    if rows.starts is not None:
        batch["positions"] = np.zeros(there.shape, dtype=np.int64)
        batch["positions"][there] = rows.starts[source]
    return batch
