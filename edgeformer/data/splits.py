"""Splits: protocols that make train, validation and test sets from the parts, row sampling, overlap between sets.

All choices are seeded. Overlap is a text that is contained in another text, word for word.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.data_config import Amount, DataConfig, SpanData
from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import OverlapCount
from edgeformer.data.cleaning import clean, count_words
from edgeformer.data.rows import Int64s, LabelledTexts, Row, Text, comparison_key, join_pair, label_counts, text_parts

MIN_ROWS = 10
IMPORTED_SETS = {"train": ("train",), "validation": ("validation", "test"), "test": ("test", "validation")}
"""Imported models: set → parts that it can be read from, in order of preference."""
_CHUNK_CHARACTERS = 2_000_000  # training texts compared at once
_MIN_WORDS = 3  # minimum words of a training text inside a test text: "the film" in a review is no leak


def set_parts(config: DataConfig) -> dict[str, tuple[str, ...]]:
    """Return set → parts that it is drawn from, in the protocol's order: train, validation, test sets."""
    pool = tuple(part for part in ("train", "validation") if part in config.parts)
    validation = "validation" if "validation" in config.parts else "train"
    protocols: dict[str, dict[str, tuple[str, ...]]] = {
        "random-split": {"train": pool, "validation": pool, "random-split": pool},
        "stratified": {"train": pool, "validation": pool, "test": pool},
        "glue-dev": {"train": ("train",), "validation": ("train",), "glue-dev": ("validation",)},
        "sst-test": {"train": ("train",), "validation": ("validation",), "sst-test": ("sst-test",)},
        "given": {"train": ("train",), "validation": (validation,), "given": ("test",)},
        "imported": {
            name: tuple(part for part in names if part in config.parts)[:1] for name, names in IMPORTED_SETS.items()
        },
    }
    sets = protocols[config.split]
    used = {part for parts in sets.values() for part in parts}
    for part in config.parts:
        if part not in used:
            if part in sets:
                raise DataError(
                    f"data.parts: with split: {config.split} a part must not have the name {part!r} of a set; rename it"
                )
            sets[part] = (part,)
    return sets


def unknown_set(name: str, sets: Iterable[str]) -> InputError:
    """Return the error for a set that the data does not have."""
    allowed = ", ".join(dict.fromkeys(("test", *(key for key in sets if key != "train"))))
    return InputError(f"--split {name!r}: no such set; allowed: {allowed}")


def missing_set(name: str) -> DataError:
    """Return the error for a model that was imported without the data of a set."""
    data = "training text" if name == "train" else f"{name} set"
    own_file = "" if name == "train" else ", or score a file: evaluate --data FILE"
    return DataError(
        f"data.parts: this imported model has no {data}; import it again with a folder that has {name}.tsv (or .csv, "
        f".jsonl): --data DIR{own_file}"
    )


def check_classes(config: DataConfig, counts: Sequence[int]) -> None:
    """Raise DataError if the training set, with ``counts`` rows of each label, has fewer than two classes."""
    if not config.labels:
        return
    present = [label for label, count in zip(config.labels, counts, strict=True) if count]
    if isinstance(config, SpanData):
        if not present:
            raise DataError("the training set has no labelled span; it needs some of data.labels "
                            f"({', '.join(config.labels)})")  # fmt: skip
        return
    if len(present) < 2:
        label = repr(present[0]) if present else "nothing"
        raise DataError(
            f"the training set has one class only: all {sum(counts)} rows are labelled {label}; it needs rows of at "
            f"least two of data.labels ({', '.join(config.labels)})"
        )


def split(config: DataConfig, parts: dict[str, LabelledTexts]) -> dict[str, LabelledTexts]:
    """Make the sets of the protocol: train, validation, its test set, then the other parts. Raises DataError."""
    sets = make_sets(config, tuple(set_parts(config)), parts)
    scores, several = sets["train"].labels, config.separator is not None
    check_classes(config, label_counts(scores, len(config.labels), several=several))
    if not config.labels and np.ptp(scores) == 0:
        raise DataError(f"the training set: all {len(scores)} rows have the same score; there is nothing to learn")
    return sets


