"""Where rows come from: one function reads every kind of source; ``--data DIR`` finds files by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeformer.data.records import check_file, file_records, format_of, hub_records
from edgeformer.data.rows import LabelledTexts, Record, Row, label_rows, listed, missing_column, rows_of
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.data.unpacking import COMPRESSIONS
from edgeformer.formats.data_config import (
    DataConfig,
    FileSource,
    HubSource,
    Source,
    SyntheticSource,
    TextConfig,
)
from edgeformer.formats.errors import DataError

TEXT_COLUMNS = ("text", "sentence", "content", "review")
PAIR_COLUMNS = (
    ("sentence1", "sentence2"), ("text1", "text2"), ("text", "text_pair"), ("premise", "hypothesis"),
    ("question1", "question2"), ("question", "sentence"), ("query", "passage"),
)  # fmt: skip
LABEL_COLUMNS = ("label", "labels", "sentiment")
SCORE_COLUMNS = ("score", "similarity", "similarity_score", "label")
_OTHER_STEMS = {"validation": ("dev", "valid"), "sst-test": ("test",)}
IMPORTED_PARTS = ("train", "validation", "test")
_LABELLED = ("tsv", "csv", "jsonl", "parquet")
_TEXT = ("txt", *_LABELLED)


@dataclass(frozen=True)
class Columns:
    """Columns of a file that somebody named; None: found by what the model's own data and the field call them."""

    text: str | None = None
    text_pair: str | None = None
    label: str | None = None


def read(source: Source, labels: Sequence[str] = (), *, blanks: bool = False) -> Iterator[Row]:
    """Stream the rows of a source.

    Args:
        labels: the recipe's label names, used where a hub data set names its own classes in another order.
        blanks: a text that is not there (null) is an empty one.

    Raises:
        DataError: anything about the file, its columns or its rows; it holds no (labelled) row.
        MissingDependencyError: a hub or Parquet source without the ``datasets`` package.
    """
    if isinstance(source, SyntheticSource):
        yield from synthetic_reviews(source.rows, source.seed)
        return
    if isinstance(source, HubSource):
        name, found = f"hub data set {source.name}, split {source.split}", hub_records(source, labels)
    else:
        name, found = source.path, _file_records(source, labels)
    empty = True
    for row in rows_of(found, source, blanks=blanks):
        empty = False
        yield row
    if empty:
        kind = "labelled rows" if source.skip_unlabelled else "rows"
        raise DataError(f"{name}: no {kind} in it; a set needs at least one")


def load_part(config: DataConfig, part: str) -> LabelledTexts:
    """Read all sources of one part, one after the other. Raises DataError, MissingDependencyError."""
    rows = (row for source in config.parts[part] for row in read(source, config.labels))
    return label_rows(rows, config.labels)


def load_parts(config: DataConfig) -> dict[str, LabelledTexts]:
    """Read every part of the config. Raises DataError, MissingDependencyError."""
    return {part: load_part(config, part) for part in config.parts}


def _file_records(source: FileSource, labels: Sequence[str] = ()) -> Iterator[Record]:
    path = Path(source.path)
    check_file(path)
    kind = format_of(path, source.format)
    if kind != "text":
        return file_records(path, kind, labels)
    if source.label is not None and source.label_value is None:
        raise DataError(
            f"{path}: plain text has no label column; set the source's label_value: to the label of its lines"
        )
    if source.text_pair is not None:
        raise DataError(f"{path}: plain text has one column, and no second text; give pairs as TSV, CSV or JSONL")
    # Plain text has one column, whatever the source calls it.
    return ((where, {source.text: values["text"]}) for where, values in file_records(path, kind))


def _columns(path: Path) -> list[str]:
    """Column names of the first record of a file. Raises DataError for a file without one."""
    for _, values in _file_records(FileSource(kind="file", path=str(path), label=None)):
        return list(values)
    raise DataError(f"{path}: no rows in it; a set needs at least one")


