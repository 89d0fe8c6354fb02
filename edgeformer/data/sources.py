"""Sources of rows: reading of every kind of source, and detection of a file's columns and a folder's files.

``--data DIR`` finds the parts of a recipe by name among the files of a folder. A part is read from
``DIR/<part>.<tsv|csv|jsonl|parquet>``, also compressed; ``validation`` is also found as ``dev`` or ``valid``, and
``sst-test`` as ``test``.
"""

import itertools
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edgeformer.artifacts.base import first_problem
from edgeformer.artifacts.data_config import (
    DataConfig,
    DataSection,
    FileSource,
    HubSource,
    Source,
    SpanData,
    SpanSource,
    SyntheticSource,
    TextConfig,
    check_encoding,
    column_names,
)
from edgeformer.artifacts.errors import DataError, InputError, did_you_mean
from edgeformer.data import records
from edgeformer.data.rows import LabelledTexts, Row, format_names, join_pair, number_labels, rows_of, span_rows
from edgeformer.data.splits import sampled_rows
from edgeformer.data.synthetic import synthetic_reviews

TEXT_COLUMNS = ("text", "sentence", "content", "review", "document", "passage")
PAIR_COLUMNS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text", "text_pair"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("query", "passage"), ("query", "document"),
)  # fmt: skip
LABEL_COLUMNS = (
    "label", "labels", "sentiment", "class", "classes", "category", "categories", "target", "intent", "topic", "rating",
    "stars", "polarity", "kategorie", "klasse", "thema", "bewertung", "stimmung", "etikett", "categorie", "classe",
    "etiquette", "categoria", "clase", "etiqueta",
)  # fmt: skip
"""Names of label columns in the form of :func:`plain_name`. The first three are preferred, in this order."""
SCORE_COLUMNS = ("score", "similarity", "similarity_score", "relevance", "label", "value", "target", "rating", "stars")
"""Names of columns with numbers, in order of preference."""
_IMPORTED_PARTS = ("train", "validation", "test")
_OTHER_STEMS = {"validation": ("dev", "valid"), "sst-test": ("test",)}
_TABLE_SUFFIXES = ("tsv", "csv", "jsonl", "parquet")
_SPAN_SUFFIXES = ("conll", "jsonl")
_TEXT_SUFFIXES = ("txt", *_TABLE_SUFFIXES)

