"""Batches: which rows form a batch, and the padded arrays of one batch; rows of a language model's text."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.golden import TOKEN_TYPES
from edgeformer.data.encoding import Encoded, Rows
from edgeformer.data.rows import Int64s
from edgeformer.data.storage import StoredRows

IGNORED = -100  # target of padding, which is not predicted: the index that torch's cross-entropy ignores
WINDOW_BATCHES = 64
"""Number of batches within which rows are sorted by length: padding stays low and batches stay random."""
LEAST_PADDING = 0.25
"""Share of padding from which on a CPU computes a batch without it (benchmarks/unpadded_training.py)."""
_FEISTEL_ROUNDS = 8


def plan_batches(
    rows: Rows | StoredRows[Any], batch_size: int, *, seed: int, epoch: int, bucketed: bool, streamed: bool = False
) -> Sequence[Int64s]:
    """Return the row numbers of every batch of one epoch: every row once, equal for equal arguments.

    ``bucketed``: batches of rows of similar length, in random order, instead of plain shuffling. ``streamed``: compute
    the batches on access, in memory for 64 batches; their order differs from the order in memory.
    """
    if streamed:
        return _StreamedPlan(rows, batch_size, seed=seed, epoch=epoch, bucketed=bucketed)
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(rows)).astype(np.int64)
    if not bucketed:
        return _split_order(order, batch_size)
    lengths = rows.sizes(np.arange(len(rows)))
    batches: list[Int64s] = []
    for window in _split_order(order, batch_size * WINDOW_BATCHES):
        batches.extend(_split_order(window[np.argsort(lengths[window], kind="stable")], batch_size))
    return [batches[number] for number in generator.permutation(len(batches)).tolist()]


def length_of_most(lengths: NDArray[np.integer]) -> int:
    """Return the smallest multiple of 8 tokens, 16 or more, that cuts at most 2% of texts of these lengths."""
    return max(16, int(np.ceil(np.quantile(lengths, 0.98) / 8)) * 8)


def describe_lengths(rows: Rows | StoredRows[Any], batch_size: int, *, bucketed: bool, max_length: int) -> str:
    """Return the lengths of rows, the padding of an epoch's batches, and a shorter ``max_length`` if one fits."""
    lengths = rows.sizes(np.arange(len(rows)))
    batches = plan_batches(rows, batch_size, seed=0, epoch=0, bucketed=bucketed)
    padding = 1 - lengths.sum() / sum(int(lengths[batch].max()) * len(batch) for batch in batches)
    text = (
        f"{lengths.min()} to {lengths.max()} tokens, half of them at most {np.median(lengths):g}; {padding:.0%} of "
        f"batches of {batch_size} is padding"
    )
    shorter = length_of_most(lengths)
    return text if shorter >= max_length else f"{text}; data.max_length {shorter} would read 98% of the texts whole"


def cut_batches(lengths: NDArray[np.integer], max_rows: int, tokens: int | None = None) -> list[Int64s]:
    """Return the row numbers of batches for evaluation, longest rows first: memory runs out at the start or never.

    A batch has at most ``max_rows`` rows and ``tokens`` padded tokens (None: any number), and at least one row.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").astype(np.int64)
    if tokens is None:
        return _split_order(order, max_rows)
    batches = []
    while len(order):
        count = max(1, min(max_rows, tokens // int(lengths[order[0]])))
        batches.append(order[:count])
        order = order[count:]
    return batches


def _split_order(order: Int64s, size: int) -> list[Int64s]:
    if size < 1:
        raise ValueError(f"batch_size must be at least 1, not {size}")
    return [order[start : start + size] for start in range(0, len(order), size)]


class _StreamedPlan(Sequence[Int64s]):
    """The batches of one epoch, computed on access in windows of 64 batches of rows from the whole set."""

    def __init__(self, rows: Rows | StoredRows[Any], batch_size: int, *, seed: int, epoch: int, bucketed: bool) -> None:
        self._rows, self._batch_size, self._bucketed, self._seed = rows, batch_size, bucketed, (seed, epoch)
        generator = np.random.default_rng(self._seed)
        self._keys = generator.integers(2**64, size=_FEISTEL_ROUNDS, dtype=np.uint64).tolist()
        self._numbers = range(-(-len(rows) // batch_size))
        self._window: tuple[int, list[Int64s]] = (-1, [])

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Int64s]:
        # Sequence.__iter__ would treat an IndexError from computing a window as the end.
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = copy.copy(self)
            part._numbers = self._numbers[index]
            return part
        window, offset = divmod(self._numbers[index], WINDOW_BATCHES)
        if self._window[0] != window:
            size = self._batch_size * WINDOW_BATCHES
            positions = np.arange(window * size, min((window + 1) * size, len(self._rows)))
            numbers = permute(positions, len(self._rows), self._keys)
            if self._bucketed:
                numbers = numbers[np.argsort(self._rows.sizes(numbers), kind="stable")]
            batches = _split_order(numbers, self._batch_size)
            if self._bucketed:
                order = np.random.default_rng((*self._seed, window)).permutation(len(batches))
                batches = [batches[number] for number in order.tolist()]
            self._window = window, batches
        return self._window[1][offset]


def permute(positions: Int64s, count: int, keys: Sequence[int]) -> Int64s:
    """Map ``positions`` by a random permutation of ``range(count)`` without computing all of it.

    A Feistel network on the next even number of bits, with 64-bit ``keys``. A result outside the range is mapped again
    until it is inside (cycle walking: Black and Rogaway, 2002), on average fewer than four times.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    permuted = positions.astype(np.uint64)
    outside = np.ones(len(permuted), dtype=bool)
    while outside.any():
        left, right = permuted[outside] >> half, permuted[outside] & mask
        for key in keys:
            hashed = right + np.uint64(key)
            # The last steps of splitmix64 (Steele, Lea and Flood, 2014): every bit depends on every other.
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
                hashed = (hashed ^ (hashed >> np.uint64(shift))) * np.uint64(factor)
            left, right = right, left ^ (hashed & mask)
        permuted[outside] = (left << half) | right
        outside = permuted >= np.uint64(count)
    return permuted.astype(np.int64)


