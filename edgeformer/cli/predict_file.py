"""predict --file: where the texts come from, and where the answers go."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from edgeformer.artifacts.errors import InputError, ToldElsewhere
from edgeformer.cli.options import print_json, stdout

if TYPE_CHECKING:
    from edgeformer.artifacts.row_files import Row, RowWriter, TableStyle
    from edgeformer.data.unlabelled import Unlabelled
    from edgeformer.inference.predict import Confidence, Model
    from edgeformer.inference.predict_file import Answered, InputColumns
    from edgeformer.run import Location

_STREAM = "-"
_BROKEN_PIPE = 141
"""As shells say it: 128 and the number of SIGPIPE."""
_TABLE = "table"
_INPUTS = ("text", "csv", "tsv", "jsonl", "parquet")


@dataclass(frozen=True)
class FileOptions:
    """Options of ``predict`` that belong to ``--file``, as they were given."""

    file: str
    text: str | None
    pair: list[str]
    input_format: str | None
    output: str | None
    format: str | None
    columns: str | None = None
    encoding: str | None = None

    @property
    def path(self) -> Path | None:
        """Of the texts; None: standard input."""
        return None if self.file == _STREAM else Path(self.file)

    @property
    def target(self) -> Path | None:
        """Of the answers; None: standard output."""
        return None if self.output in (None, _STREAM) else Path(str(self.output))


def answer_file(
    words: list[str],
    run: str | None,
    artifacts: Path,
    how: tuple[str | None, Confidence, str | None],
    options: FileOptions,
    *,
    as_json: bool,
) -> None:
    """Answer a file of texts.

    Args:
        words: a run, or nothing.
        run: of ``--run``.
        artifacts: the folder that holds the runs.
        how: artifact, confidence and runtime.
        options: of the file.
        as_json: print one JSON document: the answers, or where they are written to a file what became of them.

    Raises:
        InputError: options that do not go together, or whatever is wrong with the file.
    """
    from edgeformer.artifacts.row_files import TableStyle
    from edgeformer.cli.predict import tell_notes
    from edgeformer.cli.progress import show_progress
    from edgeformer.inference.predict import opened
    from edgeformer.inference.predict_file import NO_COLUMNS, choose_columns, example_row, predict_file
    from edgeformer.run import locate

    format_ = _output_format(options, as_json=as_json)
    if len(words) > (run is None):
        raise InputError(
            f"--file {options.file}: has the texts, so {words[-1]!r} is one too many; leave out one of them"
        )
    location = locate(run or next(iter(words), None), artifacts)
    with _texts(location, options, how[1]) as given, opened(location, *how) as model:
        if format_ == _TABLE:
            _refuse_vectors(location)
        example = example_row(model, pairs=given.pairs)
        columns = NO_COLUMNS
        if format_ != _TABLE:
            columns = choose_columns(given, options.columns, example, as_table=format_ in ("csv", "parquet"))
        style = TableStyle([*columns.names.values()], given.delimiter, given.bom, _types(given, columns, format_))
        with _writer(location, model, example, (format_, options.target), style) as writer:
            found = predict_file(model, given, writer, show_progress(), columns)
        tell_notes(model)
    _tell(location, found, options, model.promised() if as_json else None)
    if found.errors:
        raise typer.Exit(3)


def _output_format(options: FileOptions, *, as_json: bool) -> str:
    """How the answers are written: table, jsonl, csv, parquet, or json for one document. Raises InputError."""
    from edgeformer.artifacts.row_files import FORMATS, format_named
    from edgeformer.artifacts.workspace import require_writable

    allowed = (_TABLE, *FORMATS)
    for option, value, known in (
        ("--format", options.format, allowed), ("--input-format", options.input_format, _INPUTS),
    ):  # fmt: skip
        if value is not None and value not in known:
            raise InputError(f"{option} {value}: is none of {', '.join(known)}")
    target = options.target
    if target is not None:
        require_writable("--output", target)
    if target is not None and (target.is_symlink() or (target.exists() and not target.is_file())):
        raise InputError(
            f"--output {target}: is a link or a device, and would be replaced by a file; name a file, or leave "
            "it out and send standard output there"
        )
    if target is not None and options.path is not None and _same(target, options.path):
        raise InputError(f"--output {target}: is the file of --file; name another")
    if target is None and as_json:
        if options.format is not None:
            raise InputError("--json: is one document; leave out --format, or --json")
        return "json"
    found = format_named(target, options.format) or _TABLE
    if found == "parquet" and target is None:
        raise InputError("--format parquet: is no text for standard output; give --output FILE")
    if found == _TABLE and options.columns is not None:
        raise InputError("--columns: a table for the terminal has the texts only; give --output FILE or --format")
    return found


def _types(given: Unlabelled, columns: InputColumns, format_: str) -> dict[str, Any]:
    """Output name → pyarrow type of the columns of a Parquet file that are written to another one."""
    if given.source is None or format_ != "parquet" or not given.source.path.lower().endswith(".parquet"):
        return {}
    from pyarrow import parquet

    schema = parquet.read_schema(given.source.path)
    return {output: schema.field(name).type for name, output in columns.names.items()}


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _refuse_vectors(location: Location) -> None:
    from edgeformer.inference.predict import predicts_vectors

    if predicts_vectors(location):
        raise InputError(
            f"{location.name}: answers with vectors, which no table can show; give --output FILE, or --format jsonl"
        )


@contextmanager
def _texts(location: Location, options: FileOptions, confidence: Confidence) -> Generator[Unlabelled]:
    from edgeformer.data.sources import Columns
    from edgeformer.data.unlabelled import Reading, unlabelled
    from edgeformer.inference.predict import check, predicts_vectors

    if len(options.pair) > 1:
        raise InputError("--pair: with --file it is the one column of the second texts")
    check(location, confidence, pairs=True if options.pair else None)
    owner = location.open_bundle() if location.bundle is not None else location.open_run()
    columns = Columns(text=options.text, text_pair=next(iter(options.pair), None), encoding=options.encoding)
    how = Reading(owner.data.parts, columns, options.input_format, single=predicts_vectors(location))
    with unlabelled(options.path, sys.stdin.buffer, how) as given:
        check(location, confidence, pairs=given.pairs)
        yield given


@contextmanager
def _writer(
    location: Location, model: Model, example: Row, where: tuple[str, Path | None], style: TableStyle
) -> Generator[RowWriter]:
    """What takes the answers; ``where``: format and file."""
    from edgeformer.artifacts.row_files import JsonDocument, writer_for

    format_, target = where
    with _stream(target, whole=format_ == "json") as stream:
        writer: RowWriter
        if format_ == _TABLE:
            from edgeformer.report.predictions import PredictionLines

            writer = PredictionLines(stream, f"{location.name} · {model.id}", example, stdout().width)
        elif format_ == "json":
            writer = JsonDocument(
                stream,
                {"run": location.name, "artifact": model.id, "provider": model.provider, **model.promised()},
                "predictions",
            )
        else:
            writer = writer_for(format_, stream, example, style)
        yield writer
        writer.close()


@contextmanager
def _stream(target: Path | None, *, whole: bool) -> Generator[BinaryIO]:
    """A file, which has its name when all is in it, or standard output; ``whole``: which gets all of it or nothing."""
    from edgeformer.system.leftovers import replacing_alone

    if target is not None:
        with replacing_alone(target) as temporary, temporary.open("wb") as file:
            yield file
        return
    try:
        sys.stdout.flush()
        if whole:
            with tempfile.TemporaryFile() as spooled:
                yield spooled
                spooled.seek(0)
                shutil.copyfileobj(spooled, sys.stdout.buffer)
        else:
            yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Its reader, head for instance, has enough. What is not written yet would be said to be lost at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ToldElsewhere("nobody reads the answers any more", _BROKEN_PIPE) from None


def _tell(
    location: Location, found: Answered, options: FileOptions, promised: dict[str, dict[str, object]] | None
) -> None:
    """What became of it: on stderr, and with --json on stdout where the answers are not; ``promised``: with --json."""
    from edgeformer.cli.console import say

    where = f" → {options.target}" if options.target is not None else ""
    parts = [f"{found.rows:,} rows in {found.seconds:.1f} s ({found.rows_per_s:,.0f} rows/s)"]
    if found.errors:
        parts.append(f"{found.errors:,} without an answer, each with its error")
    if found.truncated:
        parts.append(f"{found.truncated:,} longer than the model reads")
    say(f"{location.name} · {found.artifact}: {', '.join(parts)}{where}", err=True)
    if promised is not None and options.target is not None:
        facts = {**asdict(found), "rows_per_s": found.rows_per_s, "output": str(options.target)}
        print_json({"run": location.name, **facts, **promised})
