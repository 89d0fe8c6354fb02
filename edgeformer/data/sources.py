"""Where rows come from: one function reads every kind of source; the columns of a file are found or named."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgeformer.artifacts.data_config import DataConfig, FileSource, HubSource, Source, SyntheticSource, check_encoding
from edgeformer.artifacts.errors import DataError, InputError, did_you_mean
from edgeformer.data.records import Layout, check_file, file_records, format_of_source, hub_records, suffix_format
from edgeformer.data.rows import LabelledTexts, Record, Row, Told, is_empty, label_rows, listed, missing_column, rows_of
from edgeformer.data.selection import sampled_rows
from edgeformer.data.synthetic import synthetic_reviews

TEXT_COLUMNS = ("text", "sentence", "content", "review")
PAIR_COLUMNS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text", "text_pair"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("query", "passage"),
)  # fmt: skip
LABEL_COLUMNS = (
    "label", "labels", "sentiment", "class", "classes", "category", "categories", "target", "intent", "topic", "rating",
    "stars", "polarity", "kategorie", "klasse", "thema", "bewertung", "stimmung", "etikett", "categorie", "classe",
    "etiquette", "categoria", "clase", "etiqueta",
)  # fmt: skip
"""Names of a column of labels as :func:`plain_name` writes them. The first three are preferred, in this order."""
SCORE_COLUMNS = ("score", "similarity", "similarity_score", "label")


@dataclass(frozen=True)
class Columns:
    """Columns of a file that somebody named; None: found by what the model's own data and the field call them.

    ``encoding`` is the file's, also stated by the user; None: UTF-8. Raises InputError for an unknown one.
    """

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.encoding is not None:
            try:
                check_encoding(self.encoding)
            except ValueError as error:
                raise InputError(f"--encoding {self.encoding}: {error}") from None


def plain_name(name: str) -> str:
    """Write a column's name with small letters and digits only: without accents, spaces and underscores."""
    decomposed = unicodedata.normalize("NFKD", name).casefold()
    return "".join(character for character in decomposed if character.isalnum())


def matching_column(names: Iterable[str], columns: Sequence[str]) -> str | None:
    """Return the first of ``columns`` that has one of ``names``, else one that has it by :func:`plain_name`."""
    wanted = list(names)
    exact = next((name for name in wanted if name in columns), None)
    if exact is not None:
        return exact
    by_plain_name = {plain_name(column): column for column in reversed(columns)}
    return next((by_plain_name[plain] for plain in map(plain_name, wanted) if plain and plain in by_plain_name), None)


def check_named_column(path: Path, option: str, name: str, columns: Iterable[str]) -> str:
    """Return the column that an option names. Raises DataError, with the columns that there are, where it is none."""
    columns = list(columns)
    if name not in columns:
        hint = f"{did_you_mean(name, columns)}columns: {listed(columns)}"
        raise DataError(f"{path}: no column {name!r} ({option}); {hint}")
    return name


