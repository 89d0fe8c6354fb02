"""Rows: a text or a pair of texts with its label, built from records (column → value) of any format."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from edgeformer.artifacts.data_config import FileSource, HubSource, SpanSource, Tag, column_names
from edgeformer.artifacts.errors import DataError, did_you_mean

T = TypeVar("T")
Record = tuple[str, Mapping[str, object]]  # place of a record ("reviews.csv, line 7"), and its values by column
Int64s = NDArray[np.int64]
Text = str | tuple[str, str]  # a text, or a pair of texts, which a tokenizer joins by its template
Label = str | int | float | tuple[str | int, ...]
"""A label of a source: a name or a number; a tuple where a row can have several labels."""
MAX_LABELS = 62  # maximum number of labels if a row can have several: each is one bit of an int64
SCORE_UNIT, MAX_SCORE = 1e-6, 1e6
"""Unit in which scores are stored as integers, as caches, fingerprints and golden inputs need them; largest score."""
_MAX_NAME, _MAX_NAMES = 80, 170  # maximum length of a column name or label in a message, and of several


class Unreadable(str):
    """JSON text of a value that is not text; ``problem``: the reason."""

    problem: str

    def __new__(cls, value_json: str, problem: str) -> Self:
        text = super().__new__(cls, value_json)
        text.problem = problem
        return text


class Prompted(str):
    """A text with a ``prompt`` in front of it, which may be empty."""

    prompt: str

    def __new__(cls, prompt: str, text: str) -> Self:
        prompted = super().__new__(cls, prompt + text)
        prompted.prompt = prompt
        return prompted


class Span(NamedTuple):
    """A labelled part of a text: the characters ``start`` to ``end``, counted in Unicode code points."""

    start: int
    end: int
    label: str


class SpanText(str):
    """A text with its labelled ``spans``, ascending and disjoint."""

    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...]) -> Self:
        spanned = super().__new__(cls, text)
        spanned.spans = spans
        return spanned


@dataclass(frozen=True)
class Row:
    """A text or pair with its label (None: unlabelled), its place, and the values of its record if they are kept."""

    text: Text
    label: Label | None = None
    where: str = ""
    values: Mapping[str, object] = field(default_factory=dict, compare=False, repr=False)


def rows_of(
    records: Iterable[Record], source: FileSource | HubSource, separator: str | None = None, *, blanks: bool = False
) -> Iterator[Row]:
    """Make rows of records.

    Args:
        separator: separates the labels of a row, which has none, one or several; None: every row has one label.
        blanks: a missing text (null) becomes an empty text and a value that is no text :class:`Unreadable`; rows have
            the values of their records.

    Raises DataError: a column is missing, a value is not text, or a row has no label and may not be skipped.
    """
    names = column_names(source.text)
    text_columns = names if source.text_pair is None else (*names, source.text_pair)
    columns = [("text", column) for column in text_columns]
    if source.label is not None and source.label_value is None:
        columns.insert(0, ("label", source.label))
    for where, values in records:
        label = _label(where, values, source, separator)
        if label is None and source.skip_unlabelled and (source.label is None or source.label in values):
            continue
        for kind, name in columns:
            if name not in values:
                hint = f"{did_you_mean(name, list(values))}columns: {format_names(values) if values else 'none'}"
                raise DataError(f"{where}: no column {name!r}; {hint}; set {kind}: of the source to one of them")
        if label is None and (source.label is not None or source.label_value is not None):
            raise DataError(
                f"{where}: has no label in column {source.label!r}; fill it in, or set skip_unlabelled: true for this "
                "source to leave such rows out"
            )
        texts: list[str] = []
        for column in text_columns:
            value, problem = values[column], None
            if isinstance(value, str):
                try:
                    value.encode("utf-8")
                except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
                    problem = (
                        f"character {error.start + 1} is half of a surrogate pair (U+{ord(value[error.start]):04X}), "
                        "which is not text; correct or remove this row"
                    )
            elif value is not None or not (blanks or column in names[1:] or column in names[:-1]):
                name = "nothing" if value is None else f"a value of type {type(value).__name__}"
                problem = f"column {column!r} has {name} instead of text; correct or remove this row"
            if problem is not None and not blanks:
                raise DataError(f"{where}: {problem}")
            text = "" if value is None else str(value)
            texts.append(text if problem is None else Unreadable(json.dumps(value, default=str), problem))
        if len(names) > 1:  # the first text is that of several columns, without empty cells
            cells = texts[: len(names)]
            unreadable: list[str] = [cell for cell in cells if isinstance(cell, Unreadable)]
            texts[: len(names)] = unreadable[:1] or [" ".join(cell for cell in cells if cell.strip())]
        yield Row(texts[0] if len(texts) == 1 else (texts[0], texts[1]), label, where, values if blanks else {})


def span_rows(records: Iterable[Record], source: SpanSource, labels: Sequence[str] = ()) -> Iterator[Row]:
    """Make rows of texts with labelled spans; the labels of a row are those of its spans.

    Raises DataError: as :func:`rows_of`, or a span that is damaged, overlaps a second span, or has a label that is not
    among ``labels`` (empty: any).
    """
    records, copies = itertools.tee(records)
    for (where, values), row in zip(records, rows_of(copies, source.model_copy(update={"label": None})), strict=True):
        items = values.get(str(source.label))
        if not isinstance(items, (list, tuple)):
            raise DataError(
                f"{where}: has no list of spans under {source.label!r}; keys: {format_names(values)}; a text without "
                "spans has an empty list"
            )
        spans = []
        for item in items:
            fields = {key: item.get(key) for key in Span._fields} if isinstance(item, Mapping) else {}
            start, end, label = fields.get("start"), fields.get("end"), fields.get("label")
            if type(start) is not int or type(end) is not int or not isinstance(label, str) or not label:
                shown = json.dumps(item, default=str, ensure_ascii=False)[:80]
                raise DataError(f'{where}: {shown} is no span; it must be {{"start": 0, "end": 3, "label": "NAME"}}')
            if not 0 <= start < end <= len(row.text):
                raise DataError(
                    f"{where}: the span {start} to {end} ({label}) is empty or outside the text of {len(row.text)} "
                    "characters; offsets count Unicode code points from 0, and end is behind the last one"
                )
            if labels and label not in labels:
                hint = did_you_mean(label, labels)
                raise DataError(
                    f"{where}: label {label[:_MAX_NAME]!r} is not in the set; {hint}allowed: {format_names(labels)}; "
                    "change the span, or data.labels"
                )
            spans.append(Span(start, end, label))
        spans.sort()
        for span, following in itertools.pairwise(spans):
            if following.start < span.end:
                both = " and ".join(f"{each.start} to {each.end} ({each.label})" for each in (span, following))
                raise DataError(f"{where}: the spans {both} overlap; a character can be in one span only: remove one")
        names = tuple(dict.fromkeys(span.label for span in spans))
        yield Row(SpanText(str(row.text), tuple(spans)), names, where)


def tag_runs(tags: Iterable[Tag]) -> list[tuple[str, int, int]]:
    """Return label, begin and end of each span of a sequence of tags, leniently, as conlleval and seqeval do.

    A span also begins without a B: behind O or another label. It ends where no token of its label follows.
    """
    runs: list[tuple[str, int, int]] = []
    begin: int | None = None
    last: Tag = "O", ""
    for index, (position, label) in enumerate([*tags, ("O", "")]):
        begins = position != "O" and (position in "BS" or last[0] in "OES" or label != last[1])
        if begin is not None and (begins or position == "O"):
            runs.append((last[1], begin, index))
            begin = None
        begin = index if begins else begin
        last = position, label
    return runs


def _label(
    where: str, values: Mapping[str, object], source: FileSource | HubSource, separator: str | None
) -> Label | None:
    """Return the label of a row, or its labels if a separator stands between them; None: unlabelled."""
    value: object = source.label_value
    if source.label is not None and source.label in values:
        cell = values[source.label]
        is_blank = cell is None or (isinstance(cell, str) and not cell.strip())
        if is_blank or (isinstance(cell, float) and math.isnan(cell)):
            cell = None
            # A row with an empty label column is unlabelled even if label_value gives all rows a label.
            if source.skip_unlabelled:
                return None
        value = cell if value is None else value
    if value is None:
        return None if separator is None else ()
    is_list = separator is not None and isinstance(value, (list, tuple))
    items: Sequence[object] = value if is_list and isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(item, (str, int) if is_list else (str, int, float)) for item in items):
        raise DataError(
            f"{where}: column {source.label!r} has a value of type {type(value).__name__}; a label must be a name or "
            "a number, several labels a list of them"
        )
    if separator is not None and isinstance(value, str):
        return tuple(name for part in value.split(separator) if (name := part.strip()))
    # pandas writes integers as floats next to missing values
    labels: tuple[Any, ...] = tuple(
        int(item) if isinstance(item, bool) or (isinstance(item, float) and item.is_integer()) else item
        for item in items
    )
    label: Label = labels[0] if separator is None else labels
    return label


def text_parts(text: Text) -> tuple[str, ...]:
    """Return both texts of a pair, or a text alone."""
    return (text,) if isinstance(text, str) else text


def join_pair(text: Text) -> str:
    """Return a text, or both of a pair joined by a space: to count words and letters, not for a model."""
    return text if isinstance(text, str) else " ".join(text)


def comparison_key(text: Text) -> str:
    """Return a key that is equal for texts that differ in case and white space only."""
    return "\0".join(" ".join(part.casefold().split()) for part in text_parts(text))


def format_names(names: Iterable[str], limit: int = 20) -> str:
    """Return the first names for a message, long names shortened, and of long names fewer."""
    names = list(names)
    shown = [excerpt(name, _MAX_NAME) for name in names[:limit]]
    while len(shown) > 1 and sum(map(len, shown)) > _MAX_NAMES:
        shown.pop()
    return ", ".join([*shown, *([f"… ({len(names):,} in all)"] if len(names) > len(shown) else [])])


def excerpt(text: str, limit: int) -> str:
    """Return the beginning of a text of the data for a message."""
    return text if len(text) <= limit else f"{text[:limit]}…"


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with their labels."""

    texts: list[Text]  # [n] as the source has them, not cleaned
    labels: NDArray[np.int64]  # [n], indices into data.labels; with several labels per row, sets of labels as bits
    sources: NDArray[np.int64] | None = None  # [n], the number of each row's source; None: not needed
    empty: int = 0  # rows of a file without a text, which are left out

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: NDArray[np.int64]) -> LabelledTexts:
        """Return the rows at ``indices``, in that order."""
        sources = None if self.sources is None else self.sources[indices]
        return LabelledTexts([self.texts[i] for i in indices.tolist()], self.labels[indices], sources)

    @classmethod
    def joined(cls, sets: Sequence[LabelledTexts], *, with_sources: bool = False) -> LabelledTexts:
        """Concatenate sets. With ``with_sources``, number the sources; a set without numbers is one source."""
        texts = [text for rows in sets for text in rows.texts]
        labels = np.concatenate([np.empty(0, np.int64), *(rows.labels for rows in sets)])
        if not with_sources:
            return cls(texts, labels)
        numbers, first = [np.empty(0, np.int64)], 0
        for rows in sets:
            sources = np.zeros(len(rows), np.int64) if rows.sources is None else rows.sources
            numbers.append(sources + first)
            first += int(sources.max(initial=-1)) + 1
        return cls(texts, labels, np.concatenate(numbers))

    @classmethod
    def of(cls, pairs: Iterable[tuple[Text, int]]) -> LabelledTexts:
        """Return texts with their labels, given as pairs."""
        pairs = [*pairs]
        return cls([text for text, _ in pairs], np.array([label for _, label in pairs], dtype=np.int64))

    @classmethod
    def unlabelled(cls, texts: Sequence[Text]) -> LabelledTexts:
        """Return texts with label 0, as the token cache and the fingerprints need them."""
        return cls(list(texts), np.zeros(len(texts), dtype=np.int64))

    def fingerprint(self) -> str:
        """Return the sha256 of texts and labels, in order."""
        digest = hashlib.sha256()
        hash_labels(digest, self.labels)
        hash_texts(digest, self.texts)
        return digest.hexdigest()