def _places(rows: Rows, indices: NDArray[np.integer], lengths: Int64s, width: int) -> tuple[NDArray[np.bool_], Int64s]:
    """Return where a padded batch [B, ``width``] has tokens, and the places of these tokens in ``rows``."""
    positions = np.arange(width, dtype=np.int64)
    mask = positions < lengths[:, None]
    return mask, (rows.offsets[indices][:, None] + positions)[mask]


def _padded(mask: NDArray[np.bool_], values: NDArray[Any], padding: int) -> Int64s:
    batch = np.full(mask.shape, padding, dtype=np.int64)
    batch[mask] = values
    return batch


def collate(encoded: Encoded, indices: NDArray[np.integer], pad_id: int) -> dict[str, Int64s]:
    """Return the rows at ``indices`` as ``input_ids`` and ``attention_mask``, int64 [B, S], S the longest row.

    The mask is 0 for padding, 1 for tokens, and 2 for tokens that are read and not pooled. Rows with token types also
    have ``token_type_ids``, 0 for padding.
    """
    lengths = encoded.offsets[np.asarray(indices) + 1] - encoded.offsets[indices]
    mask, places = _places(encoded, indices, lengths, int(lengths.max(initial=0)))
    batch = {"input_ids": _padded(mask, encoded.ids[places], pad_id), "attention_mask": mask.astype(np.int64)}
    if encoded.unpooled is not None:
        batch["attention_mask"][np.arange(mask.shape[1]) < encoded.unpooled[indices][:, None]] *= 2
    if encoded.types is not None:
        batch[TOKEN_TYPES] = _padded(mask, encoded.types[places], 0)
    return batch


def concatenate(batch: dict[str, Int64s], least_padding: float = LEAST_PADDING) -> dict[str, NDArray[Any]]:
    """Return a batch without padding: tokens [B, S] become [1, N]. One with less padding, or an empty row, stays.

    Its rows, or the documents of packed rows, are described by the fields of ``models.segments.Segments``.
    """
    real = batch["attention_mask"] > 0 if "attention_mask" in batch else batch["targets"] != IGNORED
    if not real[:, 0].all() or 1 - real.mean() < least_padding:
        return batch
    positions = batch.get("positions", np.broadcast_to(np.arange(real.shape[1]), real.shape))[real]
    tokens = {name: batch[name][real][None] for name in ("input_ids", TOKEN_TYPES, "targets") if name in batch}
    tokens["ends"] = np.append(np.flatnonzero(positions == 0), len(positions)).astype(np.int32)
    tokens["places"] = (np.cumsum(positions == 0) - 1) * (positions.max() + 1) + positions
    return {**batch, **tokens, "positions": positions}