def file_source(
    path: Path,
    like: Source | None = None,
    *,
    labelled: bool = True,
    labels: Sequence[str] = LABEL_COLUMNS,
    columns: Columns = Columns(),
) -> FileSource:
    """A source for ``path`` with its columns found: those of ``like`` if they are there, else well-known ones.

    Args:
        like: what it is read instead of: pairs of texts if that has them, single texts if it has not. None: pairs where
            the file has the columns of a pair.
        labelled: False: only the text is wanted.
        labels: what a column of labels may be called.
        columns: named ones, which are taken as they are; a named text without a named second one is a single text.

    Raises:
        DataError: the file cannot be read, lacks a named column, or has none that look like what is wanted.
    """
    have = _columns(path)
    known = None if isinstance(like, SyntheticSource) else like
    for kind, name in (("text", columns.text), ("text_pair", columns.text_pair), ("label", columns.label)):
        if name is not None and name not in have:
            raise missing_column(str(path), kind, name, have)
    text, second = (columns.text, columns.text_pair) if columns.text else _text_columns(path, have, like)
    source = FileSource(kind="file", path=str(path), text=text, text_pair=second, label=None)
    if not labelled:
        return source
    label = columns.label or _choose(path, "label", have, (known.label if known else None, *labels))
    return source.model_copy(update={"label": label, "skip_unlabelled": known is not None and known.skip_unlabelled})


def _text_columns(path: Path, have: list[str], like: Source | None) -> tuple[str, str | None]:
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
    return _choose(path, "text", have, (known.text if known else None, *TEXT_COLUMNS)), None


def own_file(path: Path, parts: Mapping[str, Sequence[Source]]) -> FileSource:
    """A labelled file for a model whose own data is ``parts``: it is read by their columns, pairs only if they are.

    Raises:
        DataError: as :func:`file_source`; nothing is known of the model's data, and the columns could be read as single
            texts and as pairs.
    """
    have = _columns(path)
    known = [source for sources in parts.values() for source in sources]
    if known:
        like = next(
            (source for source in known if source.kind != "synthetic-reviews" and _fits(source, have)), known[0]
        )
        return file_source(path, like).model_copy(update={"skip_unlabelled": False})
    source = file_source(path)
    single = next((name for name in TEXT_COLUMNS if name in have), None)
    if source.text_pair is not None and single is not None:
        raise DataError(
            f"{path}: nothing is known of this model's data, so rows could be single texts ({single}) or pairs "
            f"({source.text} and {source.text_pair}); leave out the column that is not to be read, or import the model "
            "again with --data"
        )
    return source


def _fits(source: FileSource | HubSource, have: list[str]) -> bool:
    return all(name in have for name in (source.text, source.text_pair) if name is not None)


def _choose(path: Path, kind: str, have: list[str], wanted: Iterable[str | None]) -> str:
    names = list(dict.fromkeys(name for name in wanted if name is not None))
    found = next((name for name in names if name in have), None)
    if found is not None:
        return found
    raise DataError(f"{path}: no {kind} column; columns: {listed(have)}; rename one to one of {', '.join(names)}")


def local_parts(config: DataConfig, folder: Path) -> tuple[DataConfig, list[str]]:
    """``--data DIR``: the same protocol on the files of a folder.

    Every part is read from ``DIR/<part>.<tsv|csv|jsonl|parquet>`` (compressed too; ``validation`` is also
    found as ``dev`` or ``valid``, ``sst-test`` also as ``test``) instead of its own sources. Of a model that
    was trained elsewhere, which may have been imported without any, the files train, validation and test are its parts;
    where there is no test or no validation file, a tenth of train is held out.

    Returns:
        The changed config, and a note for each choice or left-out part that the user should know of.

    Raises:
        DataError: no such folder, no file for a part that the protocol uses, or no usable columns in one.
    """
    # Parts whose absence would change what the protocol means ("given" does without validation).
    used = {"given": ("train", "test"), "sst-test": ("train", "validation", "sst-test")}
    used["imported"] = ()
    needed = dict.fromkeys(used.get(config.split, ("train", "validation")), f"split {config.split!r}")
    names = dict.fromkeys((*config.parts, *(IMPORTED_PARTS if config.split == "imported" else ())))
    files, notes = _part_files(folder, names, _LABELLED, needed)
    if not files:
        raise DataError(f"{folder}: has none of the files {', '.join(names)} ({', '.join(_LABELLED)})")
    known = next(iter(config.parts.values()), (None,))
    parts = {part: (file_source(path, config.parts.get(part, known)[0]),) for part, path in files.items()}
    protocol = config.split
    if protocol == "imported" and "train" in parts and ("validation" in parts) != ("test" in parts):
        # One part for validation and test would be selected by and reported.
        protocol = "given" if "test" in parts else "glue-dev"
        notes.append(f"split {protocol}: a tenth of train is held out as validation set")
    return config.model_copy(update={"parts": parts, "split": protocol}), notes


