"""Warnings about a data set: empty texts, duplicates, contradictions, labels without rows, uneven labels."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.data.rows import LabelledTexts, comparison_key, excerpt, join_pair, label_counts
from edgeformer.data.sources import load_part, part_rows
from edgeformer.data.splits import set_parts

UNEVEN = "uneven labels"
_EXAMPLES = 3
_TEXT_CHARACTERS = 40  # maximum length of a text in a message
_UNEVEN_RATIO = 10  # labels are uneven from this ratio of the most frequent to the rarest label


def empty_texts(part: str, rows: int, places: Sequence[str] = ()) -> list[DataFinding]:
    """Return the warning about ``rows`` rows without a text; ``places``: where they are, if known."""
    examples = [*map(_place, places[:_EXAMPLES])]
    return [_finding("empty texts", part, rows, f"{_count(rows)} without a text: left out", examples)] if rows else []


def load_with_findings(
    config: DataConfig, names: Iterable[str] | None = None
) -> tuple[dict[str, LabelledTexts], list[DataFinding]]:
    """Read parts of the config, with warnings; without ``names`` all, with repetitions in the training parts.

    Raises DataError.
    """
    parts: dict[str, LabelledTexts] = {}
    findings: list[DataFinding] = []
    for part in config.parts if names is None else names:
        places: list[str] = []
        parts[part] = load_part(config, part, places)
        findings += empty_texts(part, len(places), places)
    return parts, findings + (repetitions(config, parts) if names is None else [])


def repetitions(config: DataConfig, parts: Mapping[str, LabelledTexts]) -> list[DataFinding]:
    """Return warnings about texts that repeat (but for case and white space) in the training parts. Raises DataError.

    Takes 8 bytes a row. The sources are read again up to the first examples.
    """
    if config.synthetic:
        return []
    pool = set_parts(config)["train"]
    # 1. Find the first row with the text of each row
    name = " + ".join(pool)
    texts = itertools.chain.from_iterable(parts[part].texts for part in pool)
    labels = np.concatenate([np.empty(0, np.int64), *(parts[part].labels for part in pool)])
    # A set of a million texts has a hash collision with probability 1e-7.
    hashes = np.fromiter((hash(comparison_key(text)) for text in texts), np.int64, len(labels))
    order = np.argsort(hashes, kind="stable")
    starts = np.flatnonzero(np.diff(hashes[order], prepend=~hashes[order[:1]]))
    first = np.empty(len(labels), np.int64)  # of each row, the first row with its text
    first[order] = np.repeat(order[starts], np.diff(starts, append=len(order)))
    # 2. Find repeated and contradicting rows, and read the first of them again
    repeated = np.flatnonzero(first != np.arange(len(first)))
    contradicting = np.flatnonzero(labels != labels[first])
    contradicted, places = np.unique(first[contradicting], return_index=True)
    repetition_pairs = [(int(row), int(first[row])) for row in repeated[:_EXAMPLES]]
    contradiction_pairs = [*zip(contradicted.tolist(), contradicting[places].tolist(), strict=True)][:_EXAMPLES]
    numbers = {number for pair in (*repetition_pairs, *contradiction_pairs) for number in pair}
    rows = itertools.chain.from_iterable(part_rows(config, part) for part in pool) if numbers else iter(())
    examples = {n: row for n, row in enumerate(itertools.islice(rows, max(numbers, default=-1) + 1)) if n in numbers}
    # 3. Describe them
    findings: list[DataFinding] = []
    if len(repeated):
        together = "; rows with the same text stay in one set" if config.split == "stratified" else ""
        message = f"{_count(len(repeated))} with the text of an earlier row: kept{together}"
        place_pairs = [[_place(examples[row].where) for row in pair] for pair in repetition_pairs]
        repetition_examples = [f"{place} as in {first_place}" for place, first_place in place_pairs]
        findings.append(_finding("duplicates", name, len(repeated), message, repetition_examples))
    if len(contradicting):
        contradictions = []
        for row, other in contradiction_pairs:
            text = " ".join(join_pair(examples[row].text).split())
            both = []
            for n in (row, other):
                names = config.label_names(int(labels[n]))
                label = repr(f"{config.separator} ".join(names)) if names else "no label"
                both.append(f"{_place(examples[n].where)} {label}")
            contradictions.append(f"{', '.join(both)}: {excerpt(text, _TEXT_CHARACTERS)!r}")
        count = int(np.isin(first, contradicted).sum())
        message = (
            f"{len(contradicted):,} {'text has' if len(contradicted) == 1 else 'texts have'} different labels in "
            f"{_count(count)}: kept, although no model can be right on all of them"
        )
        findings.append(_finding("contradictions", name, count, message, contradictions))
    return findings


def rows_per_label(config: DataConfig, sets: Mapping[str, LabelledTexts]) -> dict[str, dict[str, int]]:
    """Return set → label → rows."""
    labels, several = config.labels, config.separator is not None
    counts = {name: label_counts(rows.labels, len(labels), several=several) for name, rows in sets.items()}
    return {name: dict(zip(labels, numbers, strict=True)) for name, numbers in counts.items()}


def label_findings(
    config: DataConfig, counts: Mapping[str, Mapping[str, int]], inexact_spans: Mapping[str, int] = MappingProxyType({})
) -> list[DataFinding]:
    """Return warnings about labels without rows and about uneven labels; none for rows with scores.

    ``inexact_spans``: set → spans that no prediction can equal, because a word crosses their border.
    """
    if not config.labels:
        return []
    findings, labels, train = [], config.labels, counts["train"]
    learned = [label for label in labels if train.get(label)]
    for name, rows in counts.items():
        missing = [label for label in (labels if name == "train" else learned) if not rows.get(label)]
        if missing:
            effect = (
                "the model cannot learn it" if name == "train" else "how well the model recognises it is not scored"
            )
            message = f"no row has the label {', '.join(map(repr, missing))}: {effect}"
            findings.append(_finding("labels without rows", name, 0, message))
    rarest, commonest = min(learned, key=train.__getitem__), max(learned, key=train.__getitem__)
    # Of several labels per row most rows lack most labels.
    if train[rarest] * _UNEVEN_RATIO <= train[commonest] and config.separator is None:
        share = train[rarest] / sum(train.values())
        _, majority = majority_accuracy(counts)
        accuracies = ", ".join(f"{accuracy:.4f} on {name}" for name, accuracy in majority.items())
        baseline = f"; always answering {commonest!r} has an accuracy of {accuracies}" if accuracies else ""
        message = f"labels are uneven: {rarest!r} has {_count(train[rarest])} ({share:.1%}){baseline}"
        findings.append(_finding(UNEVEN, "train", train[rarest], message))
    for name, count in inexact_spans.items():
        if count:
            message = "begin or end inside a word of the tokenizer: read as the words that they touch (see data.pieces)"
            spans = f"{count:,} {'span' if count == 1 else 'spans'}"
            findings.append(_finding("inexact spans", name, count, f"{spans} {message}"))
    return findings


def seen_findings(config: DataConfig, sets: Mapping[str, LabelledTexts]) -> list[DataFinding]:
    """Return the warning about validation texts that are also training texts, because validation selects the epoch.

    docs/explanation/protocols.md covers `random-split`; a stratified split keeps equal texts together.
    """
    if config.split == "random-split":
        return []
    trained = {comparison_key(text) for text in sets["train"].texts}
    rows = sum(comparison_key(text) in trained for text in sets["validation"].texts)
    message = f"{_count(rows)} of {len(sets['validation']):,} are also in the training set, so its scores are too good"
    return [_finding("seen texts", "validation", rows, message)] if rows else []


def majority_accuracy(counts: Mapping[str, Mapping[str, int]]) -> tuple[str, dict[str, float]]:
    """Return the most frequent label of the training set, and set → accuracy of always answering it."""
    label = max(counts["train"], key=counts["train"].__getitem__)
    scored = {name: rows for name, rows in counts.items() if name != "train" and any(rows.values())}
    return label, {name: rows[label] / sum(rows.values()) for name, rows in scored.items()}


def _place(where: str) -> str:
    """Return ``reviews.csv, line 7``."""
    source, _, line = where.rpartition(", ")
    return f"{source if source.startswith('hub ') else Path(source).name}, {line}"


def _count(rows: int) -> str:
    return f"{rows:,} {'row' if rows == 1 else 'rows'}"


def _finding(kind: Any, name: str, rows: int, message: str, examples: Sequence[str] = ()) -> DataFinding:
    """Return a warning with its examples in brackets."""
    brackets = f" ({'; '.join(examples)})" if examples else ""
    return DataFinding(kind=kind, set=name, rows=rows, message=f"{name}: {message}{brackets}", examples=tuple(examples))
