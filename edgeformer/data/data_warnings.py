"""Warnings about a data set: empty texts, duplicates, contradictions, labels without rows, uneven labels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.data.rows import LabelledTexts, Row, comparison_key, label_counts
from edgeformer.data.sources import load_part, part_rows
from edgeformer.data.splits import set_parts

UNEVEN: Literal["uneven labels"] = "uneven labels"
FindingKind = Literal[
    "empty texts", "duplicates", "contradictions", "labels without rows", "uneven labels", "seen texts"
]  # fmt: skip
_EXAMPLES = 3
_TEXT_CHARACTERS = 40
"""Of a text in a message."""
_UNEVEN_RATIO = 10
"""Rows of the most frequent label per row of the rarest label, from which labels are uneven."""


class EmptyRows:
    """Counts rows without a text, and keeps the places of the first ones."""

    def __init__(self) -> None:
        self.rows = 0
        self.first: list[str] = []

    def add(self, row: Row) -> None:
        """Count one more row."""
        self.rows += 1
        if len(self.first) < _EXAMPLES:
            self.first.append(_place(row))


def empty_texts(name: str, rows: int, first: Sequence[str] = ()) -> list[DataFinding]:
    """Return the warning about ``rows`` rows without a text. ``first``: places of the first ones, if known."""
    return [_finding("empty texts", name, rows, f"{_count(rows)} without a text: left out", first)] if rows else []


def read_parts(config: DataConfig, names: Iterable[str]) -> tuple[dict[str, LabelledTexts], list[DataFinding]]:
    """Read some parts of the config, with warnings about rows without a text. Raises DataError."""
    parts: dict[str, LabelledTexts] = {}
    findings: list[DataFinding] = []
    for part in names:
        empty_rows = EmptyRows()
        parts[part] = load_part(config, part, empty_rows.add)
        findings += empty_texts(part, empty_rows.rows, empty_rows.first)
    return parts, findings


def load_with_findings(config: DataConfig) -> tuple[dict[str, LabelledTexts], list[DataFinding]]:
    """Read every part of the config, with warnings; repetitions are counted in the training parts. Raises DataError."""
    parts, findings = read_parts(config, config.parts)
    return parts, [*findings, *repetitions(config, parts)]


def repetitions(config: DataConfig, parts: Mapping[str, LabelledTexts]) -> list[DataFinding]:
    """Return warnings about texts that repeat in the training parts, with the same label or with another label.

    Texts are equal if they differ in case and white space only. Takes 8 bytes a row. The sources are read again up to
    the first examples. Synthetic texts get no warnings. Raises DataError.
    """
    if config.synthetic:
        return []
    pool = set_parts(config)["train"]
    name = " + ".join(pool)
    texts = itertools.chain.from_iterable(parts[part].texts for part in pool)
    labels = np.concatenate([np.empty(0, np.int64), *(parts[part].labels for part in pool)])
    # Two texts of a million have the same hash once in ten million data sets.
    hashes = np.fromiter((hash(comparison_key(text)) for text in texts), np.int64, len(labels))
    order = np.argsort(hashes, kind="stable")
    starts = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
    first = np.empty(len(labels), np.int64)  # of each row, the first row with its text
    first[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))

    findings: list[DataFinding] = []
    repeated = np.flatnonzero(first != np.arange(len(first)))
    if len(repeated):
        pairs = [(int(row), int(first[row])) for row in repeated[:_EXAMPLES]]
        rows = _read_rows(config, {row for pair in pairs for row in pair})
        examples = [f"{_place(rows[row])} as in {_other_place(rows[other], rows[row])}" for row, other in pairs]
        together = "; all rows of a text are in the same set" if config.split == "stratified" else ""
        message = f"{_count(len(repeated))} with the text of an earlier row: kept{together}"
        findings.append(_finding("duplicates", name, len(repeated), message, examples))
    contradicting = np.flatnonzero(labels != labels[first])
    if len(contradicting):
        first_rows, places = np.unique(first[contradicting], return_index=True)
        pairs = [*zip(first_rows.tolist(), contradicting[places].tolist(), strict=True)][:_EXAMPLES]
        rows = _read_rows(config, {row for pair in pairs for row in pair})
        examples = []
        for row, other in pairs:
            names = []
            for number in (int(labels[row]), int(labels[other])):
                labels_of_row = [label for bit, label in enumerate(config.labels) if number >> bit & 1]
                several = repr(f"{config.separator} ".join(labels_of_row)) if labels_of_row else "no label"
                names.append(repr(config.labels[number]) if config.separator is None else several)
            text = rows[row].text
            line = " ".join((text if isinstance(text, str) else " ⁄ ".join(text)).split())
            shortened = repr(line if len(line) <= _TEXT_CHARACTERS else f"{line[:_TEXT_CHARACTERS]}…")
            place, other_place = _place(rows[row]), _other_place(rows[other], rows[row])
            examples.append(f"{place} {names[0]}, {other_place} {names[1]}: {shortened}")
        count = int(np.isin(first, first_rows).sum())
        message = (
            f"{len(first_rows):,} {'text' if len(first_rows) == 1 else 'texts'} with two labels or more, in "
            f"{_count(count)}: kept, and no model can be right on all of them"
        )
        findings.append(_finding("contradictions", name, count, message, examples))
    return findings


def rows_per_label(config: DataConfig, sets: Mapping[str, LabelledTexts]) -> dict[str, dict[str, int]]:
    """Return set → label → rows."""
    labels, several = config.labels, config.separator is not None
    counts = {name: label_counts(rows.labels, len(labels), several=several) for name, rows in sets.items()}
    return {name: dict(zip(labels, numbers, strict=True)) for name, numbers in counts.items()}


def label_findings(config: DataConfig, counts: Mapping[str, Mapping[str, int]]) -> list[DataFinding]:
    """Return warnings about labels without rows and about uneven labels.

    ``counts``: set → label → rows, with the set ``train``.
    """
    findings, labels, train = [], config.labels, counts["train"]
    learned = [label for label in labels if train.get(label)]
    for name, rows in counts.items():
        missing = [label for label in (labels if name == "train" else learned) if not rows.get(label)]
        if missing:
            effect = "the model does not learn it" if name == "train" else "no score says how well it is told"
            message = f"no row has the label {', '.join(map(repr, missing))}: {effect}"
            findings.append(_finding("labels without rows", name, 0, message))
    rarest, commonest = min(learned, key=train.__getitem__), max(learned, key=train.__getitem__)
    # Of several labels per row most rows lack most labels.
    if train[rarest] * _UNEVEN_RATIO <= train[commonest] and config.separator is None:
        share = train[rarest] / sum(train.values())
        accuracies = ", ".join(f"{accuracy:.4f} on {name}" for name, accuracy in majority_accuracy(counts).items())
        baseline = f"; always answering {commonest!r} has an accuracy of {accuracies}" if accuracies else ""
        message = f"labels are uneven: {rarest!r} has {_count(train[rarest])} ({share:.1%}){baseline}"
        findings.append(_finding(UNEVEN, "train", train[rarest], message))
    return findings


def seen_findings(config: DataConfig, sets: Mapping[str, LabelledTexts]) -> list[DataFinding]:
    """Return the warning about validation texts that are in the training set, too: they select the epoch.

    docs/protocols.md says so of `random-split`; a stratified split keeps equal texts together.
    """
    if config.split == "random-split":
        return []
    trained = {comparison_key(text) for text in sets["train"].texts}
    rows = sum(comparison_key(text) in trained for text in sets["validation"].texts)
    message = f"{_count(rows)} of {len(sets['validation']):,} stand in the training set, too: its scores flatter"
    return [_finding("seen texts", "validation", rows, message)] if rows else []


def majority_accuracy(counts: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Return set → accuracy of always answering the most frequent label of the training set."""
    label = majority_label(counts)
    return {
        name: rows[label] / sum(rows.values())
        for name, rows in counts.items()
        if name != "train" and any(rows.values())
    }