def local_text_parts(config: TextConfig, folder: Path) -> tuple[TextConfig, list[str]]:
    """``--data DIR`` for a language model: as :func:`local_parts`, without labels, and ``DIR/<part>.txt`` first.

    Raises:
        DataError: no such folder, no file for train or validation, or no text column in one.
    """
    needed = dict.fromkeys(("train", "validation"), "a language model")
    files, notes = _part_files(folder, config.parts, _TEXT, needed)
    parts = {part: (file_source(path, config.parts[part][0], labelled=False),) for part, path in files.items()}
    return config.model_copy(update={"parts": parts}), notes


def imported_parts(folder: Path, *, scored: bool) -> tuple[dict[str, tuple[Source, ...]], list[str]]:
    """The files train, validation and test of a folder, as many as there are, for a model that was trained elsewhere.

    Args:
        scored: they are pairs of texts with scores, and ``train`` is any text; else all are labelled.

    Returns:
        The sources of each part, and a note for each part that is not there.

    Raises:
        DataError: no such folder, no file of any part in it, or no usable columns in one.
    """
    kinds = _TEXT if scored else _LABELLED
    files, notes = _part_files(folder, IMPORTED_PARTS, kinds, {})
    if not files:
        raise DataError(f"{folder}: has none of the files train, validation and test ({', '.join(kinds)})")

    def source(part: str, path: Path) -> FileSource:
        if not scored:
            return file_source(path)
        return file_source(path, labelled=False) if part == "train" else pairs_source(path)

    return {part: (source(part, path),) for part, path in files.items()}, notes


def pairs_source(path: Path, like: Source | None = None) -> FileSource:
    """A file of scored pairs as a source; ``like``: other pairs, by whose columns it is read if it has them.

    Raises:
        DataError: it has no such columns.
    """
    source = file_source(path, like, labels=SCORE_COLUMNS)
    if source.text_pair is None:
        raise DataError(f"{path}: has single texts, no pairs; name two columns sentence1 and sentence2, a third score")
    return source


def _part_files(
    folder: Path, parts: Iterable[str], kinds: Sequence[str], needed: Mapping[str, str]
) -> tuple[dict[str, Path], list[str]]:
    """The file of each part, and notes; ``needed``: part → what cannot do without it."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; --data needs a folder with the files of the recipe's parts")
    files: dict[str, Path] = {}
    notes: list[str] = []
    suffixes = [f".{kind}{end}" for kind in kinds for end in (("",) if kind == "parquet" else ("", *COMPRESSIONS))]
    for part in parts:
        stems = (part, *_OTHER_STEMS.get(part, ()))
        found = [path for stem in stems for suffix in suffixes if (path := folder / f"{stem}{suffix}").is_file()]
        if found:
            if len(found) > 1:
                notes.append(f"part {part}: read from {found[0].name}; {found[1].name} is left alone")
            files[part] = found[0]
        elif part in needed:
            looked = ", ".join(f"{part}.{kind}" for kind in kinds)
            others = "".join(f" (or {stem}.{kinds[0]} …)" for stem in stems[1:])
            have = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "nothing"
            raise DataError(
                f"{folder}: no file for part {part!r}, which {needed[part]} uses; looked for "
                f"{looked}{others}, also as .xz, .gz, .bz2; the folder has: {have}"
            )
        else:
            notes.append(f"part {part}: no file in {folder}; left out")
    return files, notes