def read(
    source: Source, labels: Sequence[str] = (), separator: str | None = None, *, blanks: bool = False
) -> Iterator[Row]:
    """Stream the rows of a source.

    Args:
        labels: the recipe's label names, used where a hub data set names its own classes in another order.
        separator: between the labels of a row, which can have several; None: it has one.
        blanks: as in :func:`~edgeformer.data.rows.rows_of`.

    Raises:
        DataError: anything about the file, its columns or its rows; it holds no (labelled) row.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    if isinstance(source, SyntheticSource):
        made = synthetic_reviews(source.rows, source.seed)
        yield from made if separator is None else (replace(row, label=(str(row.label),)) for row in made)
        return
    if isinstance(source, HubSource):
        name, found = f"hub data set {source.name}, split {source.split}", hub_records(source, labels)
    else:
        name, found = source.path, records_of(source, labels)
    empty = True
    for row in rows_of(found, source, separator, blanks=blanks):
        empty = False
        yield row
    if empty:
        kind = "labelled rows" if source.skip_unlabelled else "rows"
        raise DataError(f"{name}: no {kind} in it; a set needs at least one")


def with_text(rows: Iterable[Row], empty: Told = lambda row: None) -> Iterator[Row]:
    """Rows that have a text; the others, which say nothing, are told to ``empty``."""
    for row in rows:
        if is_empty(row.text):
            empty(row)
        else:
            yield row


def records_of(source: FileSource, labels: Sequence[str] = ()) -> Iterator[Record]:
    """Stream the records of a file. Raises DataError, MissingDependencyError."""
    path = Path(source.path)
    check_file(path)
    kind = format_of_source(source)
    if kind != "text":
        return file_records(path, kind, labels, Layout(source.delimiter, source.header, source.encoding))
    if source.label is not None and source.label_value is None:
        raise DataError(
            f"{path}: plain text has no label column; set the source's label_value: to the label of its lines"
        )
    if source.text_pair is not None:
        raise DataError(f"{path}: plain text has one column, and no second text; give pairs as TSV, CSV or JSONL")
    # Plain text has one column, whatever the source calls it.
    lines = file_records(path, kind, layout=Layout(encoding=source.encoding))
    return ((where, {source.text: values["text"]}) for where, values in lines)


def file_source(
    path: Path,
    like: Source | None = None,
    *,
    labelled: bool = True,
    labels: Sequence[str] = LABEL_COLUMNS,
    columns: Columns | None = None,
) -> FileSource:
    """A source for ``path`` with its columns found: those of ``like`` if they are there, else well-known ones.

    Args:
        like: what it is read instead of: pairs of texts if that has them, single texts if it has not. None: pairs where
            the file has the columns of a pair.
        labelled: False: only the text is wanted.
        labels: what a column of labels may be called.
        columns: named ones, which are taken as they are; a named text without a named second one is a single text, a
            named second one goes with a text that is found. Numbers name the columns of a file without a header.
            None: the user has no way to name any.

    Raises:
        DataError: the file cannot be read, lacks a named column, or has none that look like what is wanted.
    """
    asked = columns or Columns()
    source, have = _opened(path, like, asked)
    known = None if isinstance(like, SyntheticSource) else like
    for option, name in (("--text", asked.text), ("--pair", asked.text_pair), ("--label", asked.label)):
        if name is not None:
            check_named_column(path, option, name, have)
    find = partial(_choose, path, have=have, named=columns is not None)
    if asked.text is not None:
        text, second = asked.text, asked.text_pair
    elif asked.text_pair is not None:
        second = asked.text_pair
        others = [first for first, other in PAIR_COLUMNS if other == second]
        likely = (known.text if known else None, *others, *TEXT_COLUMNS)
        text = find("text", wanted=[name for name in likely if name != second])
    else:
        text, second = _text_columns(path, have, like, find)
    if text == second:
        raise DataError(f"{path}: column {text!r} cannot be both texts of a pair; name two")
    source = source.model_copy(update={"text": text, "text_pair": second})
    if not labelled:
        return source
    label = asked.label
    if label is None:
        own = known.label if known else None
        texts = {plain_name(name) for name in (text, second) if name is not None}
        names = [name for name in labels if name not in texts]
        label = find("label", wanted=(own, *names))
        equals = {*names} & {*LABEL_COLUMNS[3:]}
        rivals = [name for name in have if plain_name(name) in equals]
        if label in rivals and len(rivals) > 1 and (own is None or plain_name(label) != plain_name(own)):
            remedy = "choose one: --label COLUMN" if columns is not None else "rename the one that does to label"
            raise DataError(f"{path}: {len(rivals)} columns could hold the labels: {listed(rivals)}; {remedy}")
    return source.model_copy(update={"label": label, "skip_unlabelled": known is not None and known.skip_unlabelled})


def _opened(path: Path, like: Source | None, asked: Columns) -> tuple[FileSource, list[str]]:
    """A file as it is written down, and the names of its columns. Raises DataError."""
    check_file(path)
    told = {} if like is None or like.kind != "file" else _layout(path, like)
    names = [name for name in (asked.text, asked.text_pair, asked.label) if name is not None]
    numbered = bool(names) and all(name.isdecimal() for name in names)
    if names and not numbered:
        told.pop("header", None)
    source = FileSource(
        kind="file",
        path=str(path),
        text="1" if "header" in told else "text",
        label=None,
        encoding=asked.encoding,
        **told,
    )
    have = columns_of(source)
    if numbered and source.header and not set(names) <= set(have) and format_of_source(source) in ("csv", "tsv"):
        source = source.model_copy(update={"header": False})
        have = columns_of(source)
    return source, have


def _layout(path: Path, like: FileSource) -> dict[str, Any]:
    """What a file has of the one that it is read instead of: no header; what it is, where its suffix does not say."""
    own, told = suffix_format(path), {} if like.header else {"header": False}
    if own in ("jsonl", "parquet"):
        return {}
    stated = like.format is not None or like.delimiter is not None
    if stated and own in (None, "text") and path.suffix.lower() == Path(like.path).suffix.lower():
        return {**told, "format": like.format, "delimiter": like.delimiter}
    return told if own in ("csv", "tsv") else {}


def columns_of(source: FileSource) -> list[str]:
    """Names of a file's columns, by its first record. Raises DataError for a file without one."""
    for _, values in records_of(source):
        return list(values)
    raise DataError(f"{source.path}: no rows in it; a set needs at least one")