CHARACTERS = {
    "delimiter": {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"},
    "quote": {"single": "'", "double": '"'},
}
"""Option → names of its characters."""
SPANS = SpanSource(kind="file", path="")  # source that files of texts with spans are read like if nothing else is known


@dataclass(frozen=True)
class Columns:
    """Columns of a file that the user names (None: found by name), and its layout (None: detected).

    Raises InputError: an unknown encoding, delimiter or quote.
    """

    text: str | None = None  # a column, or several with commas
    text_pair: str | None = None
    label: str | None = None
    encoding: str | None = None
    label_names: str | None = None  # with commas, of labels that are numbers
    delimiter: str | None = None  # a character, or its name in :data:`CHARACTERS`
    quote: str | None = None  # a character, or its name there

    def __post_init__(self) -> None:
        for option, allowed in CHARACTERS.items():
            value = getattr(self, option)
            if value is not None and value not in (*allowed, *allowed.values()):
                raise InputError(f"--{option} {value}: write {', '.join(allowed)}, or the character in quotes")
        if self.encoding is not None:
            try:
                check_encoding(self.encoding)
            except ValueError as error:
                raise InputError(f"--encoding {self.encoding}: {error}") from None

    @property
    def layout(self) -> dict[str, str]:
        """Keys of a source that the user states: encoding, delimiter, quote."""
        stated = {option: getattr(self, option) for option in ("encoding", *CHARACTERS)}
        keys = {option: value for option, value in stated.items() if value is not None}
        return {option: CHARACTERS.get(option, {}).get(value, value) for option, value in keys.items()}

    def texts(self, columns: Collection[str]) -> str | tuple[str, ...] | None:
        """Return the text columns that the user names; commas separate them unless one of ``columns`` has that name."""
        if self.text is None or self.text in columns or "," not in self.text:
            return self.text
        return tuple(map(str.strip, self.text.split(",")))

    def by_option(self, columns: Collection[str] = ()) -> list[tuple[str, str]]:
        """Return option and column of every column that the user names in a file with these ``columns``."""
        texts = column_names(self.texts(columns) or ())
        options = [*(("--text", name) for name in texts), ("--pair", self.text_pair), ("--label", self.label)]
        return [(option, name) for option, name in options if name is not None]

    def check(self, path: Path, columns: Iterable[str]) -> None:
        """Raise DataError if one of them is not among the ``columns`` of a file."""
        columns = list(columns)
        for option, name in self.by_option(columns):
            if name not in columns:
                hint = f"{did_you_mean(name, columns)}columns: {format_names(columns)}"
                raise DataError(f"{path}: no column {name!r} ({option}); {hint}")


def plain_name(name: str) -> str:
    """Return a column's name in lower case without accents, spaces and underscores."""
    decomposed = unicodedata.normalize("NFKD", name).casefold()
    return "".join(character for character in decomposed if character.isalnum())


def matching_column(names: Iterable[str], columns: Sequence[str]) -> str | None:
    """Return the first of ``names`` that is a column, else the column that equals one of them by :func:`plain_name`."""
    names = list(names)
    exact = next((name for name in names if name in columns), None)
    if exact is not None:
        return exact
    by_plain_name = {plain_name(column): column for column in reversed(columns)}
    return next((by_plain_name[plain] for plain in map(plain_name, names) if plain and plain in by_plain_name), None)


def read(
    source: Source, labels: Sequence[str] = (), separator: str | None = None, *, blanks: bool = False,
    skipped: list[str] | None = None, with_labels: bool = True,
) -> Iterator[Row]:  # fmt: skip
    """Stream the rows of a source.

    Args:
        labels: label names of the recipe, for hub data sets with the same classes in another order.
        separator, blanks: see :func:`~edgeformer.data.rows.rows_of`.
        skipped: leave out rows whose text is white space only, and append their places here; None: keep them.
        with_labels: False: read the texts of all rows only.

    Raises DataError: a file, a column or a row is unusable; there is no (labelled) row.
    """
    if isinstance(source, SyntheticSource):
        for row in synthetic_reviews(source.rows, source.seed):
            yield row if separator is None else replace(row, label=(str(row.label),))
        return
    if not with_labels:
        source = source.model_copy(update={"label": None, "label_value": None, "skip_unlabelled": False})
    has_spans = isinstance(source, SpanSource) and with_labels
    if isinstance(source, HubSource):
        name, stream = source.title, records.class_records(records.hub_rows(source), source.title, labels)
    else:
        name, stream = source.path, records.file_records(source, () if has_spans else labels)
    stream = records.chosen_records(stream, source.where)
    if isinstance(source, SpanSource) and has_spans:
        rows = span_rows(stream, source, labels)
    else:
        rows = rows_of(stream, source, separator, blanks=blanks)
    is_empty = True
    for row in rows:
        is_empty = False
        if skipped is None or join_pair(row.text).strip():
            yield row
        else:
            skipped.append(row.where)
    if is_empty:
        kind = "labelled rows" if source.skip_unlabelled else "rows"
        if source.where:
            kind += f" with {' and '.join(f'{key} {format_names(values)}' for key, values in source.where.items())}"
        raise DataError(f"{name}: has no {kind}; a set needs at least one")


def file_source(
    path: Path, like: Source | None = None, *, labelled: bool = True, labels: Sequence[str] = LABEL_COLUMNS,
    columns: Columns | None = None,
) -> FileSource:  # fmt: skip
    """Return a source for a file, with the columns of ``like`` if the file has them, else with well-known columns.

    Args:
        like: source that the file replaces; None: pairs if the file has their columns, else single texts.
        labelled: False: find the text only.
        labels: possible names of the label column.
        columns: that the user names. A text without a second text is a single text. Numbers are the columns of a file
            without a header. None: the user cannot name columns.

    Raises DataError: the file cannot be read, lacks a named column, or has no columns that fit.
    """
    # 1. Read the names of its columns
    user_columns = columns or Columns()
    if isinstance(like, SpanSource) and labelled:
        records.check_file(path)
        keys: dict[str, Any] = {"path": str(path), "format": None, "encoding": user_columns.encoding, "where": {}}
        keys |= {"text": user_columns.text or like.text, "label": user_columns.label or like.label}
        return like.model_copy(update=keys)
    source, names = _open_table(path, like, user_columns)
    user_columns.check(path, names)
    like_text, like_pair, like_label = (getattr(like, key, None) for key in ("text", "text_pair", "label"))

    def find(kind: str, candidates: Iterable[str | None]) -> str:
        expected = list(dict.fromkeys(name for name in candidates if name is not None))
        column = matching_column(expected, names)
        if column is not None:
            return column
        remedy = f"rename a column to one of {format_names(expected, 5)}"
        if columns is not None:
            remedy = f"choose one (--{kind} COLUMN, or NUMBER if the first line has no column names), or {remedy}"
        raise DataError(f"{path}: no {kind} column; columns: {format_names(names)}; {remedy}")

    # 2. Find the columns of the texts
    text, second = user_columns.texts(names), user_columns.text_pair
    if text is None and second is None and (like is None or like_pair is not None):
        own_pair: list[tuple[Any, Any]] = [(like_text, like_pair)] if like_pair is not None else []
        pairs = dict.fromkeys([*own_pair, *PAIR_COLUMNS])
        text, second = next(((a, b) for a, b in pairs if {*column_names(a), b} <= {*names}), (None, None))
        if text is None and like_pair is not None:
            option = "choose them: --text COLUMN --pair COLUMN, or " if columns is not None else ""
            known_pairs = ", ".join(" and ".join((*column_names(first), other)) for first, other in pairs)
            shown = format_names(names)
            raise DataError(f"{path}: no pairs of texts; columns: {shown}; {option}rename two columns to {known_pairs}")
    if text is None and isinstance(like_text, tuple):
        text = tuple(find("text", [name]) for name in like_text)
    if text is None:
        first_texts = [first for first, other in PAIR_COLUMNS if other == second]
        text = find("text", [name for name in (like_text, *first_texts, *TEXT_COLUMNS) if name != second])
    if second in column_names(text):
        raise DataError(f"{path}: column {second!r} cannot be both texts of a pair; choose two columns")
    source = source.model_copy(update={"text": text, "text_pair": second})
    # 3. Find the column of the label
    if not labelled:
        return source
    label = user_columns.label
    if label is None:
        texts = {plain_name(name) for name in (*column_names(text), second) if name is not None}
        label_names = [name for name in labels if name not in texts]
        label = find("label", (like_label, *label_names))
        rivals = [name for name in names if plain_name(name) in {*label_names} & {*LABEL_COLUMNS[3:]}]
        if label in rivals and len(rivals) > 1 and (like_label is None or plain_name(label) != plain_name(like_label)):
            remedy = "choose one: --label COLUMN" if columns is not None else "rename the right one to label"
            raise DataError(f"{path}: {len(rivals)} columns could hold the labels: {format_names(rivals)}; {remedy}")
    return source.model_copy(update={"label": label, "skip_unlabelled": getattr(like, "skip_unlabelled", False)})


def _open_table(path: Path, like: Source | None, user_columns: Columns) -> tuple[FileSource, list[str]]:
    """Return a source with the layout of a file (that of ``like`` as far as it fits), and the names of its columns."""
    records.check_file(path)
    layout: dict[str, Any] = {}
    kind = records.suffix_format(path)
    if isinstance(like, FileSource) and kind not in ("jsonl", "parquet"):
        if kind in (None, "text") and path.suffix.lower() == Path(like.path).suffix.lower():
            layout = {"format": like.format, "delimiter": like.delimiter, "quote": like.quote}
        if not like.header and (any(layout.values()) or kind in ("csv", "tsv")):
            layout["header"] = False
    names = [name for _, name in user_columns.by_option()]
    are_numbers = bool(names) and all(name.isdecimal() for name in names)
    if names and not are_numbers:
        layout.pop("header", None)
    text = "1" if "header" in layout else "text"
    layout |= user_columns.layout
    source = FileSource(kind="file", path=str(path), text=text, label=None, **layout)
    columns = columns_of(source)
    names = [name for _, name in user_columns.by_option(columns)]
    is_table = records.format_of_source(source) in ("csv", "tsv")
    if are_numbers and source.header and is_table and not set(names) <= set(columns):
        source = source.model_copy(update={"header": False})
        columns = columns_of(source)
    return source, columns


def columns_of(source: FileSource) -> list[str]:
    """Return the names of a file's columns, by its first record. Raises DataError for a file without records."""
    for _, values in records.file_records(source):
        return list(values)
    raise DataError(f"{source.path}: has no rows; a set needs at least one")


def replacement_source(
    path: Path, parts: Mapping[str, Sequence[Source]], columns: Columns | None = None, *, labelled: bool = True,
    single: bool = False, labels: Sequence[str] = LABEL_COLUMNS,
) -> FileSource:  # fmt: skip
    """Return a source for a file that replaces a model's own data; pairs only if that data has pairs.

    ``labels``: possible names of the label column.
    """
    user_columns = columns or Columns()
    sources = [source for part in parts.values() for source in part]
    if single:
        sources = [source for source in sources if source.text_pair is None]
        sources = sources or [FileSource(kind="file", path=str(path))]
    if sources:
        tables = [source for source in sources if not isinstance(source, SyntheticSource)]
        fitting = (
            source
            for source in tables
            if {*column_names(source.text), source.text_pair} - {None} <= {*_open_table(path, source, user_columns)[1]}
        )
        like = next(fitting, sources[0])
        second = like.text_pair
        if user_columns.text_pair is not None and second is None:
            raise DataError(f"{path}: --pair {user_columns.text_pair}: this model reads single texts; leave --pair out")
        if columns is not None and columns.text is not None and columns.text_pair is None:
            columns = replace(columns, text_pair=second)
        source = file_source(path, like, labelled=labelled, labels=labels, columns=columns)
        return source.model_copy(update={"skip_unlabelled": False})
    source = file_source(path, labelled=labelled, labels=labels, columns=columns)
    text = matching_column(TEXT_COLUMNS, columns_of(source))
    if source.text_pair is not None and text is not None and not user_columns.text and not user_columns.text_pair:
        raise DataError(
            f"{path}: rows could be single texts ({text}) or pairs ({source.text} and {source.text_pair}), and the "
            f"bundle does not record which the model reads; choose: --text {text}, or --text {source.text} --pair "
            f"{source.text_pair}"
        )
    return source


def pairs_source(path: Path, like: Source | None = None, columns: Columns | None = None) -> FileSource:
    """Return a source for a file of scored pairs, as :func:`file_source`. Raises DataError."""
    source = file_source(path, like, labels=SCORE_COLUMNS, columns=columns)
    if source.text_pair is None:
        raise DataError(f"{path}: has no pairs; it needs the columns sentence1, sentence2 and score")
    return source


def part_rows(config: DataConfig, part: str, skipped: list[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a part that have a text, as many of each source as its ``rows`` says. Raises DataError."""
    return itertools.chain.from_iterable(_rows_by_source(config, part, [] if skipped is None else skipped))


def _rows_by_source(config: DataConfig, part: str, skipped: list[str]) -> Iterator[Iterator[Row]]:
    for number, source in enumerate(config.parts[part]):
        rows = partial(read, source, config.labels, config.separator)
        if source.kind == "synthetic-reviews" or source.rows is None:  # a generator makes the requested number of rows
            yield rows(skipped=skipped)
        else:
            key = f"data.parts.{part}.{number}.rows"
            yield sampled_rows(rows, source.rows, config.split_seed, key, skipped, by_label=bool(config.labels))


def load_part(config: DataConfig, part: str, skipped: list[str] | None = None) -> LabelledTexts:
    """Read :func:`part_rows` into memory, with the numbers of their sources if these are balanced. Raises DataError."""
    by_source = _rows_by_source(config, part, [] if skipped is None else skipped)
    sets = [LabelledTexts.of(number_labels(rows, config.labels, config.label_values or ())) for rows in by_source]
    return LabelledTexts.joined(sets, with_sources=config.balance not in (None, "label"))


def load_parts(config: DataConfig) -> dict[str, LabelledTexts]:
    """Read every part of the config. Raises DataError, MissingDependencyError."""
    return {part: load_part(config, part) for part in config.parts}


def local_parts(config: DataSection, folder: Path) -> tuple[DataSection, list[str]]:
    """Return ``config`` with the files of a folder as parts, and notes on choices and parts that are left out.

    If a model was imported or a recipe cuts all its sets from one file, the files train, validation and test are the
    parts; without a test or validation file, a tenth of train is held out. Raises DataError.
    """
    if isinstance(config, TextConfig):
        needed = dict.fromkeys(("train", "validation"), "a language model")
        files, notes = _part_files(folder, config.parts, _TEXT_SUFFIXES, needed)
        texts = {part: (file_source(path, config.parts[part][0], labelled=False),) for part, path in files.items()}
        return config.model_copy(update={"parts": texts}), notes
    if not isinstance(config, DataConfig):  # pairs of texts
        pairs, notes = imported_parts(folder, scored=True)
        return config.model_copy(update={"parts": pairs}), notes
    # 1. Find the file of each part that the protocol requires ("given" needs no validation part)
    required = {"given": ("train", "test"), "sst-test": ("train", "validation", "sst-test")}
    required |= {"imported": (), "stratified": ("train",)}
    needed = dict.fromkeys(required.get(config.split, ("train", "validation")), f"split {config.split!r}")
    suffixes, first_source = (_SPAN_SUFFIXES, SPANS) if isinstance(config, SpanData) else (_TABLE_SUFFIXES, None)
    further: Iterable[str] = _IMPORTED_PARTS if config.split == "imported" else ()
    if config.split == "stratified":  # use a test file if there is one
        further = [part for part in _IMPORTED_PARTS if _files_of_part(folder, part, suffixes)]
    names = dict.fromkeys((*config.parts, *further))
    files, notes = _part_files(folder, names, suffixes, needed)
    first_part = next(iter(config.parts.values()), (first_source,))
    labels = label_columns(config.labels)
    parts = {
        part: (file_source(path, config.parts.get(part, first_part)[0], labels=labels),) for part, path in files.items()
    }
    for part in _IMPORTED_PARTS:
        unread = [] if part in names else _files_of_part(folder.resolve(), part, suffixes)[:1]
        if unread and unread[0] not in files.values():
            notes.append(f"{unread[0].name} is not used: split {config.split} of this recipe has no such part")
    # 2. Choose the protocol that these files allow
    protocol = config.split
    if protocol in ("imported", "stratified") and "train" in parts and ("validation" in parts) != ("test" in parts):
        # One part for both would select the epoch and also give the reported score.
        protocol = "given" if "test" in parts else "glue-dev"
        notes.append(f"split {protocol}: a tenth of train is held out as validation set")
    elif protocol == "stratified" and "test" in parts:
        protocol = "given"
        notes.append("split given: the sets are the files of the folder")
    unlabelled: tuple[Source, ...] = ()
    if config.unlabelled:
        if paths := _files_of_part(folder.resolve(), "unlabelled", _TEXT_SUFFIXES):
            unlabelled = (file_source(paths[0], config.unlabelled[0], labelled=False),)
        else:
            notes.append(f"unlabelled: no file in {folder}, left out")
    config = config.model_copy(update={"parts": parts, "split": protocol, "unlabelled": unlabelled})
    try:
        type(config).model_validate(config.model_dump(), strict=False)
    except ValidationError as error:  # a streamed set needs more parts than one in memory
        raise DataError(f"{folder}: {first_problem(error)}") from None
    return config, notes


def label_columns(labels: Sequence[str]) -> Sequence[str]:
    """Return the possible names of the label column; without ``labels`` it holds scores."""
    return LABEL_COLUMNS if labels else SCORE_COLUMNS


def imported_parts(
    folder: Path, *, scored: bool, labels: Sequence[str] = LABEL_COLUMNS, like: Source | None = None
) -> tuple[dict[str, tuple[Source, ...]], list[str]]:
    """Return the files of a folder as parts of an imported model (``scored``: pairs), and notes. Raises DataError.

    ``labels``: possible names of the label column. ``like``: :data:`SPANS` for texts with spans.
    """
    suffixes = _TEXT_SUFFIXES if scored else _SPAN_SUFFIXES if isinstance(like, SpanSource) else _TABLE_SUFFIXES
    files, notes = _part_files(folder, _IMPORTED_PARTS, suffixes, {})
    parts: dict[str, tuple[Source, ...]] = {}
    for part, path in files.items():
        is_pairs = scored and part != "train"
        source = pairs_source(path) if is_pairs else file_source(path, like, labelled=not scored, labels=labels)
        parts[part] = (source,)
    return parts, notes


def imported_data(
    path: Path | None, labels: Sequence[str] | None, max_length: int, like: Source | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return the ``data`` section of an imported model's recipe, and notes for the user. Raises DataError.

    ``path``: a file for validation and test, or a folder with the files of the parts. ``labels``: empty: regression;
    None: embeddings. ``like``: :data:`SPANS` for texts with spans.
    """
    path = path.resolve() if path is not None else None
    section: dict[str, Any] = {"parts": {}, "max_length": max_length}
    notes: list[str] = []
    if path is not None and path.is_dir():
        parts, notes = imported_parts(path, scored=labels is None, labels=label_columns(labels or ()), like=like)
        section["parts"] = {part: [source.model_dump() for source in sources] for part, sources in parts.items()}
    elif path is not None:
        source = pairs_source(path) if labels is None else file_source(path, like, labels=label_columns(labels))
        section["parts"] = {"test": [source.model_dump()]}
    if labels is not None:
        section |= {"split": "imported", "cleaning": "none", **({"labels": list(labels)} if labels else {})}
    return section, notes


def _part_files(
    folder: Path, parts: Iterable[str], suffixes: Sequence[str], needed: Mapping[str, str]
) -> tuple[dict[str, Path], list[str]]:
    """Return the file of each part, and notes. ``needed``: part → what uses it, for the message."""
    folder = folder.resolve()  # the paths are saved with the run
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --data needs a folder with the files of the recipe's parts")
    files: dict[str, Path] = {}
    notes: list[str] = []
    for part in parts:
        if paths := _files_of_part(folder, part, suffixes):
            if len(paths) > 1:
                notes.append(f"part {part}: read from {paths[0].name}; {paths[1].name} is not used")
            files[part] = paths[0]
        elif part in needed:
            expected = ", ".join(f"{part}.{suffix}" for suffix in suffixes)
            stems = "".join(f" (or {stem}.{suffixes[0]} …)" for stem in _OTHER_STEMS.get(part, ()))
            present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "nothing"
            raise DataError(
                f"{folder}: no file for the part {part!r} of {needed[part]}; expected {expected}{stems}, also as .xz, "
                f".gz, .bz2; the folder has: {present}"
            )
        else:
            notes.append(f"part {part}: no file in {folder}, left out")
    if not files:
        raise DataError(
            f"{folder}: none of the parts {', '.join(parts)} has a file with the suffix {', '.join(suffixes)}"
        )
    return files, notes


def _files_of_part(folder: Path, part: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder that are named like a part, in order of preference."""
    packed = ("", *records.COMPRESSIONS)
    endings = [f".{name}{end}" for name in suffixes for end in (("",) if name == "parquet" else packed)]
    stems = (part, *_OTHER_STEMS.get(part, ()))
    return [path for stem in stems for ending in endings if (path := folder / f"{stem}{ending}").is_file()]