def majority_label(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Return the label with the most rows in the training set."""
    train = counts["train"]
    return max(train, key=train.__getitem__)


def _read_rows(config: DataConfig, numbers: set[int]) -> dict[int, Row]:
    """Read the training rows with these numbers. Raises DataError."""
    rows = itertools.chain.from_iterable(part_rows(config, part) for part in set_parts(config)["train"])
    return {number: row for number, row in enumerate(itertools.islice(rows, max(numbers) + 1)) if number in numbers}


def _place(row: Row) -> str:
    """Return ``reviews.csv, line 7``."""
    source, _, line = row.where.rpartition(", ")
    return f"{source if source.startswith('hub ') else Path(source).name}, {line}"


def _other_place(row: Row, example: Row) -> str:
    """Return the place of a row, without the source if ``example`` is of the same source."""
    source, _, line = row.where.rpartition(", ")
    return line if source == example.where.rpartition(", ")[0] else _place(row)


def _count(rows: int) -> str:
    return f"{rows:,} {'row' if rows == 1 else 'rows'}"


def _finding(kind: FindingKind, name: str, rows: int, message: str, examples: Sequence[str] = ()) -> DataFinding:
    """Return a warning with its examples in brackets, the name of the file once if all are of one file."""
    shortened = list(examples)
    if shortened:
        file = re.split(r"(?<=, )(?:line|row) \d", shortened[0])[0]
        if all(example.startswith(file) for example in shortened):
            shortened[1:] = [example.removeprefix(file) for example in shortened[1:]]
        message += f" ({'; '.join(shortened)})"
    return DataFinding(kind=kind, set=name, rows=rows, message=f"{name}: {message}", examples=tuple(examples))
