"""Detects the columns of an unknown file that hold the text and the label, by their names and their values."""

import csv
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import AmbiguousDataError, DataError, InputError
from edgeformer.data import records, sources
from edgeformer.data.rows import comparison_key, excerpt, format_names, plain_label
from edgeformer.data.sources import CHARACTERS, LABEL_COLUMNS, PAIR_COLUMNS, SPANS, TEXT_COLUMNS, Columns

MAX_LABELS = 200  # maximum number of different values in a label column
_MAX_SPELLINGS = 5 * MAX_LABELS  # maximum number of counted values, which differ at least in case or white space
_TEXT_NAMES = (*TEXT_COLUMNS, "comment", "message", "body", "utterance", "tweet", "document", "description")
_LABEL_NAMES = (LABEL_COLUMNS[:2], LABEL_COLUMNS)  # names of label columns: the first group is preferred
_ONE_LABEL = (
    "{}: every labelled row has the same label, {!r} (column {!r}); add rows with another label, or choose another "
    "column: --label COLUMN"
)
"""Message with the file, the label and the column."""


@dataclass
class ColumnFacts:
    """Statistics of a column: rows with a value, characters of all values, the first value."""

    name: str
    filled: int = 0
    values: dict[str, int] | None = field(default_factory=dict)  # value → rows; None: too many, or not scalars
    characters: int = 0
    has_booleans: bool = False
    example: str = ""

    def add(self, value: object) -> None:
        if isinstance(value, (list, dict)):
            self.values = None
            return
        self.has_booleans |= isinstance(value, bool)
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

    def holds_texts(self, rows: int) -> bool:
        """Return whether most of the ``rows`` have different values that are long and have words, as the first has."""
        different = self.filled if self.values is None else len(self.values)
        words = sum(map(str.isalpha, self.example.split()))
        return 2 * different > rows and self.mean_characters >= 15 and words >= 2


@dataclass(frozen=True)
class DetectedColumns:
    """Detected columns of a file. ``labels``: label → rows, in the order of a recipe. ``label_values``: as there."""

    source: FileSource
    columns: tuple[ColumnFacts, ...]
    labels: dict[str, int]
    rows: int
    label_values: tuple[int, ...] = ()


def detect_spans(path: Path, columns: Columns) -> DetectedColumns | None:
    """Return labels of a file of texts with spans; None: it is another file. Raises DataError if it is damaged."""
    records.check_file(path)
    source = sources.file_source(path, SPANS, columns=columns)
    kind = records.suffix_format(path)
    if kind == "jsonl" and columns.text_pair is None:
        spans = next((values.get(str(source.label)) for _, values in records.file_records(source)), None)
        if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
            return None
    elif kind != "conll":
        return None
    for option in CHARACTERS.keys() & columns.layout.keys():
        raise InputError(f"--{option}: is for CSV, and {path} has texts with spans ({kind}); leave it out")
    facts = [ColumnFacts(str(source.text)), ColumnFacts(str(source.label))]
    labels: Counter[str] = Counter()
    rows = 0
    for row in sources.read(source):
        rows += 1
        text: Any = row.text
        facts[0].add(str(text))
        facts[1].filled += bool(text.spans)
        facts[1].example = facts[1].example or "; ".join(text[span.start : span.end] for span in text.spans)
        labels.update(span.label for span in text.spans)
    facts[1].values = dict(labels)
    if not labels:
        raise DataError(f"{path}: none of its {rows:,} texts has a labelled span; label some of them")
    return DetectedColumns(source, tuple(facts), dict(sorted(labels.items())), rows)