def pad_batch(batch: dict[str, Int64s], length: int, pad: int) -> dict[str, Int64s]:
    """Pad a batch of :func:`collate` or :func:`text_batch` to ``length`` tokens per row, masked and without targets."""
    added = length - batch["input_ids"].shape[1]
    fill = {"input_ids": pad, "attention_mask": 0, TOKEN_TYPES: 0, "targets": IGNORED, "positions": 0}
    return {
        name: np.pad(array, ((0, 0), (0, added)), constant_values=fill[name]) if name in fill else array
        for name, array in batch.items()
    }


def padded_lengths(longest: int, count: int) -> Int64s:
    """Return at most ``count`` lengths at equal distances up to ``longest``, ascending, int64 [n]."""
    return np.unique(-(-longest * np.arange(1, count + 1) // count)).astype(np.int64)


@dataclass(frozen=True)
class TextRows(Rows):
    """Rows of a language model. Inputs are all tokens of a row but the last, targets all but the first.

    ``starts``: packed rows: position of each token in its document, 0 for the boundary token in front of the document
    and for the first token of a row. None: every row is one paragraph from its start.
    """

    tokens: int  # to be predicted in all rows
    words: int  # separated by white space, that these tokens spell in full, plus one for each predicted end
    truncated: int  # paragraphs cut to the sequence length
    starts: NDArray[np.int32] | None = None

    @property
    def lengths(self) -> Int64s:
        """Inputs per row, int64 [n]."""
        return np.diff(self.offsets) - 1


def paragraph_rows(
    encoded: Encoded, words: int, boundary: int, sequence_length: int, begin: Sequence[int] | None = None
) -> TextRows:
    """Make one row per paragraph: ``begin`` (None: boundary), tokens, boundary.

    Rows are cut to ``sequence_length`` + 1 tokens (as ``words``).
    """
    begin = (boundary,) if begin is None else begin
    sizes = np.minimum(encoded.lengths + len(begin) + 1, sequence_length + 1)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    places = positions - len(begin)  # of a token in its paragraph
    is_text = (places >= 0) & (places < np.repeat(encoded.lengths, sizes))
    ids = np.full(len(positions), boundary, dtype=np.int32)
    ids[is_text] = encoded.ids[(np.repeat(encoded.offsets[:-1], sizes) + places)[is_text]]
    ids[places < 0] = np.asarray(begin, dtype=np.int32)[positions[places < 0]]
    truncated = int((encoded.lengths + len(begin) > sequence_length).sum())
    return TextRows(ids, offsets, int((sizes - 1).sum()), words, truncated)


class Packer:
    """Packs documents into rows: boundary d₁ boundary d₂ … boundary, independent of the pieces that they come in.

    Rows of ``sequence_length`` + 1 tokens overlap by one, so that each token but the first of all is predicted once. A
    document that continues in the next row starts there at position 0.
    """

    def __init__(self, boundary: int, sequence_length: int) -> None:
        self._boundary, self._length = boundary, sequence_length
        # Tokens that are in no row yet, from the first token of the next row on.
        self._ids = np.array([boundary], dtype=np.int32)
        self._is_boundary = np.ones(1, dtype=bool)

    def rows(self, encoded: Encoded, words: int, *, last: bool) -> TextRows:
        """Return the rows that these documents of ``words`` words complete. ``last``: no more documents follow."""
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
        positions = np.arange(offsets[-1])
        source = positions + np.repeat(begins - offsets[:-1], sizes)
        is_first = is_boundary[source]
        is_first[offsets[:-1]] = True
        starts = (positions - np.maximum.accumulate(np.where(is_first, positions, 0))).astype(np.int32)
        return TextRows(ids[source], offsets, end, words, 0, starts)


def text_batch(
    rows: TextRows, indices: NDArray[np.integer], boundary: int, *, pad_to: int | None = None
) -> dict[str, Int64s]:
    """Return the rows at ``indices`` as int64 [B, S]: ``input_ids``, ``targets`` and, for packed rows, ``positions``.

    S is the longest row. Shorter rows are padded with boundary tokens that predict nothing (``IGNORED``). ``pad_to``: S
    is this length, and padding is predicted like text (training.score_padding); ValueError if a row is longer.
    """
    lengths = rows.lengths[indices]
    longest = int(lengths.max(initial=0))
    if pad_to is not None and longest > pad_to:
        raise ValueError(f"a row of {longest} inputs cannot be padded to {pad_to}")
    mask, places = _places(rows, indices, lengths, longest if pad_to is None else pad_to)
    targets = _padded(mask, rows.ids[places + 1], IGNORED if pad_to is None else boundary)
    batch = {"input_ids": _padded(mask, rows.ids[places], boundary), "targets": targets}
    if rows.starts is not None:
        batch["positions"] = _padded(mask, rows.starts[places], 0)
    return batch
