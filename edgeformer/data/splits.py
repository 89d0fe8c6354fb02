"""Splits: protocols that make train, validation and test sets of the parts, samples of rows, and overlap between sets.

All choices are seeded. Overlap is a text that is contained in another text, word for word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.data_config import Amount, DataConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.artifacts.manifest import OverlapCount
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.data.cleaning import clean, clean_for_splits, count_words
from edgeformer.data.rows import LabelledTexts, OnRow, Row, Text, comparison_key, join_pair, label_counts

Int64s = NDArray[np.int64]
MIN_ROWS = 10
IMPORTED_SETS = {"train": ("train",), "validation": ("validation", "test"), "test": ("test", "validation")}
"""Set of a model that was trained elsewhere → parts that it can be read from, in order of preference."""
_RUN_WORDS = 3
_CHUNK_PLACES = 2_000_000
_CHUNK_CHARACTERS = 2_000_000
"""Of training texts that are compared at once."""
_UNKNOWN_WORD = -1
"""Number of every word that no other set has."""
_MIN_WORDS = 3
"""A training text inside a test text counts from this many words on: "the film" in a review is no leak."""


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
        "imported": {name: first_of(config.parts, *names) for name, names in IMPORTED_SETS.items()},
    }
    sets = protocols[config.split]
    used = {part for parts in sets.values() for part in parts}
    for part in config.parts:
        if part not in used:
            if part in sets:
                raise DataError(f"data.parts: under split {config.split!r} no part may be called {part!r}; rename it")
            sets[part] = (part,)
    return sets


def first_of(parts: Collection[str], *names: str) -> tuple[str, ...]:
    """Return the first of ``names`` that is one of ``parts``, alone; an empty tuple if none is."""
    return tuple(name for name in names if name in parts)[:1]


def missing_set_message(name: str, *, own_file: bool = False) -> str:
    """Return the message for a model that was imported without the data of a set.

    ``own_file``: the set was to be scored, for which the user can name another file.
    """
    data = "its training text" if name == "train" else f"a {name} set"
    return (
        f"data.parts: this model was trained elsewhere, and nothing is known of {data}; import it again with a folder "
        f"that has {name}.tsv (or .csv, .jsonl): --data DIR"
        + (", or give evaluate a file of its own: --data FILE" if own_file else "")
    )


def check_sets_differ(config: DataConfig) -> None:
    """Raise DataError if training would select its epoch on the set that it reports as test set.

    The validation and test sets of an imported model replace each other where its artifacts are judged.
    """
    sets = set_parts(config)
    if config.split != "imported" or sets["validation"] != sets["test"] or not sets["test"]:
        return
    (part,) = sets["test"]
    missing, protocol = ("validation", "given") if part == "test" else ("test", "glue-dev")
    raise DataError(
        f"data.split: imported has one part, {part}, for validation and test: training would select its epoch on the "
        f"set that it reports; add the part {missing}, or hold out a tenth of train: --set "
        f"data.split={protocol}"
    )


def check_classes(config: DataConfig, counts: Sequence[int]) -> None:
    """Raise DataError if the training set, with ``counts`` rows of each label, has fewer than two classes."""
    present = np.flatnonzero(counts)
    if not len(present):
        raise DataError("the training set has no row with a label; it needs rows with at least two of data.labels")
    if len(present) < 2:
        raise DataError(
            f"the training set has one class only: all {sum(counts)} rows are labelled "
            f"{config.labels[int(present[0])]!r}; it needs rows of at least two of data.labels "
            f"({', '.join(config.labels)})"
        )


def split(config: DataConfig, parts: dict[str, LabelledTexts]) -> dict[str, LabelledTexts]:
    """Make the sets of the protocol: train, validation, its test set, then the parts that the protocol does not use.

    Raises DataError: a set is empty, there are fewer than 10 rows to train on, or they have one class only.
    """
    sets = make_sets(config, tuple(set_parts(config)), parts)
    several = config.separator is not None
    check_classes(config, label_counts(sets["train"].labels, len(config.labels), several=several))
    return sets


def make_sets(config: DataConfig, names: Sequence[str], parts: dict[str, LabelledTexts]) -> dict[str, LabelledTexts]:
    """Make the sets ``names`` of :func:`split` from the parts that :func:`set_parts` lists for them. Raises DataError.

    Without a protocol's own validation set, a tenth of train is held out; the training parts of random-split and
    stratified are cut 80/10/10.
    """
    sources = set_parts(config)
    for name in names:
        if not sources[name]:
            raise DataError(missing_set_message(name))
    indices: dict[str, Int64s] = {}
    if any(sources[name] == sources["train"] for name in names):
        pool = _pool(config, parts, sources["train"])
        if len(pool) < MIN_ROWS:
            raise DataError(
                f"data.parts {' + '.join(sources['train'])}: {len(pool)} rows; split {config.split!r} needs at least "
                f"{MIN_ROWS} of them"
            )
        cuts: Sequence[Int64s] = ()
        if config.split == "random-split":
            # 80/10/10 of a seeded permutation, rounded down; the rest goes to the test set (gives the paper's sizes).
            order = np.random.default_rng(config.split_seed).permutation(len(pool))
            cuts = np.split(order, [len(pool) * 8 // 10, len(pool) * 8 // 10 + len(pool) // 10])
        elif config.split == "stratified":
            strata = pool.labels
            if config.separator is not None:
                # The rarest label of each row, −1 without labels: combinations of labels can be too rare to be tested.
                strata = np.full(len(pool), -1, dtype=np.int64)
                counts = label_counts(pool.labels, len(config.labels), several=True)
                for label in sorted(range(len(counts)), key=lambda label: -counts[label]):
                    strata[pool.labels >> label & 1 == 1] = label
            cuts = _stratified(pool.texts, strata, config.split_seed)
        elif sources["validation"] == sources["train"]:
            cuts = hold_out([join_pair(text) for text in pool.texts], config.split_seed)
        indices = dict(zip(sources, cuts, strict=False))
    sets: dict[str, LabelledTexts] = {}
    for name in names:
        rows = pool.take(indices[name]) if name in indices else _pool(config, parts, sources[name])
        rows = _balance(config, rows)
        if (amount := config.rows.get(name)) is not None:
            count = row_count(amount, len(rows), f"data.rows.{name}")
            rows = _balance(config, rows.take(sample(_groups(config, rows), count, config.split_seed)))
        if not len(rows):
            raise DataError(f"split {config.split!r}: the {name} set is empty; give data.parts more rows")
        sets[name] = rows
    return sets


def _stratified(texts: Sequence[Text], strata: Int64s, seed: int) -> tuple[Int64s, Int64s, Int64s]:
    """Return the row numbers of training, validation and test rows, each in file order.

    Of every stratum about a tenth of the texts validates and another tenth tests, at least one each if it has three.
    Rows with equal texts stay together, in the stratum of the first of them: no test text is a training text.
    """
    first_rows: dict[str, int] = {}
    group = np.array([first_rows.setdefault(comparison_key(text), row) for row, text in enumerate(texts)], np.int64)
    heads = np.array(sorted(first_rows.values()), dtype=np.int64)
    set_of_head = np.zeros(len(texts), dtype=np.int64)  # 0 training, 1 validation, 2 test
    generator = np.random.default_rng(seed)
    for stratum in np.unique(strata):
        members = generator.permutation(heads[strata[heads] == stratum])
        count = max(1, round(len(members) / 10)) if len(members) > 2 else 0
        set_of_head[members[:count]], set_of_head[members[count : 2 * count]] = 2, 1
    set_of_row = set_of_head[group]
    return np.flatnonzero(set_of_row == 0), np.flatnonzero(set_of_row == 1), np.flatnonzero(set_of_row == 2)


def _pool(config: DataConfig, parts: dict[str, LabelledTexts], names: tuple[str, ...]) -> LabelledTexts:
    """Return the rows of some parts that sets are drawn from: the longest or shortest of them, balanced."""
    rows = [parts[name] for name in names]
    pool = rows[0] if len(rows) == 1 else LabelledTexts.joined(rows, with_sources=config.balance is not None)
    share = config.longest or config.shortest
    if share is not None:
        words = count_words(pool.texts, config.cleaning)
        order = np.argsort(words if config.longest is None else -words, kind="stable")
        pool = pool.take(np.sort(order[: round(share * len(words))]))
    return _balance(config, pool)


def _balance(config: DataConfig, rows: LabelledTexts) -> LabelledTexts:
    """Return as many rows of each group as the smallest group has, if data.balance is set.

    Called again for a random sample of balanced rows, which is nearly balanced only.
    """
    if config.balance is None:
        return rows
    groups = _groups(config, rows)
    names, sizes = np.unique(groups, return_counts=True)
    return rows.take(_draw_from_groups(groups, names, [int(min(sizes, default=0))] * len(names), config.split_seed))


def _groups(config: DataConfig, rows: LabelledTexts) -> Int64s:
    """Return the group of each row, int64 [n]: the group that is balanced, else the label."""
    sources = np.zeros(len(rows), np.int64) if rows.sources is None else rows.sources
    groups = {"source": sources, "label-and-source": sources * len(config.labels) + rows.labels}
    return groups.get(config.balance or "label", rows.labels)


def hold_out(texts: list[str], seed: int) -> tuple[Int64s, Int64s]:
    """Hold out about a tenth of ``texts`` such that no held-out text is a training text or a part of one.

    A plain random tenth measures nothing if a file holds phrases of its own sentences (SST-2): nearly every held-out
    phrase lies inside a training sentence. So the texts that are in no other text are drawn in random order, and a
    text is held out when *all* texts that contain it are. Phrases shared with training sentences stay in training. If
    no text contains another, this is exactly ``int(0.1 n)`` rows at random. If the texts overlap so much that
    nothing or over a fifth would be held out, it is a plain random tenth.

    Returns:
        Row numbers of the training rows and of the held-out rows, each in file order.
    """
    target = len(texts) // 10
    numbers: dict[str, int] = {}
    cleaned = (clean_for_splits(text) for text in texts)
    distinct = np.array([numbers.setdefault(text, len(numbers)) for text in cleaned], dtype=np.int64)
    numbered = number_words(numbers, {})
    inner, outer = contained_pairs(numbered, numbered)
    inner, outer = inner[inner != outer], outer[inner != outer]
    is_outermost = np.ones(len(numbers), dtype=bool)
    is_outermost[inner] = False
    # The rank of a text is the largest random rank of the texts around it.
    permutation = np.random.default_rng(seed).permutation(len(numbers))
    distinct_ranks = np.where(is_outermost, permutation, -1).astype(np.int64)
    np.maximum.at(distinct_ranks, inner, distinct_ranks[outer])
    ranks = distinct_ranks[distinct]
    # Rows with a lower rank than the first row beyond the target: groups are held out completely or not at all.
    is_held_out = ranks < np.sort(ranks)[target]
    if not 0 < is_held_out.sum() <= len(texts) // 5:
        is_held_out = np.zeros(len(texts), dtype=bool)
        is_held_out[np.random.default_rng(seed).permutation(len(texts))[:target]] = True
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def row_count(amount: Amount, rows: int, key: str) -> int:
    """Return the number of rows that ``amount`` means: of a fraction of ``rows`` the nearest number, at least one.

    Raises DataError, with the ``key`` of the amount: more rows than there are.
    """
    count = max(1, round(amount * rows)) if isinstance(amount, float) else amount
    if count > rows:
        raise DataError(f"{key}: {count:,} of {rows:,} rows cannot be taken; lower it, or leave it out to take all")
    return count


def sampled_rows(
    rows: Callable[[OnRow], Iterator[Row]], amount: Amount, seed: int, key: str, on_empty: OnRow
) -> Iterator[Row]:
    """Sample the rows of a source with its shares of labels. Reads it twice: first the labels, in 8 bytes a row.

    Args:
        rows: reads the source from its beginning, and calls its argument with each row without a text.
        on_empty: called with these rows, once.
        key: of the amount, for messages.
    """
    numbers: dict[str, int] = {}
    first_pass = rows(lambda row: None)
    strata = np.fromiter((numbers.setdefault(str(row.label), len(numbers)) for row in first_pass), np.int64)
    is_sampled = np.zeros(len(strata), dtype=bool)
    is_sampled[sample(strata, row_count(amount, len(strata), key), seed)] = True
    yield from itertools.compress(rows(on_empty), is_sampled.tolist())


def sample(strata: Int64s, count: int, seed: int) -> Int64s:
    """Return the numbers of ``count`` rows in order, of each stratum its share.

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