def detect_columns(path: Path, columns: Columns) -> DetectedColumns:
    """Read all rows of a file and detect its text and label columns, unless the user names them. Raises DataError."""
    # 1. Read all rows
    source = _detect_layout(path, columns)
    first_names = sources.columns_of(source)
    if records.suffix_format(path) != "jsonl":  # the first record of JSON Lines may lack a key that others have
        columns.check(path, first_names)
    facts: dict[str, ColumnFacts] = {}
    rows = 0
    for _, values in records.file_records(source):
        rows += 1
        for name, value in values.items():
            facts.setdefault(name, ColumnFacts(name)).add(value)
    columns.check(path, facts)
    # 2. Find the column of the label
    label = columns.label
    if not label:
        free = [fact for fact in facts.values() if fact.name not in [name for _, name in columns.by_option(facts)]]
        # At least two different values, each in two rows on average; case does not count.
        likely = [
            fact
            for fact in free
            if fact.values is not None
            and 2 <= len({comparison_key(value) for value in fact.values}) <= min(MAX_LABELS, fact.filled / 2)
        ]
        constant = [fact for fact in free if fact.values is not None and len(fact.values) == 1]
        constant = [fact for fact in constant if sources.plain_name(fact.name) in LABEL_COLUMNS or len(facts) == 2]
        if not likely and constant:
            raise DataError(_ONE_LABEL.format(path, excerpt(constant[0].example, 80), constant[0].name))
        if not likely or len(facts) < 2:
            raise DataError(
                f"{path}: no column looks like labels (2 to {MAX_LABELS} different values, each in two rows on "
                f"average); columns: {format_names(facts)}; choose one: --label COLUMN"
            )
        longest = max(facts.values(), key=lambda fact: fact.mean_characters)  # the text, also if texts repeat
        by_name = [[fact for fact in likely if sources.plain_name(fact.name) in names] for names in _LABEL_NAMES]
        other = [fact for fact in likely if fact is not longest and sources.plain_name(fact.name) not in _TEXT_NAMES]
        candidates = next(group for group in (*by_name, other, likely) if group)
        if len(candidates) > 1:
            descriptions = "; ".join(
                f"{fact.name!r} ({len(fact.values or ())} values: {format_names(map(repr, fact.values or ()), 5)})"
                for fact in candidates
            )
            raise AmbiguousDataError(
                f"{path}: {len(candidates)} columns could hold the labels: {excerpt(descriptions, 200)}; choose one: "
                "--label COLUMN"
            )
        label = candidates[0].name
    # 3. Find the columns of the texts
    text, second = columns.texts(facts), columns.text_pair
    if text is None and second is None:
        pairs = (pair for pair in PAIR_COLUMNS if facts.keys() >= {*pair} and label not in pair)
        text, second = next(pairs, (None, None))
    if text is None:
        free = [fact for fact in facts.values() if fact.filled and fact.name not in (label, second)]
        if not free:
            raise DataError(f"{path}: no column looks like text; choose one: --text COLUMN")
        first_texts = [first for first, other in PAIR_COLUMNS if other == second]
        text = sources.matching_column([*first_texts, *_TEXT_NAMES], [fact.name for fact in free])
        text = text or max(free, key=lambda fact: fact.mean_characters).name
    # 4. Count and order the labels
    counts = facts[label].values
    if counts is not None:  # "0" and "0.0" are one label, and blanks behind commas belong to none
        spellings, merged = {name.strip() for name in counts}, Counter[str]()
        for spelling, count in counts.items():
            plain = plain_label(spelling)
            merged[plain if plain in spellings else spelling.strip()] += count
        counts = merged
    if counts is not None and len(counts) == 1:
        raise DataError(_ONE_LABEL.format(path, excerpt(facts[label].example, 80), label))
    if counts is None or not 2 <= len(counts) <= MAX_LABELS:
        number = f"more than {MAX_LABELS}" if counts is None or counts else "no"
        problem = f"column {label!r} has {number} different labels, and 2 to {MAX_LABELS} are possible"
        raise DataError(f"{path}: {problem}; choose another column: --label COLUMN")
    are_numbers = all(name.removeprefix("-").isdecimal() for name in counts)
    labels = {name: counts[name] for name in sorted(counts, key=int if are_numbers else str.casefold)}
    label_values: tuple[int, ...] = ()
    if columns.label_names is not None:
        names = [name.strip() for name in columns.label_names.split(",")]
        if not are_numbers or len(names) != len(labels) or len({*names} - {""}) != len(labels):
            raise DataError(f"{path}: --labels must name each number of column {label!r}: {format_names(labels)}")
        labels, label_values = dict(zip(names, labels.values(), strict=True)), tuple(map(int, labels))
    keys = {"text": text, "text_pair": second, "label": label, "skip_unlabelled": facts[label].filled < rows}
    return DetectedColumns(source.model_copy(update=keys), tuple(facts.values()), labels, rows, label_values)


def _detect_layout(path: Path, columns: Columns) -> FileSource:
    """Return the file with its delimiter, and whether its first line names the columns. Raises DataError."""
    records.check_file(path)
    stated, kind = columns.layout, records.suffix_format(path)
    layout: dict[str, object] = {"kind": "file", "path": str(path), "label": None, **stated}
    if kind in ("jsonl", "parquet"):
        return FileSource.model_validate(layout)
    with records.open_data_file(path, columns.encoding) as file:
        lines = [line for _, line in records.first_lines(records.lines_of(path, file))]
    dialect, table_lines = records.detect_dialect(iter(enumerate(lines)), stated.get("delimiter"), stated.get("quote"))
    if kind == "tsv" and not {"delimiter", "quote"} & stated.keys():
        dialect = records.Dialect("\t", '"')
        if any(cell[:1] == cell[-1:] == '"' for line in lines for cell in line.rstrip("\r\n").split("\t")):
            layout |= {"delimiter": "\t", "format": "csv"}
    else:
        layout |= {"delimiter": dialect.delimiter, **({"quote": "'"} if dialect.quotechar == "'" else {})}
    rows: list[list[str]] = []
    with suppress(csv.Error):  # raised again when the rows are read
        table = csv.reader((line for _, line in table_lines), **dialect._asdict())
        rows = [cells for cells in table if cells]
    if not rows:
        return FileSource.model_validate(layout)
    first = rows[0]
    if len(first) < 2:
        raise DataError(
            f"{path}: has one column, but a classifier needs two, a text and a label; if it has more, state what "
            "separates them: --delimiter"
        )
    names = [name for _, name in columns.by_option(first)]
    complete = [cells for cells in rows if len(cells) == len(first)]
    repeats = any(cells[0].strip() and cells[0] in cells[1:] for cells in zip(*complete, strict=True))
    is_data = repeats or any(re.fullmatch(r"\s*[+-]?[\d.,]*\d\s*", cell) for cell in first)
    are_numbers = all(name.isdecimal() for name in names) and (repeats or not {*names} <= {*first})
    if are_numbers if names else is_data:
        layout |= {"header": False, "text": "1"}
    return FileSource.model_validate(layout)