def hash_labels(digest: Any, labels: Sequence[int] | NDArray[np.int64]) -> None:
    """Add labels to the sha256 of a set: first all labels, then all texts, both in any number of pieces."""
    digest.update(np.ascontiguousarray(labels, dtype="<i8").tobytes())


def hash_texts(digest: Any, texts: Iterable[Text]) -> None:
    """Add texts to the sha256 of a set."""
    for text in texts:
        for part in text_parts(text):
            content = part.encode("utf-8")
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
            if isinstance(part, SpanText):
                digest.update(json.dumps(part.spans).encode("utf-8"))


def check_unchanged(name: str, fingerprint: str, trained_on: Mapping[str, str] | None, remedy: str) -> None:
    """Raise DataError if the set ``name`` is not the one whose fingerprint training recorded in ``trained_on``."""
    if trained_on and trained_on.get(name, fingerprint) != fingerprint:
        raise DataError(
            f"the {name} set differs from the one of this model's training, so its data changed since; restore the "
            f"data, or {remedy}"
        )


def plain_label(name: str) -> str:
    """Return a label without blanks around it, and a whole number without ``.0``."""
    return re.sub(r"^([+-]?[0-9]+)\.0+$", r"\1", name.strip())


def number_labels(rows: Iterable[Row], labels: Sequence[str], values: Sequence[str] = ()) -> Iterator[tuple[Text, int]]:
    """Yield each row's text and class index; of several labels (a tuple) a number with the bits of their indices.

    Without ``labels``, the label of a row is a score (:func:`score_of`).

    A label is matched by name or by its place in ``values``, else by its plain name (:func:`plain_label`), else read as
    an index; never as an index if a class has the index of another class as name or value: with labels called "1" … "5"
    a "4" could mean the fourth or the fifth.

    Raises DataError: an unknown label, or a row without a label.
    """
    if not labels:
        yield from ((row.text, score_of(row)) for row in rows)
        return
    by_name = {name: index for names in (labels, values) for index, name in enumerate(names)}
    by_plain_name = {plain_label(name): index for name, index in by_name.items()}
    # isdecimal alone would accept digits of other scripts, which are names.
    numeric = [name for name in by_plain_name if name.isascii() and name.isdecimal() and len(name) < 10]
    can_be_index = not any(by_plain_name[name] != int(name) < len(labels) for name in numeric)
    for row in rows:
        indices = []
        for label in row.label if isinstance(row.label, tuple) else (row.label,):
            name = str(label)
            index = by_name.get(name)
            if index is None:
                plain = plain_label(name)
                index = by_plain_name.get(plain)
                if index is None and can_be_index and plain.isascii() and plain.isdecimal() and len(plain) < 10:
                    index = int(plain) if int(plain) < len(labels) else None
            if index is None or label is None:
                quoted = repr(name) if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]!r}…"
                problem = "has no label" if label is None else f"label {quoted} is not in data.labels"
                hint = did_you_mean(name, by_name) if label is not None else ""
                ranges = f" (or their numbers 0 to {len(labels) - 1})" if can_be_index else ""
                raise DataError(
                    f"{row.where}: {problem}; {hint}allowed: {format_names(by_name)}{ranges}; correct the row, or "
                    "change data.labels"
                )
            indices.append(index)
        yield row.text, sum({1 << index for index in indices}) if isinstance(row.label, tuple) else indices[0]


