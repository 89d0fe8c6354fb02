"""When, on what machine and by what code committed figures were measured, and which later change they do not have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.frame import RESULTS
from benchmarks.studies.results import StudyTable, kept_documents, machine_of
from benchmarks.studies.specification import measure
from edgeformer.artifacts.base import Frozen

CHANGES = "changes.json"
TIMED_COLUMNS = ("latency_ms", "speedup")
"""Columns of studies whose figures are of times; all others are in the results of runs."""
_DATES = ("measured", "created", "finished", "started", "began", "when")
_DEPTH = 4
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


class Affected(Frozen):
    """Results that a change of the code makes out of date."""

    file: str = ""  # below benchmarks/results
    keys: list[str] = Field([], description="of that file, under which figures are affected; empty: all are")
    study: list[str] = Field([], description="in place of a file, names of studies whose ``columns`` are affected")
    columns: list[str] = Field([])
    figures: str = Field(description="which figures, in words")
    again: str = Field(description="the command that measures them again")


class Change(Frozen):
    """A change of the code after which older figures no longer hold."""

    commit: str
    date: str
    what: str
    results: list[Affected]


def read_json(path: Path) -> Any:
    """Parse a file, once as long as it does not change; nobody may change what is returned."""
    status = path.stat()
    return _parse(path, status.st_mtime_ns, status.st_size)


@cache
def _parse(path: Path, modified_ns: int, size: int) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def changes(results: Path = RESULTS) -> tuple[Change, ...]:
    """Return what changes.json says, oldest first; empty without the file."""
    path = results / CHANGES
    content = read_json(path) if path.is_file() else []
    return tuple(sorted(map(Change.model_validate, content), key=lambda change: change.date))


@dataclass
class Origin:
    """Dates (ISO), code versions and machines that a document names, each in order and once."""

    dates: list[str]
    versions: list[str]
    machines: list[str]

    def __str__(self) -> str:
        days = [date[:10] for date in (self.dates[:1] + self.dates[-1:])]
        when = " to ".join(dict.fromkeys(days)) or "on a day that was not recorded"
        code = ", ".join(map(_version, self.versions)) or "not recorded"
        return f"Measured {when} on {'; '.join(self.machines) or 'a machine that was not recorded'}; code: {code}."


def _version(text: str) -> str:
    """``0.1.0+57de127a59-dirty`` as a commit."""
    release, _, commit = text.partition("+")
    if not commit:
        return f"release {release}, its commit not recorded"
    dirty = commit.endswith("-dirty")
    return f"{commit.removesuffix('-dirty')}{' with uncommitted changes' if dirty else ''}"


def origin_of(documents: Sequence[Any], names: Sequence[str] = ()) -> Origin:
    """Return what documents say of themselves; the day in a file's name is used if its document has no date."""
    dates, versions, machines = list[str](), list[str](), list[str]()
    for number, document in enumerate(documents):
        fields = [*_fields(document)]
        results = sorted(value for key, value in fields if key in _DATES and _is_date(value))
        day = _DAY.match(Path(names[number]).name) if number < len(names) else None
        dates += results or ([day.group()] if day else [])
        versions += [value for key, value in fields if key == "code_version" and isinstance(value, str)]
        machines += [machine for key, value in fields if (machine := _machine(key, value))]
    # A machine that one place names with its threads needs no second mention without them.
    kept = [name for name in dict.fromkeys(machines) if not any(other.startswith(f"{name}, ") for other in machines)]
    return Origin(sorted(dates), [*dict.fromkeys(versions)], kept)


def _is_date(value: Any) -> bool:
    return isinstance(value, str) and _DAY.match(value) is not None


def _machine(key: str, value: Any) -> str:
    if key in ("cpu", "machine") and isinstance(value, str):
        return value
    if key != "host":
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or "cpu" not in value:
        return ""
    name = machine_of(value)
    if name != value["cpu"]:
        return name  # a graphics card, whose figures do not depend on the cores
    count, label = (value.get("threads"), "threads") if value.get("threads") else (value.get("cores"), "cores")
    return f"{name}, {count} {label.removesuffix('s') if count == 1 else label}" if count else str(name)


