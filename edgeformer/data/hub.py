"""Records read with the ``datasets`` library: hub data sets, local data set folders, Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeformer.data.rows import Record
from edgeformer.data.text_files import check_file
from edgeformer.formats.data_config import HubSource
from edgeformer.formats.errors import DataError, MissingDependencyError, install_hint


def _datasets(wanted_for: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError(
            f"{wanted_for}: reading it needs the package datasets: {install_hint('train')}"
        ) from None
    return datasets


def hub_records(source: HubSource, labels: Sequence[str]) -> Iterator[Record]:
    """Stream one split of a hub data set or of a local data set folder.

    Args:
        labels: the recipe's label names; a class column with the same names in another order is read by name.

    Raises:
        DataError: not found, offline, no such config or split.
        MissingDependencyError: ``datasets`` is not installed.
    """
    where = f"hub data set {source.name}" + (f" ({source.config})" if source.config else "")
    library = _datasets(where)
    try:
        rows = library.load_dataset(source.name, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises a different type for each of its many ways to fail
        first = (str(error).splitlines() or [""])[0].strip()
        raise DataError(
            f"{where}, split {source.split!r}: cannot be loaded: {type(error).__name__}: {first}; check "
            "name, config and split, or give local files instead: --data DIR, or a source of kind: file"
        ) from None
    yield from _with_class_names(rows, f"{where}, split {source.split}", labels)


def parquet_records(path: Path, labels: Sequence[str]) -> Iterator[Record]:
    """Stream a Parquet file. Raises DataError, MissingDependencyError."""
    check_file(path)
    library = _datasets(str(path))
    try:
        rows = library.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from _with_class_names(rows, str(path), labels)
    except DataError:
        raise
    except Exception as error:  # pyarrow's errors have no common base
        first = (str(error).splitlines() or [""])[0].strip()
        raise DataError(f"{path}: cannot be read as Parquet: {first}") from None


def _with_class_names(rows: Any, where: str, labels: Sequence[str]) -> Iterator[Record]:
    """Class columns: -1 means "unlabelled"; names replace numbers where the recipe has the same names."""
    names: dict[str, list[str]] = {
        column: list(feature.names)
        for column, feature in (rows.features or {}).items()
        if type(feature).__name__ == "ClassLabel"
    }
    for number, values in enumerate(rows, start=1):
        yield f"{where}, row {number}", _named(values, names, labels) if names else values


def _named(values: Mapping[str, object], names: Mapping[str, list[str]], labels: Sequence[str]) -> Mapping[str, object]:
    named = dict(values)
    for column, known in names.items():
        value = named.get(column)
        if not isinstance(value, int):
            continue
        if value < 0:
            named[column] = None
        elif value < len(known) and set(known) == set(labels):
            named[column] = known[value]
    return named
