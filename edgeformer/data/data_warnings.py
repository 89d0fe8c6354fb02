"""What the owner of a data set should know of it: empty texts, repeated ones, contradictions, labels without rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.data.rows import LabelledTexts, Row, Text, alike, label_counts
from edgeformer.data.sources import load_part, part_rows
from edgeformer.data.splits import set_parts

_EXAMPLES = 3
_SHOWN = 40
"""Characters of a text that a message repeats."""
UNEVEN: Literal["uneven labels"] = "uneven labels"
_UNEVEN = 10
"""Labels are uneven where the most frequent one has so many times the rows of the rarest one."""

Int64s = NDArray[np.int64]


class Empties:
    """Counts rows without a text, and remembers where the first ones stand."""

    def __init__(self) -> None:
        self.rows = 0
        self._first: list[str] = []

    def add(self, row: Row) -> None:
        """One more."""
        self.rows += 1
        if len(self._first) < _EXAMPLES:
            self._first.append(_place(row))

    def findings(self, name: str) -> list[DataFinding]:
        """Of the part or set ``name``."""
        return empty_texts(name, self.rows, self._first)


def empty_texts(name: str, rows: int, first: Sequence[str] = ()) -> list[DataFinding]:
    """What is said of ``rows`` rows without a text; ``first``: where some stand, if that is known."""
    if not rows:
        return []
    message = f"{name}: {_rows(rows)} without a text: left out{_listed(first)}"
    return [DataFinding(kind="empty texts", set=name, rows=rows, message=message, examples=tuple(first))]


def load_and_look(config: DataConfig) -> tuple[dict[str, LabelledTexts], list[DataFinding]]:
    """Every part of the config, and what was found in them; repetitions are looked for in what training reads.

    Raises DataError, MissingDependencyError.
    """
    parts: dict[str, LabelledTexts] = {}
    found: list[DataFinding] = []
    for part in config.parts:
        empties = Empties()
        parts[part] = load_part(config, part, empties.add)
        found += empties.findings(part)
    return parts, [*found, *repetitions(config, parts)]


def repetitions(config: DataConfig, parts: Mapping[str, LabelledTexts]) -> list[DataFinding]:
    """Texts of the training parts that are there again, with the same label or with another one.

    Texts are the same that differ in capitals and white space only. Takes 8 bytes a row; sources are read again, up to
    the first examples, where something is found. Nothing is said of generated texts. Raises DataError.
    """
    if config.synthetic:
        return []
    pool = set_parts(config)["train"]
    name, texts = " + ".join(pool), itertools.chain.from_iterable(parts[part].texts for part in pool)
    labels = np.concatenate([np.empty(0, np.int64), *(parts[part].labels for part in pool)])
    # Two texts of a million share a hash once in ten million data sets.
    hashes = np.fromiter((hash(alike(text)) for text in texts), np.int64, len(labels))
    order = np.argsort(hashes, kind="stable")
    starts = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
    first = np.empty(len(labels), np.int64)  # of each row, the first row with its text
    first[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))
    return [*_repeated(config, name, first), *_contradictions(config, name, first, labels)]


def _repeated(config: DataConfig, name: str, first: Int64s) -> list[DataFinding]:
    again = np.flatnonzero(first != np.arange(len(first)))
    if not len(again):
        return []
    shown = again[:_EXAMPLES].tolist()
    rows = _rows_at(config, {*shown, *first[shown].tolist()})
    examples = [f"{_place(rows[row])} as in {_other(rows[int(first[row])], rows[row])}" for row in shown]
    together = "; all rows of a text are in the same set" if config.split == "stratified" else ""
    message = f"{name}: {_rows(len(again))} with the text of an earlier row: kept{together}{_listed(examples)}"
    return [DataFinding(kind="duplicates", set=name, rows=len(again), message=message, examples=tuple(examples))]


def _contradictions(config: DataConfig, name: str, first: Int64s, labels: Int64s) -> list[DataFinding]:
    other = np.flatnonzero(labels != labels[first])
    if not len(other):
        return []
    texts, places = np.unique(first[other], return_index=True)
    shown = [(int(row), int(other[place])) for row, place in zip(texts, places, strict=True)][:_EXAMPLES]
    rows = _rows_at(config, {row for pair in shown for row in pair})
    examples = [
        f"{_place(rows[a])} {_named(config, int(labels[a]))}, {_other(rows[b], rows[a])} "
        f"{_named(config, int(labels[b]))}: "
        f"{_shown(rows[a].text)}"
        for a, b in shown
    ]
    count = int(np.isin(first, texts).sum())
    message = (
        f"{name}: {len(texts):,} {'text' if len(texts) == 1 else 'texts'} with two labels or more, in {_rows(count)}: "
        f"kept, and no model can be right on all of them{_listed(examples)}"
    )
    return [DataFinding(kind="contradictions", set=name, rows=count, message=message, examples=tuple(examples))]


def rows_per_label(config: DataConfig, sets: Mapping[str, LabelledTexts]) -> dict[str, dict[str, int]]:
    """Set → label → rows."""
    labels, several = config.labels, config.separator is not None
    counts = {name: label_counts(found.labels, len(labels), several=several) for name, found in sets.items()}
    return {name: dict(zip(labels, numbers, strict=True)) for name, numbers in counts.items()}


def _named(config: DataConfig, number: int) -> str:
    """The label, or all of a row that has several, for a message."""
    if config.separator is None:
        return repr(config.labels[number])
    found = [label for bit, label in enumerate(config.labels) if number >> bit & 1]
    return repr(f"{config.separator} ".join(found)) if found else "no label"


def label_findings(config: DataConfig, counts: Mapping[str, Mapping[str, int]]) -> list[DataFinding]:
    """Labels without rows, and uneven ones.

    Args:
        config: the recipe's.
        counts: set → label → rows, ``train`` among them.
    """
    found, labels = [], config.labels
    learned = [label for label in labels if counts["train"].get(label)]
    for name, rows in counts.items():
        lacking = [label for label in (labels if name == "train" else learned) if not rows.get(label)]
        if lacking:
            then = "the model does not learn it" if name == "train" else "no score says how well it is told"
            message = f"{name}: no row has the label {', '.join(map(repr, lacking))}: {then}"
            found.append(DataFinding(kind="labels without rows", set=name, rows=0, message=message))
    train = counts["train"]
    rarest, most = min(learned, key=train.__getitem__), max(learned, key=train.__getitem__)
    if train[rarest] * _UNEVEN <= train[most] and config.separator is None:  # of several labels most rows lack most
        share = train[rarest] / sum(train.values())
        told = [f"{accuracy:.4f} on {name}" for name, accuracy in always(counts).items()]
        beside = f"; always answering {most!r} has an accuracy of {', '.join(told)}" if told else ""
        message = f"train: labels are uneven: {rarest!r} has {_rows(train[rarest])} ({share:.1%}){beside}"
        found.append(DataFinding(kind=UNEVEN, set="train", rows=train[rarest], message=message))
    return found


def seen_findings(config: DataConfig, sets: Mapping[str, LabelledTexts]) -> list[DataFinding]:
    """Validation texts that stand in the training set, too: the epoch that is kept is chosen by them.

    Of `random-split` that is known and said in docs/protocols.md; a stratified cut keeps equal texts together.
    """
    if config.split == "random-split":
        return []
    trained = {alike(text) for text in sets["train"].texts}
    rows = [row for row, text in enumerate(sets["validation"].texts) if alike(text) in trained]
    if not rows:
        return []
    whole = len(sets["validation"])
    message = f"validation: {_rows(len(rows))} of {whole:,} stand in the training set, too: its scores flatter"
    return [DataFinding(kind="seen texts", set="validation", rows=len(rows), message=message)]


def always(counts: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Set → accuracy of always answering the label that is the most frequent one in training."""
    most = most_frequent(counts)
    return {
        name: rows[most] / sum(rows.values()) for name, rows in counts.items() if name != "train" and any(rows.values())
    }


