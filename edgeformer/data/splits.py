"""Splits: the protocols by name, from parts to train, validation and test sets."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.errors import DataError
from edgeformer.data.cleaning import clean_at_first
from edgeformer.data.lengths import count_words
from edgeformer.data.overlap import contained_pairs, number_words
from edgeformer.data.rows import LabelledTexts, alike, in_one, label_counts
from edgeformer.data.selection import count_of, equal, extreme, sample

Int64s = NDArray[np.int64]
MIN_ROWS = 10
IMPORTED_SETS = {"train": ("train",), "validation": ("validation", "test"), "test": ("test", "validation")}
"""Sets of a model that was trained elsewhere, and the parts that each is read from, the first that is there."""


def set_parts(config: DataConfig) -> dict[str, tuple[str, ...]]:
    """The sets of the protocol in order (train, validation, the tests) and the parts each is drawn from."""
    pool = tuple(part for part in ("train", "validation") if part in config.parts)
    kept = "validation" if "validation" in config.parts else "train"
    protocols: dict[str, dict[str, tuple[str, ...]]] = {
        "random-split": {"train": pool, "validation": pool, "random-split": pool},
        "stratified": {"train": pool, "validation": pool, "test": pool},
        "glue-dev": {"train": ("train",), "validation": ("train",), "glue-dev": ("validation",)},
        "sst-test": {"train": ("train",), "validation": ("validation",), "sst-test": ("sst-test",)},
        "given": {"train": ("train",), "validation": (kept,), "given": ("test",)},
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
    """The first of ``names`` that is there, alone; nothing where none is."""
    return tuple(name for name in names if name in parts)[:1]


def split(config: DataConfig, parts: dict[str, LabelledTexts]) -> dict[str, LabelledTexts]:
    """Cut the parts as ``config.split`` says.

    Returns:
        Set → rows: train, validation, the protocol's own test set under its name, then the parts it does not use.

    Raises:
        DataError: an empty set, fewer than 10 rows to train on, or training rows of one class only.
    """
    sets = draw(config, tuple(set_parts(config)), parts)
    several = config.separator is not None
    check_classes(config, label_counts(sets["train"].labels, len(config.labels), several=several))
    return sets


def unknown_set(name: str, *, own_file: bool = False) -> str:
    """What is to be said of a model that was imported without the data of that set.

    Args:
        own_file: the set was to be scored, for which a file of its own does as well.
    """
    what = "its training text" if name == "train" else f"a {name} set"
    return (
        f"data.parts: this model was trained elsewhere, and nothing is known of {what}; import it again with a folder "
        f"that has {name}.tsv (or .csv, .jsonl): --data DIR"
        + (", or give evaluate a file of its own: --data FILE" if own_file else "")
    )


def check_sets_differ(config: DataConfig) -> None:
    """Raise DataError where training would select its epoch on the very set that it then reports as test set.

    Validation and test set of a model that was trained elsewhere stand in for each other, which judging its artifacts
    allows.
    """
    sets = set_parts(config)
    if config.split != "imported" or sets["validation"] != sets["test"] or not sets["test"]:
        return
    (part,) = sets["test"]
    missing, instead = ("validation", "given") if part == "test" else ("test", "glue-dev")
    raise DataError(
        f"data.split: imported has one part, {part}, for validation and test: training would select its epoch on the "
        f"set that it reports; add the part {missing}, or hold out a tenth of train: --set "
        f"data.split={instead}"
    )


def check_classes(config: DataConfig, counts: Sequence[int]) -> None:
    """Raise DataError where the training set, which has ``counts`` rows of each label, has one class only."""
    present = np.flatnonzero(counts)
    if not len(present):
        raise DataError("the training set has no row with a label; it needs rows with at least two of data.labels")
    if len(present) < 2:
        raise DataError(
            f"the training set has one class only: all {sum(counts)} rows are labelled "
            f"{config.labels[int(present[0])]!r}; it needs rows of at least two of data.labels "
            f"({', '.join(config.labels)})"
        )


def draw(config: DataConfig, names: Sequence[str], parts: dict[str, LabelledTexts]) -> dict[str, LabelledTexts]:
    """Some of the sets, as :func:`split` has them; ``parts`` needs to hold those that :func:`set_parts` names for them.

    Raises:
        DataError: a set is empty, or fewer than 10 rows to cut it from.
    """
    sources = set_parts(config)
    for name in names:
        if not sources[name]:
            raise DataError(unknown_set(name))
    cuts: dict[str, Int64s] = {}
    if any(sources[name] == sources["train"] for name in names):
        pooled = _pool(config, parts, sources["train"])
        if len(pooled) < MIN_ROWS:
            raise DataError(
                f"data.parts {' + '.join(sources['train'])}: {len(pooled)} rows; split {config.split!r} needs at least "
                f"{MIN_ROWS} of them"
            )
        cuts = _cuts(config, pooled)
    drawn = {name: pooled.take(cuts[name]) if name in cuts else _pool(config, parts, sources[name]) for name in names}
    sets = {name: _some(config, name, _balanced(config, rows)) for name, rows in drawn.items()}
    for name, rows in sets.items():
        if not len(rows):
            raise DataError(f"split {config.split!r}: the {name} set is empty; give data.parts more rows")
    return sets


def _cuts(config: DataConfig, pooled: LabelledTexts) -> dict[str, Int64s]:
    """Row numbers of the sets that are cut from the training parts; empty where parts are used whole."""
    sources, texts = set_parts(config), [in_one(text) for text in pooled.texts]
    if config.split == "random-split":
        # 80/10/10 of a seeded permutation, rounded down, the rest to the test set (as the paper's sizes are).
        order = np.random.default_rng(config.split_seed).permutation(len(texts))
        first, second = len(texts) * 8 // 10, len(texts) // 10
        return dict(zip(sources, np.split(order, [first, first + second]), strict=False))
    if config.split == "stratified":
        strata = pooled.labels if config.separator is None else _rarest(pooled.labels, len(config.labels))
        return dict(zip(sources, tenths(LabelledTexts(pooled.texts, strata), config.split_seed), strict=False))
    if sources["validation"] == sources["train"]:
        train, held_out = hold_out(texts, config.split_seed)
        return {"train": train, "validation": held_out}
    return {}


def tenths(rows: LabelledTexts, seed: int) -> tuple[Int64s, Int64s, Int64s]:
    """Row numbers for training, validation and test, each in file order.

    Of every label about a tenth of the texts validates, another tenth tests, at least one each if it has three. Rows
    whose texts are alike stay together, and count as the first of them is labelled: no test text is a training text.
    """
    firsts: dict[str, int] = {}
    group = np.array([firsts.setdefault(alike(text), row) for row, text in enumerate(rows.texts)], dtype=np.int64)
    heads = np.array(sorted(firsts.values()), dtype=np.int64)
    where = np.zeros(len(rows), dtype=np.int64)  # of the first row of each text: 0 training, 1 validation, 2 test
    generator = np.random.default_rng(seed)
    for label in np.unique(rows.labels):
        own = generator.permutation(heads[rows.labels[heads] == label])
        count = max(1, round(len(own) / 10)) if len(own) > 2 else 0
        where[own[:count]], where[own[count : 2 * count]] = 2, 1
    found = where[group]
    return np.flatnonzero(found == 0), np.flatnonzero(found == 1), np.flatnonzero(found == 2)


def _rarest(label_sets_: Int64s, classes: int) -> Int64s:
    """Of each row the rarest of its labels, −1 without any: what several labels are stratified by.

    Combinations are no strata: most can be so rare that none of them would be tested.
    """
    found = np.full(len(label_sets_), -1, dtype=np.int64)
    counts = label_counts(label_sets_, classes, several=True)
    for label in sorted(range(classes), key=lambda label: -counts[label]):  # rarer ones win
        found[label_sets_ >> label & 1 == 1] = label
    return found


def _pool(config: DataConfig, parts: dict[str, LabelledTexts], names: tuple[str, ...]) -> LabelledTexts:
    """The rows of some parts that sets are drawn from: the longest or shortest of them, balanced."""
    found, apart = [parts[name] for name in names], config.balance is not None
    pooled = found[0] if len(found) == 1 else LabelledTexts.joined(found, apart=apart)
    share = config.longest or config.shortest
    if share is not None:
        words = count_words(pooled.texts, config.cleaning)
        pooled = pooled.take(extreme(words, share, longest=config.longest is not None))
    return _balanced(config, pooled)


def _some(config: DataConfig, name: str, rows: LabelledTexts) -> LabelledTexts:
    """As many rows of a set as ``data.rows`` says; of balanced ones as many as go evenly. Raises DataError."""
    amount = config.rows.get(name)
    if amount is None:
        return rows
    groups = _groups(config, rows)
    chosen = rows.take(sample(groups, count_of(amount, len(rows), f"data.rows.{name}"), config.split_seed))
    return _balanced(config, chosen)


def _balanced(config: DataConfig, rows: LabelledTexts) -> LabelledTexts:
    """As ``data.balance`` says. Of a set that was drawn of balanced rows too: chance left it nearly balanced."""
    return rows if config.balance is None else rows.take(equal(_groups(config, rows), config.split_seed))


def _groups(config: DataConfig, rows: LabelledTexts) -> Int64s:
    """The group of each row, int64 [n]: those that are balanced, else the labels."""
    labels, sources = rows.labels, np.zeros(len(rows), np.int64) if rows.sources is None else rows.sources
    groups = {"source": sources, "label-and-source": sources * len(config.labels) + labels}
    return groups.get(config.balance or "label", labels)


def hold_out(texts: list[str], seed: int) -> tuple[Int64s, Int64s]:
    """Hold out about a tenth of ``texts`` such that no held-out text is a training text or a part of one.

    A plain random tenth is worthless where a file holds phrases of its own sentences (SST-2): nearly every
    held-out phrase lies inside a training sentence. So whole texts, those that are in no other, are drawn in
    random order, and a text is held out once *all* texts that contain it are. Phrases shared with training
    sentences stay in training. Where no text contains another this is exactly ``int(0.1 n)`` rows at random.
    Where the texts hang together so much that this would hold out nothing or over a fifth, it is a plain
    random tenth.

    Returns:
        Row numbers of the training rows and of the held-out rows, each in file order.
    """
    target = len(texts) // 10
    cleaned = [clean_at_first(text) for text in texts]
    numbers: dict[str, int] = {}
    distinct = np.array([numbers.setdefault(text, len(numbers)) for text in cleaned], dtype=np.int64)
    ranks = _release_ranks(list(numbers), np.random.default_rng(seed))[distinct]
    ordered = np.sort(ranks)
    # Rows whose rank is below that of the first row beyond the target: whole groups only.
    held_out = ranks < ordered[target]
    if not 0 < held_out.sum() <= len(texts) // 5:
        held_out = np.zeros(len(texts), dtype=bool)
        held_out[np.random.default_rng(seed).permutation(len(texts))[:target]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _release_ranks(texts: list[str], generator: np.random.Generator) -> Int64s:
    """For each distinct text, when it may be held out: the largest random rank of the texts around it."""
    numbered = number_words(texts, {})
    inner, outer = contained_pairs(numbered, numbered)
    different = inner != outer
    inner, outer = inner[different], outer[different]
    whole = np.ones(len(texts), dtype=bool)
    whole[inner] = False
    ranks = np.where(whole, generator.permutation(len(texts)), -1).astype(np.int64)
    np.maximum.at(ranks, inner, ranks[outer])
    return ranks