def check_columns(parts: Mapping[str, Sequence[Source]], *, labelled: bool = True) -> None:
    """Compare the columns that file sources name with the first record of each file, before any file is read whole.

    Args:
        parts: of a recipe.
        labelled: False: only texts are read.

    Raises:
        DataError: a file has no such column; or its beginning cannot be read.
    """
    for part, sources in parts.items():
        for number, source in enumerate(sources):
            if source.kind != "file" or (kind := format_of_source(source)) == "text":
                continue
            if kind == "jsonl" and source.skip_unlabelled:  # a record without a label may lack its text, too
                continue
            record = next(records_of(source), None)
            if record is None:
                continue  # whoever reads the rows says that there are none
            named = {"text": source.text, "text_pair": source.text_pair}
            if labelled and source.label_value is None:
                named["label"] = source.label
            for key, column in named.items():
                if column is not None and column not in record[1]:
                    raise missing_column(f"data.parts.{part}.{number}: {source.path}", key, column, record[1])


Find = Callable[..., str]
"""A kind of column, and ``wanted``: what it may be called; gives what it is called."""


def _text_columns(path: Path, have: list[str], like: Source | None, find: Find) -> tuple[str, str | None]:
    """The column of the text, and of the second one of pairs. Raises DataError."""
    known = None if isinstance(like, SyntheticSource) else like
    if like is None or (known is not None and known.text_pair is not None):
        own = [(known.text, known.text_pair)] if known is not None and known.text_pair is not None else []
        pair = next(((a, b) for a, b in (*own, *PAIR_COLUMNS) if a in have and b in have), None)
        if pair is not None:
            return pair
        if own:
            wanted = ", ".join(" and ".join(names) for names in dict.fromkeys((*own, *PAIR_COLUMNS)))
            raise DataError(
                f"{path}: no pairs of texts; columns: {listed(have)}; rename two of them to one of {wanted}"
            )
    return find("text", wanted=(known.text if known else None, *TEXT_COLUMNS)), None


