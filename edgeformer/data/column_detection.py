"""Which columns of a stranger's file hold the text and the label: guessed by names, and by what stands in them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import AmbiguousDataError, DataError
from edgeformer.data.records import check_file, delimiter_of, first_lines, said_delimiter, suffix_format
from edgeformer.data.rows import alike, listed
from edgeformer.data.sources import (
    LABEL_COLUMNS,
    PAIR_COLUMNS,
    TEXT_COLUMNS,
    Columns,
    check_named_column,
    columns_of,
    matching_column,
    plain_name,
    records_of,
)

MOST_LABELS = 200
"""Different values that a column may have and still be one of labels."""
MOST_SPELLINGS = 5 * MOST_LABELS
"""Different values that are counted, those that differ in capitals or white space only included."""
_TEXTS = (*TEXT_COLUMNS, "comment", "message", "body", "utterance", "tweet", "document", "description")
_LABELS = (LABEL_COLUMNS[:2], LABEL_COLUMNS)
"""Names of a column of labels; one of the first is preferred, of others only one may be in a file."""


@dataclass
class ColumnFacts:
    """What stands in a column.

    Attributes:
        filled: rows with something in it.
        values: value → rows, while there are at most :data:`MOST_SPELLINGS`; None: there are more, or it holds no
            scalars.
        characters: of all values together.
        example: the first one.
    """

    name: str
    filled: int = 0
    values: dict[str, int] | None = field(default_factory=dict)
    characters: int = 0
    example: str = ""

    def add(self, value: object) -> None:
        """Of one more row."""
        if isinstance(value, (list, dict)):
            self.values = None
            return
        if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
            value = int(value)
        text = "" if value is None or value != value else str(value)
        if not text.strip():
            return
        self.filled += 1
        self.characters += len(text)
        self.example = self.example or text
        if self.values is not None:
            self.values[text] = self.values.get(text, 0) + 1
            if len(self.values) > MOST_SPELLINGS:
                self.values = None

    @property
    def mean_characters(self) -> float:
        """Of a filled cell."""
        return self.characters / max(1, self.filled)

    @property
    def may_be_label(self) -> bool:
        """Whether its values repeat: two different ones at least, each in two rows on average.

        Values that differ in capitals or white space only count as one.
        """
        if self.values is None:
            return False
        return 2 <= len({alike(value) for value in self.values}) <= min(MOST_LABELS, self.filled / 2)


@dataclass(frozen=True)
class Guess:
    """A file as a source, and what was seen on the way; ``labels``: label → rows, in the order that a recipe has."""

    source: FileSource
    columns: tuple[ColumnFacts, ...]
    labels: dict[str, int]
    rows: int


def guess(path: Path, columns: Columns) -> Guess:
    """Look at every row of a file, and find what a classifier could learn of it.

    Args:
        columns: those that the user named, which are taken as they are.

    Raises:
        DataError: the file cannot be read, lacks a named column, or no column looks like text, or like labels.
    """
    source = _as_written(path, columns)
    if suffix_format(path) != "jsonl":  # whose first record may lack a key that others have
        have = dict.fromkeys(columns_of(source))
        for option, name in (("--text", columns.text), ("--pair", columns.text_pair), ("--label", columns.label)):
            if name is not None:
                check_named_column(path, option, name, have)
    facts: dict[str, ColumnFacts] = {}
    rows = 0
    for _, values in records_of(source):
        rows += 1
        for name, value in values.items():
            facts.setdefault(name, ColumnFacts(name)).add(value)
    if not rows:
        raise DataError(f"{path}: no rows in it; a set needs at least one")
    label = _label(path, facts, columns)
    text, second = _texts(path, facts, replace(columns, label=label))
    counts = facts[label].values
    if counts is None or not 2 <= len(counts) <= MOST_LABELS:
        many = f"more than {MOST_LABELS}" if counts is None or len(counts) > 2 else f"{len(counts)}"
        raise DataError(f"{path}: column {label!r} holds {many} different labels; name another one: --label COLUMN")
    told = {"text": text, "text_pair": second, "label": label, "skip_unlabelled": facts[label].filled < rows}
    return Guess(source.model_copy(update=told), tuple(facts.values()), _in_order(counts), rows)


def _in_order(counts: dict[str, int]) -> dict[str, int]:
    """Numbers by size, names by the alphabet."""
    numbers = all(label.removeprefix("-").isdecimal() for label in counts)
    return {label: counts[label] for label in sorted(counts, key=int if numbers else str.casefold)}


def _as_written(path: Path, columns: Columns) -> FileSource:
    """The file with its delimiter and whether its first line names the columns. Raises DataError."""
    check_file(path)
    kind = suffix_format(path)
    named = [name for name in (columns.text, columns.text_pair, columns.label) if name is not None]
    if kind in ("jsonl", "parquet"):
        return FileSource(kind="file", path=str(path), label=None, encoding=columns.encoding)
    lines = first_lines(path, columns.encoding)
    said = said_delimiter(lines)
    told: dict[str, object] = {"delimiter": said or delimiter_of(lines), "format": None}
    if kind == "tsv":
        quoted = any(cell[:1] == cell[-1:] == '"' for line in lines for cell in line.rstrip("\r\n").split("\t"))
        told = {"delimiter": "\t", "format": "csv"} if quoted else {}
    try:
        parted = csv.reader(lines[1:] if said else lines, delimiter=str(told.get("delimiter", "\t")))
        rows = [cells for cells in parted if cells]
    except csv.Error as error:
        raise DataError(f"{path}: not valid CSV: {error}") from None
    if not rows:
        raise DataError(f"{path}: no rows in it; a set needs at least one")
    if len(rows[0]) < 2:
        raise DataError(f"{path}: has one column; a classifier needs a text and a label, in two columns")
    numbers = bool(named) and all(name.isdecimal() and name not in rows[0] for name in named)
    if numbers or (not named and _is_row(rows)):
        told |= {"header": False, "text": "1"}
    return FileSource.model_validate(
        {"kind": "file", "path": str(path), "encoding": columns.encoding, **told, "label": None}
    )


def _is_row(rows: Sequence[list[str]]) -> bool:
    """Whether the first row of a table is none of names: a number is in it, or what comes again below it."""
    first, others = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    if any(_is_number(cell) for cell in first):
        return True
    return any(cell.strip() and any(row[place] == cell for row in others) for place, cell in enumerate(first))


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "."))
    except ValueError:
        return False
    return True


def _label(path: Path, facts: dict[str, ColumnFacts], columns: Columns) -> str:
    if columns.label is not None:
        return check_named_column(path, "--label", columns.label, facts)
    free = [fact for fact in facts.values() if fact.name not in (columns.text, columns.text_pair)]
    likely = [fact for fact in free if fact.may_be_label]
    if not likely or len(facts) < 2:
        raise DataError(
            f"{path}: no column looks like labels (2 to {MOST_LABELS} values that come again); columns: "
            f"{listed(facts)}; name it: --label COLUMN"
        )
    longest = max(facts.values(), key=lambda fact: fact.mean_characters)  # the text, also where texts repeat
    unnamed = [fact for fact in likely if fact is not longest and plain_name(fact.name) not in _TEXTS] or likely
    named = ([fact for fact in likely if plain_name(fact.name) in names] for names in _LABELS)
    candidates = next((found for found in named if found), unnamed)
    if len(candidates) == 1:
        return candidates[0].name
    shown = "; ".join(
        f"{fact.name!r} ({len(fact.values or ())} values: {listed(map(repr, fact.values or ()), 5)})"
        for fact in candidates
    )
    raise AmbiguousDataError(
        f"{path}: {len(candidates)} columns could hold the labels: {shown}; choose one: --label COLUMN"
    )


def _texts(path: Path, facts: dict[str, ColumnFacts], columns: Columns) -> tuple[str, str | None]:
    if columns.text is not None:
        second = columns.text_pair and check_named_column(path, "--pair", columns.text_pair, facts)
        return check_named_column(path, "--text", columns.text, facts), second
    free = [fact for fact in facts.values() if fact.name not in (columns.label, columns.text_pair)]
    if columns.text_pair is not None:
        second = check_named_column(path, "--pair", columns.text_pair, facts)
        first = next((a for a, b in PAIR_COLUMNS if b == second and a in facts), None)
        return first or _longest(path, free), second
    pair = next(((a, b) for a, b in PAIR_COLUMNS if a in facts and b in facts and columns.label not in (a, b)), None)
    if pair is not None:
        return pair
    text = matching_column(_TEXTS, [fact.name for fact in free if fact.filled])
    return text or _longest(path, free), None


def _longest(path: Path, facts: Sequence[ColumnFacts]) -> str:
    found = max(facts, key=lambda fact: fact.mean_characters, default=None)
    if found is None or not found.filled:
        raise DataError(f"{path}: no column looks like text; name it: --text COLUMN")
    return found.name