def score_of(row: Row) -> int:
    """Return the number in the label of a row, in millionths. Raises DataError for anything else."""
    try:
        score = float(str(row.label))
    except ValueError:
        score = math.nan
    if not abs(score) <= MAX_SCORE:
        raise DataError(
            f"{row.where}: the score {str(row.label)[:40]!r} is not a number between −{MAX_SCORE:g} and "
            f"{MAX_SCORE:g}; correct this row"
        )
    return round(score / SCORE_UNIT)


def in_pieces(items: Iterable[T], size_of: Callable[[T], int], most_items: int, most_size: int) -> Iterator[list[T]]:
    """Yield lists of at most ``most_items`` items and of about ``most_size`` in all; a single item may be larger."""
    piece, size = list[T](), 0
    for item in items:
        piece.append(item)
        size += size_of(item)
        if len(piece) >= most_items or size >= most_size:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def query_numbers(texts: Sequence[Text]) -> NDArray[np.int64] | None:
    """Number the queries of pairs of query and document, int64 [n]; None: the texts are no such pairs.

    They are if at least half of the pairs share their first text with another pair.
    """
    if not texts or any(isinstance(text, str) for text in texts):
        return None
    numbers: dict[str, int] = {}
    queries = np.array([numbers.setdefault(text[0], len(numbers)) for text in texts], dtype=np.int64)
    return queries if (np.bincount(queries)[queries] > 1).mean() >= 0.5 else None


def label_counts(numbers: NDArray[np.int64], classes: int, *, several: bool) -> list[int]:
    """Count the rows of each class; ``several``: the int64 [n] ``numbers`` are sets of labels."""
    if not classes:  # scores, or no labels
        return []
    if several:
        return [int((numbers >> bit & 1).sum()) for bit in range(classes)]
    return [int(count) for count in np.bincount(numbers, minlength=classes)]