def make_sets(config: DataConfig, names: Sequence[str], parts: dict[str, LabelledTexts]) -> dict[str, LabelledTexts]:
    """Make the sets ``names`` of :func:`split` from the parts of :func:`set_parts`. Raises DataError."""
    sources = set_parts(config)
    for name in names:
        if not sources[name]:
            raise missing_set(name)
    indices: dict[str, Int64s] = {}
    if any(sources[name] == sources["train"] for name in names):
        pool = _pool(config, parts, sources["train"])
        _check_pool(config, sources["train"], len(pool))
        # With scores the first text decides, so that a query keeps its documents.
        texts: list[Text] = pool.texts if config.labels else [text_parts(text)[0] for text in pool.texts]
        cuts: Sequence[Int64s] = ()
        if config.split == "random-split":
            # 80/10/10 of a seeded permutation, rounded down; the rest goes to the test set (gives the paper's sizes).
            order = np.random.default_rng(config.split_seed).permutation(len(pool))
            cuts = np.split(order, [len(pool) * 8 // 10, len(pool) * 8 // 10 + len(pool) // 10])
        elif config.split == "stratified":
            hashes = np.array([content_hash(comparison_key(text).encode()) for text in texts], dtype=np.uint64)
            cuts = _stratified(config, _strata(config, pool.labels), hashes)
        elif sources["validation"] == sources["train"]:
            cuts = hold_out([join_pair(text) for text in texts], config.split_seed)
        indices = dict(zip(sources, cuts, strict=False))
    sets: dict[str, LabelledTexts] = {}
    for name in names:
        rows = pool.take(indices[name]) if name in indices else _pool(config, parts, sources[name])
        rows = _balance(config, rows)
        kept = _kept_rows(config, name, _groups(config, rows))
        sets[name] = _balance(config, rows.take(kept)) if name in config.rows else rows
    return sets


def cut_stream(config: DataConfig, texts: Iterable[tuple[Text, int]]) -> NDArray[np.int8]:
    """Return the set of each row of a streamed ``stratified`` split: 0 training, 1 validation, 2 test, −1 none.

    ``texts``: the texts of the pool with their labels; each takes 16 bytes. Raises DataError.
    """
    keys = ((comparison_key(text if config.labels else text_parts(text)[0]), label) for text, label in texts)
    facts = np.fromiter(
        ((label, content_hash(key.encode())) for key, label in keys), dtype=[("label", np.int64), ("text", np.uint64)]
    )
    strata = _strata(config, facts["label"])
    sources = set_parts(config)
    _check_pool(config, sources["train"], len(facts))
    set_of_row = np.full(len(facts), -1, dtype=np.int8)
    cuts = _stratified(config, strata, facts["text"])
    for number, (name, rows) in enumerate(zip(sources, cuts, strict=False)):
        set_of_row[rows[_kept_rows(config, name, strata[rows])]] = number
    return set_of_row


def _check_pool(config: DataConfig, parts: Iterable[str], rows: int) -> None:
    if rows < MIN_ROWS:
        pool = f"data.parts {' + '.join(parts)}"
        raise DataError(f"{pool}: {rows} rows; split {config.split!r} needs at least {MIN_ROWS}")


def _kept_rows(config: DataConfig, name: str, groups: Int64s) -> Int64s:
    """Return the numbers of the rows of a set that ``data.rows`` keeps. Raises DataError: too few rows, or none."""
    rows = np.arange(len(groups))
    if name in config.rows:
        rows = sample(groups, row_count(config.rows[name], len(groups), f"data.rows.{name}"), config.split_seed)
    if not len(rows):
        raise DataError(f"split {config.split!r}: the {name} set would be empty; add rows to data.parts")
    return rows


def _strata(config: DataConfig, labels: Int64s) -> Int64s:
    """Return the groups by which rows are sampled, int64 [n]: the labels; rows with scores are one group."""
    return labels if config.labels else np.zeros_like(labels)


def content_hash(content: bytes) -> int:
    """Return a 64-bit hash of bytes, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _stratified(config: DataConfig, labels: Int64s, hashes: NDArray[np.uint64]) -> list[Int64s]:
    """Return the row numbers of training, validation and test rows: of every label two tenths are held out.

    Rows with equal hashes stay together, with the label of the first of them: no test text is a training text.
    """
    strata = labels
    if config.separator is not None:
        # The rarest label of each row, −1 without labels: combinations of labels can be too rare to be tested.
        strata = np.full(len(labels), -1, dtype=np.int64)
        counts = label_counts(labels, len(config.labels), several=True)
        for label in sorted(range(len(counts)), key=lambda label: -counts[label]):
            strata[labels >> label & 1 == 1] = label
    _, first_rows, numbers = np.unique(hashes, return_index=True, return_inverse=True)
    group, heads = first_rows[numbers], np.sort(first_rows)
    set_of_head = np.zeros(len(labels), dtype=np.int8)  # 0 training, 1 validation, 2 test
    generator = np.random.default_rng(config.split_seed)
    for stratum in np.unique(strata):
        members = generator.permutation(heads[strata[heads] == stratum])
        count = max(1, round(len(members) / 10)) if len(members) > 2 else 0
        set_of_head[members[:count]], set_of_head[members[count : 2 * count]] = 2, 1
    return [np.flatnonzero(set_of_head[group] == number) for number in range(3)]


def _pool(config: DataConfig, parts: dict[str, LabelledTexts], names: tuple[str, ...]) -> LabelledTexts:
    """Return the rows of the parts ``names`` from which sets are drawn: the longest or shortest, balanced."""
    rows = [parts[name] for name in names]
    pool = rows[0] if len(rows) == 1 else LabelledTexts.joined(rows, with_sources=config.balance is not None)
    share = config.longest or config.shortest
    if share is not None:
        words = count_words(pool.texts, config.cleaning)
        order = np.argsort(words if config.longest is None else -words, kind="stable")
        pool = pool.take(np.sort(order[: round(share * len(words))]))
    return _balance(config, pool)


def _balance(config: DataConfig, rows: LabelledTexts) -> LabelledTexts:
    """Reduce every group to the size of the smallest group, if data.balance is set."""
    if config.balance is None:
        return rows
    groups = _groups(config, rows)
    names, sizes = np.unique(groups, return_counts=True)
    return rows.take(_draw_from_groups(groups, names, [int(min(sizes, default=0))] * len(names), config.split_seed))


def _groups(config: DataConfig, rows: LabelledTexts) -> Int64s:
    """Return the group of each row, int64 [n]: the group that is balanced, else the stratum."""
    sources = np.zeros(len(rows), np.int64) if rows.sources is None else rows.sources
    groups = {"source": sources, "label-and-source": sources * len(config.labels) + rows.labels}
    return groups.get(config.balance or "label", _strata(config, rows.labels))


def hold_out(texts: list[str], seed: int) -> tuple[Int64s, Int64s]:
    """Hold out about a tenth of ``texts`` such that no held-out text is a training text or a part of one.

    A plain random tenth measures nothing if a file holds phrases of its own sentences (SST-2). So the texts that are in
    no other text are drawn in random order, and a text is held out when *all* texts that contain it are. If nothing or
    over a fifth would be held out, it is a plain random tenth. Returns row numbers of both sets, in file order.
    """
    target = len(texts) // 10
    numbers: dict[str, int] = {}
    cleaned = (clean(text, version=1) for text in texts)
    distinct = np.array([numbers.setdefault(text, len(numbers)) for text in cleaned], dtype=np.int64)
    index = TextIndex(numbers)
    containing = [index.containing(text) or [number] for text, number in numbers.items()]
    permutation = np.random.default_rng(seed).permutation(len(numbers))
    outermost_ranks = np.where([len(outer) == 1 for outer in containing], permutation, -1)
    # The rank of a text is the largest random rank of the texts around it.
    distinct_ranks = np.array([outermost_ranks[outer].max() for outer in containing])
    ranks = distinct_ranks[distinct]
    # Rows with a lower rank than the first row beyond the target: groups are held out completely or not at all.
    is_held_out = ranks < np.sort(ranks)[target]
    if not 0 < is_held_out.sum() <= len(texts) // 5:
        is_held_out = np.zeros(len(texts), dtype=bool)
        is_held_out[np.random.default_rng(seed).permutation(len(texts))[:target]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def row_count(amount: Amount, rows: int, key: str) -> int:
    """Convert ``amount`` (a count or a share) to a number of rows, at least one. Raises DataError: too many."""
    count = max(1, round(amount * rows)) if isinstance(amount, float) else amount
    if count > rows:
        raise DataError(
            f"{key}: {count:,} rows requested, but there are {rows:,}; use a smaller number, or leave the key out to "
            "use all"
        )
    return count


def sampled_rows(
    rows: Callable[..., Iterator[Row]], amount: Amount, seed: int, key: str, skipped: list[str], *, by_label: bool
) -> Iterator[Row]:
    """Sample the rows of a source, ``by_label`` with its shares of labels. Reads it twice: first 8 bytes a row."""
    numbers: dict[str, int] = {}
    labels = (str(row.label) if by_label else "" for row in rows(skipped=[]))
    strata = np.fromiter((numbers.setdefault(label, len(numbers)) for label in labels), np.int64)
    is_sampled = np.zeros(len(strata), dtype=bool)
    is_sampled[sample(strata, row_count(amount, len(strata), key), seed)] = True
    yield from itertools.compress(rows(skipped=skipped), is_sampled.tolist())


def sample(strata: Int64s, count: int, seed: int) -> Int64s:
    """Return the numbers of ``count`` rows in order, sampled in proportion to the strata.

    Shares are rounded by the largest remainders (Hamilton's method); of equal remainders the first are rounded up.
    """
    names, sizes = np.unique(strata, return_counts=True)
    shares = [divmod(size * count, max(1, len(strata))) for size in sizes.tolist()]
    missing = count - sum(quotient for quotient, _ in shares)
    rounded_up = set(sorted(range(len(shares)), key=lambda place: -shares[place][1])[:missing])
    counts = [quotient + (place in rounded_up) for place, (quotient, _) in enumerate(shares)]
    return _draw_from_groups(strata, names, counts, seed)


def _draw_from_groups(groups: Int64s, names: Int64s, counts: Sequence[int], seed: int) -> Int64s:
    """Return the numbers, in order, of ``counts[i]`` rows of group ``names[i]``. A smaller count gives a subset."""
    generator = np.random.default_rng(seed)
    rows = [np.empty(0, dtype=np.int64)]
    for name, count in zip(names.tolist(), counts, strict=True):
        rows.append(generator.permutation(np.flatnonzero(groups == name))[:count])
    return np.sort(np.concatenate(rows))


class TextIndex:
    """Index for finding the texts that contain a text: the same words in sequence, or equal."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._padded = [f" {' '.join(text.split())} " for text in texts]
        self._texts_of_word: dict[str, set[int]] = {}
        for number, text in enumerate(self._padded):
            for word in text.split():
                self._texts_of_word.setdefault(word, set()).add(number)

    def containing(self, text: str) -> list[int]:
        """Return the numbers of the texts that contain ``text``. A text without words is in no text."""
        words = text.split()
        rarest_first = sorted((self._texts_of_word.get(word, set()) for word in words), key=len)
        padded = f" {' '.join(words)} "
        candidates = set.intersection(*rarest_first) if words else ()
        return [number for number in candidates if padded in self._padded[number]]


class OverlapCounter:
    """Counts texts of other sets that are in the training set, after cleaning: equal and overlapping texts.

    An overlapping text of any length is contained word for word in a training text, or it contains a
    training text of three or more words. Memory holds the texts of the other sets and some training texts.
    """

    def __init__(self, other_sets: Mapping[str, Sequence[str]]) -> None:
        self._numbers: dict[str, int] = {}
        self._sets = {
            name: np.array([self._numbers.setdefault(clean(text), len(self._numbers)) for text in texts], np.int64)
            for name, texts in other_sets.items()
        }
        self._index = TextIndex(self._numbers)
        self._is_equal, self._overlaps = (np.zeros(len(self._numbers), dtype=bool) for _ in range(2))
        self._pending: dict[str, None] = {}
        self._characters = 0

    def add(self, training: Iterable[str]) -> None:
        """Add training texts."""
        for text in training:
            cleaned = clean(text)
            self._pending[cleaned] = None
            self._characters += len(cleaned)
            if self._characters > _CHUNK_CHARACTERS:
                self._compare()

    def _compare(self) -> None:
        texts, self._pending, self._characters = self._pending, {}, 0
        index = TextIndex(texts)
        for text, number in self._numbers.items():
            if text in texts:
                self._is_equal[number] = True
            elif not self._overlaps[number]:
                self._overlaps[number] = bool(index.containing(text))
        for text in texts:
            if len(text.split()) >= _MIN_WORDS:
                self._overlaps[self._index.containing(text)] = True

    def counts(self) -> tuple[OverlapCount, ...]:
        """Return the counts of each other set, after all training texts."""
        self._compare()
        contained = self._overlaps & ~self._is_equal
        return tuple(
            OverlapCount(test_set=name, test_rows=len(texts), duplicates=int(self._is_equal[texts].sum()),
                         contained=int(contained[texts].sum()))
            for name, texts in self._sets.items()
        )  # fmt: skip
