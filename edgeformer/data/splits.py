"""Splits: the protocols by name, from parts to train, validation and test sets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.cleaning import clean
from edgeformer.data.containment import WordNumbers, contained_pairs
from edgeformer.data.texts import LabelledTexts
from edgeformer.schema.errors import DataError
from edgeformer.schema.recipe import DataConfig

Int64s = NDArray[np.int64]
MIN_ROWS = 10


@dataclass(frozen=True)
class Splits:
    """``tests``: the protocol's own test set first, under the protocol's name; then parts it does not use."""

    train: LabelledTexts
    validation: LabelledTexts
    tests: dict[str, LabelledTexts]


def set_parts(config: DataConfig) -> dict[str, tuple[str, ...]]:
    """The sets of the protocol in order (train, validation, the tests) and the parts each is drawn from."""
    pool = tuple(part for part in ("train", "validation") if part in config.parts)
    kept = "validation" if "validation" in config.parts else "train"
    protocols: dict[str, dict[str, tuple[str, ...]]] = {
        "random-split": {"train": pool, "validation": pool, "random-split": pool},
        "glue-dev": {"train": ("train",), "validation": ("train",), "glue-dev": ("validation",)},
        "sst-test": {"train": ("train",), "validation": ("validation",), "sst-test": ("sst-test",)},
        "given": {"train": ("train",), "validation": (kept,), "given": ("test",)},
    }
    sets = protocols[config.split]
    used = {part for parts in sets.values() for part in parts}
    for part in config.parts:
        if part not in used:
            if part in sets:
                raise DataError(
                    f"data.parts: under split {config.split!r} no part may be called {part!r}; rename it"
                )
            sets[part] = (part,)
    return sets


def split(config: DataConfig, parts: dict[str, LabelledTexts]) -> Splits:
    """Cut the parts as ``config.split`` says.

    Raises:
        DataError: an empty set, fewer than 10 rows to train on, or training rows of one class only.
    """
    sets = {name: draw(config, name, parts) for name in set_parts(config)}
    names = list(sets)
    for name, rows in sets.items():
        if not len(rows):
            raise DataError(f"split {config.split!r}: the {name} set is empty; give data.parts more rows")
    _check_classes(config, sets["train"])
    return Splits(sets["train"], sets["validation"], {name: sets[name] for name in names[2:]})


def draw(config: DataConfig, name: str, parts: dict[str, LabelledTexts]) -> LabelledTexts:
    """One set of the protocol; ``parts`` needs to hold only those that :func:`set_parts` names for it.

    Raises:
        DataError: fewer than 10 rows to cut.
    """
    sources = set_parts(config)[name]
    pooled = _pool([parts[part] for part in sources])
    if name == "train" or sources == set_parts(config)["train"]:
        _check_rows(config, sources, pooled)
    if config.split == "random-split" and name in ("train", "validation", "random-split"):
        cuts = dict(
            zip(
                ("train", "validation", "random-split"),
                _random_cuts(len(pooled), config.split_seed),
                strict=True,
            )
        )
        return pooled.take(cuts[name])
    if name in ("train", "validation") and set_parts(config)["validation"] == ("train",):
        train, held_out = hold_out(pooled.texts, config.split_seed)
        return pooled.take(train if name == "train" else held_out)
    return pooled


def _pool(parts: list[LabelledTexts]) -> LabelledTexts:
    if len(parts) == 1:
        return parts[0]
    texts = [text for part in parts for text in part.texts]
    return LabelledTexts(texts, np.concatenate([part.labels for part in parts]))


def _random_cuts(rows: int, seed: int) -> list[Int64s]:
    """80/10/10 of a seeded permutation, rounded down, the rest to the test set (as the paper's sizes are)."""
    order = np.random.default_rng(seed).permutation(rows)
    first, second = rows * 8 // 10, rows // 10
    return np.split(order, [first, first + second])


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
    cleaned = [clean(text) for text in texts]
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
    numbered = WordNumbers().number(texts)
    inner, outer = contained_pairs(numbered, numbered)
    different = inner != outer
    inner, outer = inner[different], outer[different]
    whole = np.ones(len(texts), dtype=bool)
    whole[inner] = False
    ranks = np.where(whole, generator.permutation(len(texts)), -1).astype(np.int64)
    np.maximum.at(ranks, inner, ranks[outer])
    return ranks


def _check_rows(config: DataConfig, sources: tuple[str, ...], rows: LabelledTexts) -> None:
    if len(rows) < MIN_ROWS:
        raise DataError(
            f"data.parts {' + '.join(sources)}: {len(rows)} rows; split {config.split!r} needs at least "
            f"{MIN_ROWS} to train on"
        )


def _check_classes(config: DataConfig, train: LabelledTexts) -> None:
    present = np.unique(train.labels)
    if len(present) < 2:
        name = config.labels[int(present[0])]
        raise DataError(
            f"the training set has one class only: all {len(train)} rows are labelled {name!r}; it needs "
            f"rows of at least two of data.labels ({', '.join(config.labels)})"
        )
