"""Detects the columns of an unknown file that hold the text and the label, by their names and their values."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import AmbiguousDataError, DataError
from edgeformer.data.records import check_file, detect_delimiter, file_records, first_lines, suffix_format
from edgeformer.data.rows import comparison_key, format_names
from edgeformer.data.sources import (
    LABEL_COLUMNS,
    PAIR_COLUMNS,
    TEXT_COLUMNS,
    Columns,
    columns_of,
    matching_column,
    plain_name,
)

MAX_LABELS = 200
"""Different values of a column of labels."""
_MAX_SPELLINGS = 5 * MAX_LABELS
"""Different values that are counted, with those that differ in case or white space only."""
_TEXT_NAMES = (*TEXT_COLUMNS, "comment", "message", "body", "utterance", "tweet", "document", "description")
_LABEL_NAMES = (LABEL_COLUMNS[:2], LABEL_COLUMNS)
"""Names of a column of labels: the first group is preferred."""


@dataclass
class ColumnFacts:
    """Statistics of the values of a column.

    Attributes:
        filled: rows with a value.
        values: value → rows; None: more than _MAX_SPELLINGS values, or values that are not scalars.
        characters: of all values together.
        example: the first value.
    """

    name: str
    filled: int = 0
    values: dict[str, int] | None = field(default_factory=dict)
    characters: int = 0
    example: str = ""

    def add(self, value: object) -> None:
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
            if len(self.values) > _MAX_SPELLINGS:
                self.values = None

    @property
    def mean_characters(self) -> float:
        return self.characters / max(1, self.filled)

    @property
    def may_be_label(self) -> bool:
        """Whether there are at least two different values, each in two rows on average; case does not count."""
        if self.values is None:
            return False
        return 2 <= len({comparison_key(value) for value in self.values}) <= min(MAX_LABELS, self.filled / 2)


@dataclass(frozen=True)
class DetectedColumns:
    """Detected columns of a file.

    Attributes:
        source: the file with its columns.
        columns: statistics of all columns.
        labels: label → rows, in the order of a recipe.
        rows: number of rows.
    """

    source: FileSource
    columns: tuple[ColumnFacts, ...]
    labels: dict[str, int]
    rows: int


def detect_columns(path: Path, columns: Columns) -> DetectedColumns:
    """Read every row of a file and detect the columns of a classifier's text and label, unless the user names them.

    Raises DataError: the file cannot be read, lacks a named column, or no column looks like text, or like labels.
    """
    source = _detect_layout(path, columns)
    if suffix_format(path) != "jsonl":  # whose first record may lack a key that others have
        columns.check(path, columns_of(source))
    facts: dict[str, ColumnFacts] = {}
    rows = 0
    for _, values in file_records(source):
        rows += 1
        for name, value in values.items():
            facts.setdefault(name, ColumnFacts(name)).add(value)
    if not rows:
        raise DataError(f"{path}: no rows in it; a set needs at least one")
    columns.check(path, facts)
    label = columns.label or _detect_label(path, facts, columns)
    text, second = _detect_texts(path, facts, replace(columns, label=label))
    counts = facts[label].values
    if counts is None or not 2 <= len(counts) <= MAX_LABELS:
        number = f"more than {MAX_LABELS}" if counts is None or len(counts) > 2 else f"{len(counts)}"
        raise DataError(f"{path}: column {label!r} holds {number} different labels; name another one: --label COLUMN")
    are_numbers = all(name.removeprefix("-").isdecimal() for name in counts)
    labels = {name: counts[name] for name in sorted(counts, key=int if are_numbers else str.casefold)}
    names = {"text": text, "text_pair": second, "label": label, "skip_unlabelled": facts[label].filled < rows}
    return DetectedColumns(source.model_copy(update=names), tuple(facts.values()), labels, rows)


def _detect_layout(path: Path, columns: Columns) -> FileSource:
    """Return the file with its delimiter, and whether its first line names the columns. Raises DataError."""
    check_file(path)
    kind = suffix_format(path)
    if kind in ("jsonl", "parquet"):
        return FileSource(kind="file", path=str(path), label=None, encoding=columns.encoding)
    lines = first_lines(path, columns.encoding)
    delimiter, table_lines = detect_delimiter(iter(enumerate(lines)), None)
    layout: dict[str, object] = {"delimiter": delimiter, "format": None}
    if kind == "tsv":
        delimiter = "\t"
        is_quoted = any(cell[:1] == cell[-1:] == '"' for line in lines for cell in line.rstrip("\r\n").split("\t"))
        layout = {"delimiter": "\t", "format": "csv"} if is_quoted else {}
    try:
        rows = [cells for cells in csv.reader((line for _, line in table_lines), delimiter=delimiter) if cells]
    except csv.Error as error:
        raise DataError(f"{path}: not valid CSV: {error}") from None
    if not rows:
        raise DataError(f"{path}: no rows in it; a set needs at least one")
    if len(rows[0]) < 2:
        raise DataError(f"{path}: has one column; a classifier needs a text and a label, in two columns")
    names = columns.by_option().values()
    are_numbers = bool(names) and all(name.isdecimal() and name not in rows[0] for name in names)
    if are_numbers or (not names and _is_data(rows)):
        layout |= {"header": False, "text": "1"}
    return FileSource.model_validate(
        {"kind": "file", "path": str(path), "encoding": columns.encoding, **layout, "label": None}
    )


def _is_data(rows: Sequence[list[str]]) -> bool:
    """Return whether the first row has no column names: it has a number, or a value that repeats below it."""
    first, rest = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    for place, cell in enumerate(first):
        try:
            float(cell.replace(",", "."))
            return True
        except ValueError:
            if cell.strip() and any(row[place] == cell for row in rest):
                return True
    return False


def _detect_label(path: Path, facts: dict[str, ColumnFacts], columns: Columns) -> str:
    free = [fact for fact in facts.values() if fact.name not in (columns.text, columns.text_pair)]
    likely = [fact for fact in free if fact.may_be_label]
    if not likely or len(facts) < 2:
        raise DataError(
            f"{path}: no column looks like labels (2 to {MAX_LABELS} values that come again); columns: "
            f"{format_names(facts)}; name it: --label COLUMN"
        )
    longest = max(facts.values(), key=lambda fact: fact.mean_characters)  # the text, also if texts repeat
    by_name = [[fact for fact in likely if plain_name(fact.name) in names] for names in _LABEL_NAMES]
    other = [fact for fact in likely if fact is not longest and plain_name(fact.name) not in _TEXT_NAMES]
    candidates = next(group for group in (*by_name, other, likely) if group)
    if len(candidates) == 1:
        return candidates[0].name
    descriptions = "; ".join(
        f"{fact.name!r} ({len(fact.values or ())} values: {format_names(map(repr, fact.values or ()), 5)})"
        for fact in candidates
    )
    raise AmbiguousDataError(
        f"{path}: {len(candidates)} columns could hold the labels: {descriptions}; choose one: --label COLUMN"
    )


def _detect_texts(path: Path, facts: dict[str, ColumnFacts], columns: Columns) -> tuple[str, str | None]:
    if columns.text is not None:
        return columns.text, columns.text_pair
    text, second = None, columns.text_pair
    free = [fact for fact in facts.values() if fact.name not in (columns.label, second)]
    if second is not None:
        text = next((first for first, other in PAIR_COLUMNS if other == second and first in facts), None)
    else:
        pairs = (pair for pair in PAIR_COLUMNS if facts.keys() >= {*pair} and columns.label not in pair)
        pair = next(pairs, None)
        if pair is not None:
            return pair
        text = matching_column(_TEXT_NAMES, [fact.name for fact in free if fact.filled])
    if text is None:
        longest = max(free, key=lambda fact: fact.mean_characters, default=None)
        if longest is None or not longest.filled:
            raise DataError(f"{path}: no column looks like text; name it: --text COLUMN")
        text = longest.name
    return text, second