@dataclass(frozen=True)
class WordTexts:
    """Texts as word numbers: text ``i`` is ``words[starts[i]:starts[i + 1]]``."""

    words: Int64s
    starts: Int64s

    @classmethod
    def joined(cls, texts: Iterable[list[int]]) -> WordTexts:
        """Return texts of lists of word numbers."""
        words: list[int] = []
        starts = [0]
        for text in texts:
            words.extend(text)
            starts.append(len(words))
        return cls(np.array(words, dtype=np.int64), np.array(starts, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int64s:
        """Words per text, int64 [n]."""
        return np.diff(self.starts)

    @property
    def text_of_word(self) -> Int64s:
        """Number of the text of each word, int64 [words]."""
        return np.repeat(np.arange(len(self)), self.lengths)


def number_words(texts: Iterable[str], numbers: dict[str, int]) -> WordTexts:
    """Split cleaned texts at white space, and number their words; new words are added to ``numbers``."""
    return WordTexts.joined([numbers.setdefault(word, len(numbers)) for word in text.split()] for text in texts)


def contained_pairs(needles: WordTexts, haystacks: WordTexts) -> tuple[Int64s, Int64s]:
    """Return all pairs (needle, haystack) such that the haystack contains the needle's words in a row, or equals it.

    Each needle is looked up by its rarest run of up to three words. Most needles have a run that occurs in no or one
    place, so that few places are compared in full. Runs are matched by sorted 64-bit hashes. Every match is compared
    word by word, so that a hash collision costs time, never correctness.

    Returns:
        Needle and haystack numbers, int64 [pairs] each, every pair once. Empty needles are in no text.
    """
    pairs = [np.empty(0, dtype=np.int64)]
    text_of_word = haystacks.text_of_word
    widths = np.minimum(needles.lengths, _RUN_WORDS)
    for width in range(1, _RUN_WORDS + 1):
        group = np.flatnonzero(widths == width)
        if not len(group):
            continue
        hashes, places = _hash_runs(haystacks, width)
        order = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], places[order]
        anchors, first, last = _rarest_runs(needles, group, hashes, width)
        has_match = last > first
        group, anchors, first, last = group[has_match], anchors[has_match], first[has_match], last[has_match]
        counts = last - first
        # A bounded number of places at once.
        windows = (np.cumsum(counts) - counts) // _CHUNK_PLACES
        edges = [0, *(np.flatnonzero(np.diff(windows)) + 1).tolist(), len(counts)]
        for start, stop in itertools.pairwise(edges):
            index = np.repeat(np.arange(start, stop), counts[start:stop])
            ends = np.cumsum(counts[start:stop])
            offset = np.arange(len(index)) - np.repeat(ends - counts[start:stop], counts[start:stop])
            begins = places[first[index] + offset] - anchors[index]
            candidates = group[index]
            matches = _matching(needles, candidates, haystacks, begins, text_of_word)
            pairs.append(np.unique(candidates[matches] * len(haystacks) + text_of_word[begins[matches]]))
    return np.divmod(np.unique(np.concatenate(pairs)), max(len(haystacks), 1))


def _hash_runs(texts: WordTexts, width: int) -> tuple[NDArray[np.uint64], Int64s]:
    """Return the hash and the first word of every run of ``width`` words inside one text."""
    count = max(0, len(texts.words) - width + 1)
    words = texts.words.astype(np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(width):
        hashes = (hashes ^ words[offset : offset + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    text_of_word = texts.text_of_word
    inside = np.flatnonzero(text_of_word[:count] == text_of_word[width - 1 :])
    return hashes[inside], inside


def _rarest_runs(
    needles: WordTexts, group: Int64s, hashes: NDArray[np.uint64], width: int
) -> tuple[Int64s, Int64s, Int64s]:
    """Return the offset of the rarest run of each needle in ``group``, and the range of its matches in ``hashes``."""
    run_hashes, starts = _hash_runs(needles, width)
    text_of_run = needles.text_of_word[starts]
    selected = np.isin(text_of_run, group)
    run_hashes, starts, text_of_run = run_hashes[selected], starts[selected], text_of_run[selected]
    # Each hash is looked up once and in order: a binary search per run, all over the table, takes far longer.
    distinct, inverse = np.unique(run_hashes, return_inverse=True)
    first = np.searchsorted(hashes, distinct, side="left")[inverse]
    last = np.searchsorted(hashes, distinct, side="right")[inverse]
    # Sorted by needle, then by number of matches: the first run of each needle is its rarest.
    order = np.lexsort((last - first, text_of_run))
    runs = order[np.unique(text_of_run[order], return_index=True)[1]]
    return starts[runs] - needles.starts[group], first[runs], last[runs]


def _matching(
    needles: WordTexts, candidates: Int64s, haystacks: WordTexts, begins: Int64s, text_of_word: Int64s
) -> Int64s:
    """Return which candidates (needle ``candidates[k]`` at word ``begins[k]``) match completely inside one haystack."""
    lengths = needles.lengths[candidates]
    active = np.flatnonzero((begins >= 0) & (begins + lengths <= len(haystacks.words)))
    active = active[text_of_word[begins[active]] == text_of_word[begins[active] + lengths[active] - 1]]
    matches = [active[:0]]
    offset = 0
    while len(active):
        equal = needles.words[needles.starts[candidates[active]] + offset] == haystacks.words[begins[active] + offset]
        active = active[equal]
        offset += 1
        is_complete = lengths[active] == offset
        matches.append(active[is_complete])
        active = active[~is_complete]
    return np.concatenate(matches)


class OverlapCounter:
    """Counts the texts of other sets that training has seen, all cleaned: equal texts, and further overlapping texts.

    An overlapping text is one of any length inside a training text, word for word and in a row, or one around a
    training text of three words or more. Every row counts at most once. In memory are the texts of the other sets and
    some of the training texts.
    """

    def __init__(self, other_sets: Mapping[str, Sequence[str]]) -> None:
        self._numbers: dict[str, int] = {}
        self._sets = {
            name: np.array([self._numbers.setdefault(clean(text), len(self._numbers)) for text in texts], np.int64)
            for name, texts in other_sets.items()
        }
        self._words: dict[str, int] = {}
        self._numbered = number_words(self._numbers, self._words)
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
        self._is_equal[[self._numbers[text] for text in texts if text in self._numbers]] = True
        words = [[self._words.get(word, _UNKNOWN_WORD) for word in text.split()] for text in texts]
        inside, _ = contained_pairs(self._numbered, WordTexts.joined(words))
        self._overlaps[inside] = True
        needles = [text for text in words if len(text) >= _MIN_WORDS and _UNKNOWN_WORD not in text]
        _, around = contained_pairs(WordTexts.joined(needles), self._numbered)
        self._overlaps[around] = True

    def counts(self) -> tuple[OverlapCount, ...]:
        """Return the counts of each other set, after all training texts."""
        self._compare()
        contained = self._overlaps & ~self._is_equal
        return tuple(
            OverlapCount(
                test_set=name,
                test_rows=len(texts),
                duplicates=int(self._is_equal[texts].sum()),
                contained=int(contained[texts].sum()),
            )
            for name, texts in self._sets.items()
        )


def count_overlaps(
    train: Iterable[str], other_sets: Mapping[str, Sequence[str]], sets_name: str, progress: Progress
) -> tuple[OverlapCount, ...]:
    """Count overlaps as :class:`OverlapCounter` does; ``sets_name``: of the other sets, for the progress bar."""
    with bar(progress, f"Comparing {sets_name} with the training set", None, "texts"):
        counter = OverlapCounter(other_sets)
        for text in train:
            counter.add((text,))
            progress.advance()
        return counter.counts()
