"""Which rows go into which batch where there are too many rows to write all their numbers down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from edgeformer.data.encoding import Encoded, TrainingRows

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


# Rows of a language model's text, which rows go into which batch, and the padded arrays of one batch.


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