def _fields(place: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the keys of objects down to some depth with their values; lists are no level, a host yields only dates."""
    if isinstance(place, list):
        for item in place:
            yield from _fields(item, depth)
    elif isinstance(place, dict) and depth < _DEPTH:
        for key, value in place.items():
            yield key, value
            if key == "host" and isinstance(value, dict):
                yield from ((inner, inner_value) for inner, inner_value in value.items() if inner in _DATES)
                continue
            if key != "versions":
                yield from _fields(value, depth + 1)


def superseded(
    file: str, measured: str, results: Path = RESULTS, path: Sequence[Any] | None = None
) -> list[tuple[Change, Affected]]:
    """Return the changes that a file's figures do not have: those that name it and are later than it.

    ``measured`` is an ISO date; ``path`` are the keys that lead to one figure, None: any figure of the file.
    """
    return [
        (change, affected)
        for change in changes(results)
        for affected in change.results
        if affected.file == file
        and measured < change.date
        and (path is None or not affected.keys or any(step in affected.keys for step in path))
    ]


def study_documents(folder: Path, keys: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Return the results of a study's runs by their keys, and the times that are of these runs only."""
    documents = kept_documents(folder)
    runs = [documents[key] for key in keys if key in documents]
    times = [document for name, document in sorted(documents.items()) if name.startswith("times-")]
    return runs, [document for document in times if {entry["run"] for entry in document["entries"]} <= {*keys}]


@cache
def _oldest(folder: Path, keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the oldest date of a study's runs and that of its times, each in a list that may be empty."""
    runs, times = study_documents(folder, keys)
    return origin_of(runs).dates[:1], origin_of(times).dates[:1]


def superseded_study(
    name: str, columns: Sequence[str], keys: Sequence[str], results: Path = RESULTS
) -> list[tuple[Change, Affected]]:
    """Return the changes that columns of a study's table do not have, each with the ``columns`` it concerns.

    A column of times is as old as the oldest times, any other column as the oldest run.
    """
    run_dates, time_dates = _oldest(results / "studies", tuple(keys))
    measured = {
        column: next(iter((time_dates if column in TIMED_COLUMNS else []) or run_dates), "") for column in columns
    }
    old = []
    for change in changes(results):
        for affected in change.results:
            concerned = [column for column in columns if column in affected.columns and measured[column] < change.date]
            if name in affected.study and concerned:
                old.append((change, affected.model_copy(update={"columns": concerned})))
    return old


def study_origin(results: Path, table: StudyTable) -> str:
    """Return date, machine and code of a study's runs and times, and which of its columns are superseded."""
    keys = [*dict.fromkeys(key for row in table.rows for key in row.keys)]
    runs, times = study_documents(results / "studies", keys)
    if not runs:
        return "Counted in the files that are named below; their results do not say when and by what code."
    origin = origin_of([*runs, *(times if table.times else ())])
    day = []
    for change, affected in superseded_study(table.study, table.columns, keys, results):
        columns = ", ".join(measure(name).heading for name in affected.columns)
        update = {"figures": columns, "again": affected.again.replace("NAME", table.study)}
        day.append((change, affected.model_copy(update=update)))
    return "\n\n".join([f"Trained and m{str(origin)[1:]}", *marks(day)])


def marks(results: Sequence[tuple[Change, Affected]]) -> list[str]:
    """Return a sentence for each change."""
    return [
        f"**Superseded** on {change.date[:10]} by commit {change.commit} ({change.what}): {affected.figures} come from "
        f"older code. To measure again: `{affected.again}`."
        for change, affected in results
    ]


def measured(*files: str, under: Sequence[str] | None = None) -> str:
    """Return date, machine and code of files below benchmarks/results, and what has superseded them.

    ``under`` are keys of the figures that a section shows; None: all.
    """
    documents = [read_json(RESULTS / file) for file in files]
    sentences = [str(origin_of(documents, files))]
    for file, document in zip(files, documents, strict=True):
        dates = origin_of([document], [file]).dates
        sentences += marks(superseded(file, dates[-1] if dates else "", path=under))
    return "\n\n".join(dict.fromkeys(sentences))