def most_frequent(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The label of most rows in training."""
    train = counts["train"]
    return max(train, key=train.__getitem__)


def _rows_at(config: DataConfig, wanted: set[int]) -> dict[int, Row]:
    """Some rows of what training reads. Raises DataError where it changed meanwhile."""
    everything: Iterator[Row] = itertools.chain.from_iterable(
        part_rows(config, part) for part in set_parts(config)["train"]
    )
    return {number: row for number, row in enumerate(itertools.islice(everything, max(wanted) + 1)) if number in wanted}


def _place(row: Row) -> str:
    """``reviews.csv, line 7``."""
    source = row.where.rpartition(", ")[0]
    return f"{source if source.startswith('hub ') else Path(source).name}, {_line(row)}"


def _other(row: Row, beside: Row) -> str:
    """Where a row stands, without the name of the source if ``beside`` is of the same one."""
    same = row.where.rpartition(", ")[0] == beside.where.rpartition(", ")[0]
    return _line(row) if same else _place(row)


def _line(row: Row) -> str:
    """``line 7``, or ``row 7`` where there are no lines."""
    return row.where.rpartition(", ")[2]


def _shown(text: Text) -> str:
    whole = " ⁄ ".join((text,) if isinstance(text, str) else text)
    line = " ".join(whole.split())
    return repr(line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…")


def _rows(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"


def _listed(examples: Sequence[str]) -> str:
    """In brackets; the name of the file once, where all are in one."""
    first = re.split(r"(?<=, )(?:line|row) \d", examples[0])[0] if examples else ""
    alike = all(example.startswith(first) for example in examples)
    told = [example.removeprefix(first) if alike and place else example for place, example in enumerate(examples)]
    return f" ({'; '.join(told)})" if examples else ""