def own_file(path: Path, parts: Mapping[str, Sequence[Source]], columns: Columns | None = None) -> FileSource:
    """A labelled file for a model whose own data is ``parts``: it is read by their columns, pairs only if they are.

    Args:
        columns: named ones, as :func:`file_source` takes them.

    Raises:
        DataError: as :func:`file_source`; a second text is named of a model that reads single ones; nothing is known of
            the model's data, and the columns could be read as single texts and as pairs.
    """
    asked = columns or Columns()
    known = [source for sources in parts.values() for source in sources]
    if known:
        like = next((source for source in known if _fits(source, path, asked)), known[0])
        second = getattr(like, "text_pair", None)
        if asked.text_pair is not None and second is None:
            raise DataError(f"{path}: --pair {asked.text_pair}: this model reads single texts, and no pairs")
        if columns is not None and columns.text is not None and columns.text_pair is None:
            columns = replace(columns, text_pair=second)
        return file_source(path, like, columns=columns).model_copy(update={"skip_unlabelled": False})
    source = file_source(path, columns=columns)
    have = columns_of(source)
    single = next((name for name in TEXT_COLUMNS if name in have), None)
    if source.text_pair is not None and single is not None and not asked.text and not asked.text_pair:
        raise DataError(
            f"{path}: nothing is known of this model's data, so rows could be single texts ({single}) or pairs "
            f"({source.text} and {source.text_pair}); leave out the column that is not to be read, or import the model "
            "again with --data"
        )
    return source


def _fits(source: Source, path: Path, asked: Columns) -> bool:
    """Whether a file has the columns of a source."""
    if isinstance(source, SyntheticSource):
        return False
    _, have = _opened(path, source, asked)
    return all(name in have for name in (source.text, source.text_pair) if name is not None)


def _choose(path: Path, kind: str, *, have: list[str], wanted: Iterable[str | None], named: bool) -> str:
    """Return the column that has the first possible of the wanted names, as :func:`matching_column` compares them.

    Args:
        named: the user could have named it.
    """
    names = list(dict.fromkeys(name for name in wanted if name is not None))
    column = matching_column(names, have)
    if column is not None:
        return column
    remedy = f"rename one to one of {listed(names, 5)}"
    if named:
        option = f"--{kind}"
        remedy = f"name it ({option} COLUMN; {option} NUMBER if the first line names no columns), or {remedy}"
    raise DataError(f"{path}: no {kind} column; columns: {listed(have)}; {remedy}")


def pairs_source(path: Path, like: Source | None = None, columns: Columns | None = None) -> FileSource:
    """A file of scored pairs as a source; ``like``: other pairs, by whose columns it is read if it has them.

    Args:
        columns: named ones, as :func:`file_source` takes them.

    Raises:
        DataError: it has no such columns.
    """
    source = file_source(path, like, labels=SCORE_COLUMNS, columns=columns)
    if source.text_pair is None:
        raise DataError(f"{path}: has single texts, no pairs; name two columns sentence1 and sentence2, a third score")
    return source


# Parts of a recipe's data: the rows of all their sources, or as many of them as these say.


def source_rows(config: DataConfig, part: str, number: int, empty: Told = lambda row: None) -> Iterator[Row]:
    """Rows of one source of a part, as many as its ``rows`` says, as :func:`with_text` has them."""
    source = config.parts[part][number]

    def rows(told: Told) -> Iterator[Row]:
        return with_text(read(source, config.labels, config.separator), told)

    if source.kind == "synthetic-reviews" or source.rows is None:  # a generator makes as many as are wanted
        return rows(empty)
    key = f"data.parts.{part}.{number}.rows"
    return sampled_rows(rows, source.rows, config.split_seed, key, empty)


def part_rows(config: DataConfig, part: str, empty: Told = lambda row: None) -> Iterator[Row]:
    """Rows of all sources of one part, one after the other, as :func:`source_rows` has them."""
    return (row for number in range(len(config.parts[part])) for row in source_rows(config, part, number, empty))


def load_part(config: DataConfig, part: str, empty: Told = lambda row: None) -> LabelledTexts:
    """Read :func:`part_rows`; with the numbers of their sources where rows are balanced by these.

    Raises DataError, MissingDependencyError.
    """
    if config.balance in (None, "label"):
        return label_rows(part_rows(config, part, empty), config.labels)
    numbers = range(len(config.parts[part]))
    found = [label_rows(source_rows(config, part, number, empty), config.labels) for number in numbers]
    return LabelledTexts.joined(found, apart=True)


def load_parts(config: DataConfig) -> dict[str, LabelledTexts]:
    """Read every part of the config. Raises DataError, MissingDependencyError."""
    return {part: load_part(config, part) for part in config.parts}
