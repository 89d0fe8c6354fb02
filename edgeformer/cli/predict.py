"""Command predict: labels of texts, or similarities and vectors of an embedding model; single texts or a file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from edgeformer.artifacts.errors import AlreadyReported, InputError
from edgeformer.cli.options import (
    ADVANCED,
    Artifacts,
    Encoding,
    Json,
    NamedRun,
    OneRuntime,
    print_json,
    split_run_and_texts,
    stdin,
    stdout,
)

if TYPE_CHECKING:
    from edgeformer.artifacts.row_files import Row, RowWriter, TableStyle
    from edgeformer.inference.predict import Confidence, Predictor
    from edgeformer.run import Location

_NEAREST = 5
"""Default of --top."""
_STREAM = "-"
_BROKEN_PIPE = 141
"""Exit code of shells for SIGPIPE: 128 + 13."""
_TABLE = "table"
_INPUT_FORMATS = ("text", "csv", "tsv", "jsonl", "parquet")


@dataclass(frozen=True)
class ModelOptions:
    """Artifact, early-exit confidence and runtime that answer."""

    artifact: str | None
    confidence: Confidence
    runtime: str | None


@dataclass(frozen=True)
class FileOptions:
    """Options of --file."""

    file: str
    text: str | None
    pair: list[str]
    input_format: str | None
    output: str | None
    format: str | None
    columns: str | None
    encoding: str | None

    @property
    def path(self) -> Path | None:
        """The input file; None: standard input."""
        return None if self.file == _STREAM else Path(self.file)

    @property
    def target(self) -> Path | None:
        """The output file; None: standard output."""
        return None if self.output in (None, _STREAM) else Path(str(self.output))


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN] TEXT…", help="Texts; a run in front of them. Without a text: lines of stdin."),
    ] = None,
    artifact: Annotated[str | None, typer.Option(metavar="ID", help="Default: the bundle's first artifact.")] = None,
    confidence: Annotated[
        str | None,
        typer.Option(
            metavar="P|auto",
            help="Looped models: stop looping for a text at probability P, e.g. 0.95; needs the step bundle "
            "(export --exit all). [b]auto[/b]: the thresholds that edgeformer exits chose.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Predict the texts of FILE: CSV, TSV, JSONL, Parquet or plain text, of any size. -: standard input.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="COL", help="--file, --nearest: the column of the texts.")] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT|COL",
            help="Classifiers of pairs: the second text of every TEXT, or one for each; with --file its column.",
        ),
    ] = None,
    input_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="--file -: text (a line each), csv, tsv, jsonl or parquet.", rich_help_panel=ADVANCED
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="OUT", help="--file: write the answers to .jsonl, .csv or .parquet. -: stdout."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="FORMAT", help="--file: table, jsonl, csv or parquet. Default: by OUT."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="all|none|A,B",
            help="--file: columns of FILE that are written in front of the answers. One that has the name of an "
            "answer's column is written as input_NAME. Default: all.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    encoding: Encoding = None,
    nearest: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Embedding models: rank the texts of FILE, one per line, for every TEXT."),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, metavar="K", help="So many of --nearest. Default: 5.")] = None,
    runtime: OneRuntime = None,
    run: NamedRun = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Classify texts with an exported artifact, or compare them with an embedding model (no torch needed).

    An empty text, or one whose result is not a number, gets an error instead of a result; the exit code is 3.

    Examples:

      edgeformer predict "a warm, funny and quietly moving film"

      edgeformer predict recurrent_sst2_fast-001 "not my kind of movie" "great fun"

      edgeformer predict --file reviews.csv --output labels.jsonl

      edgeformer predict path/to/bundle < reviews.txt

      edgeformer predict minilm "How do I reset my password?" --nearest questions.txt
    """
    options = ModelOptions(artifact, _parse_confidence(confidence), runtime)
    arguments = [*(words or ())]
    if file is not None:
        _refuse({"--nearest": nearest, "--top": top}, "is for single texts; with --file, --output has the vectors")
        file_options = FileOptions(file, text, pair or [], input_format, output, format_, columns, encoding)
        _predict_file(arguments, run, artifacts, options, file_options, as_json=as_json)
        return
    file_only: dict[str, object] = {
        "--input-format": input_format,
        "--output": output,
        "--format": format_,
        "--columns": columns,
    }
    _refuse(file_only, "belongs to --file FILE")
    if nearest is None:
        _refuse({"--encoding": encoding}, "is of --file FILE or --nearest FILE; give that, or leave it out")
        _refuse({"--text": text}, "names a column of --file FILE or --nearest FILE; give that, or leave it out")
        _refuse({"--top": top}, "says how many of --nearest FILE are listed; give --nearest, too, or leave out --top")
    else:
        classifier_only: dict[str, object] = {"--pair": pair or None, "--confidence": confidence}
        _refuse(classifier_only, "is for classifiers, and --nearest for embedding models; leave out one of them")
    from edgeformer.inference.predict import open_predictor_for, predicts_vectors

    location, texts = split_run_and_texts(arguments, artifacts, run, "predict")
    if not texts and not sys.stdin.isatty():
        texts = [line.strip() for line in stdin().split("\n") if line.strip()]
    if nearest is not None or (predicts_vectors(location) and not pair and options.confidence is None):
        from edgeformer.inference.predict import TextList, compare_texts

        among = TextList(nearest, text, top or _NEAREST, encoding) if nearest is not None else None
        similarities = compare_texts(location, texts, artifact, among, runtime)
        if as_json:
            print_json({"run": location.name, **asdict(similarities)})
        else:
            from edgeformer.report.predictions import similarity_table

            stdout().print(similarity_table(location.name, similarities))
        return
    if pair and len(pair) not in (1, len(texts)):
        raise InputError(f"--pair: {len(pair)} second texts for {len(texts)} texts; give one for all, or one for each")
    inputs = [*zip(texts, pair * (len(texts) if len(pair) == 1 else 1), strict=True)] if pair else [*texts]
    with open_predictor_for(location, inputs, options.artifact, options.confidence, options.runtime) as model:
        window = model.answering.read(inputs)
        answers = model.answering.answers(window, model.answering.run(model.run, window))
        rows = [answer.as_dict() for answer in answers]
    if as_json:
        header = {"run": location.name, "artifact": model.id, "provider": model.provider, **model.promised()}
        print_json({**header, "predictions": rows})
    else:
        from edgeformer.report.predictions import prediction_table

        stdout().print(prediction_table(location.name, model.id, rows))
    _print_notes(model)
    if any("error" in row for row in rows):
        raise typer.Exit(3)


def _print_notes(model: Predictor) -> None:
    """Print on stderr what early exit guarantees for these answers."""
    if notes := model.notes():
        from edgeformer.cli.console import say

        for note in notes:
            say(f"note: {note}", err=True)


def _parse_confidence(text: str | None) -> Confidence:
    """Parse --confidence. Raises InputError for a value that is no probability."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    with suppress(ValueError):
        if 0 <= (probability := float(text)) <= 1:
            return probability
    raise InputError(f"--confidence {text}: is neither a probability in 0…1 nor auto")


def _refuse(options: dict[str, object], reason: str) -> None:
    """Raise InputError for the first option that is set although it has no effect."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option}: {reason}")


def _predict_file(
    words: list[str],
    run: str | None,
    artifacts: Path,
    options: ModelOptions,
    file_options: FileOptions,
    *,
    as_json: bool,
) -> None:
    """Run ``predict --file``: read texts, write one row for each, report the totals.

    Raises:
        InputError: options that exclude each other, or an input file that cannot be read.
        typer.Exit: 3, a row has no answer.
    """
    from edgeformer.artifacts.row_files import TableStyle
    from edgeformer.cli.console import say
    from edgeformer.cli.progress import show_progress
    from edgeformer.data.sources import Columns
    from edgeformer.data.unlabelled import Reading, unlabelled
    from edgeformer.inference.predict import check_answerable, open_predictor, predicts_vectors
    from edgeformer.inference.predict_file import NO_COLUMNS, choose_columns, example_row, predict_file
    from edgeformer.run import locate

    format_ = _check_output(file_options, as_json=as_json)
    if len(words) > (run is None):
        raise InputError(
            f"--file {file_options.file}: has the texts, so {words[-1]!r} is one too many; leave out one of them"
        )
    if len(file_options.pair) > 1:
        raise InputError("--pair: with --file it is the one column of the second texts")
    location = locate(run or next(iter(words), None), artifacts)
    check_answerable(location, options.confidence, pairs=True if file_options.pair else None)
    owner = location.open_bundle() if location.bundle is not None else location.open_run()
    columns = Columns(
        text=file_options.text, text_pair=next(iter(file_options.pair), None), encoding=file_options.encoding
    )
    reading = Reading(owner.data.parts, columns, file_options.input_format, single=predicts_vectors(location))
    with unlabelled(file_options.path, sys.stdin.buffer, reading) as texts:
        check_answerable(location, options.confidence, pairs=texts.pairs)
        with open_predictor(location, options.artifact, options.confidence, options.runtime) as model:
            if format_ == _TABLE and predicts_vectors(location):
                raise InputError(
                    f"{location.name}: answers with vectors, which no table can show; give --output FILE, or "
                    "--format jsonl"
                )
            example = example_row(model, pairs=texts.pairs)
            kept = NO_COLUMNS
            if format_ != _TABLE:
                kept = choose_columns(texts, file_options.columns, example, as_table=format_ in ("csv", "parquet"))
            types = {}
            if format_ == "parquet" and texts.source is not None and texts.source.path.lower().endswith(".parquet"):
                from pyarrow import parquet

                schema = parquet.read_schema(texts.source.path)
                types = {output: schema.field(name).type for name, output in kept.names.items()}
            style = TableStyle([*kept.names.values()], texts.delimiter, texts.bom, types)
            with _open_writer(location, model, example, format_, file_options.target, style) as writer:
                totals = predict_file(model, texts, writer, show_progress(), kept)
            _print_notes(model)
    parts = [f"{totals.rows:,} rows in {totals.seconds:.1f} s ({totals.rows_per_s:,.0f} rows/s)"]
    if totals.errors:
        parts.append(f"{totals.errors:,} without an answer, each with its error")
    if totals.truncated:
        parts.append(f"{totals.truncated:,} longer than the model reads")
    target = file_options.target
    say(f"{location.name} · {totals.artifact}: {', '.join(parts)}{f' → {target}' if target else ''}", err=True)
    if as_json and target is not None:
        facts = {**asdict(totals), "rows_per_s": totals.rows_per_s, "output": str(target)}
        print_json({"run": location.name, **facts, **model.promised()})
    if totals.errors:
        raise typer.Exit(3)


def _check_output(options: FileOptions, *, as_json: bool) -> str:
    """Return the output format: table, jsonl, csv, parquet, or json (one document). Raises InputError."""
    from edgeformer.artifacts.row_files import FORMATS, format_named
    from edgeformer.artifacts.workspace import require_writable

    for option, value, allowed in (
        ("--format", options.format, (_TABLE, *FORMATS)), ("--input-format", options.input_format, _INPUT_FORMATS),
    ):  # fmt: skip
        if value is not None and value not in allowed:
            raise InputError(f"{option} {value}: is none of {', '.join(allowed)}")
    target = options.target
    if target is not None:
        require_writable("--output", target)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise InputError(
                f"--output {target}: is a link or a device, and would be replaced by a file; name a file, or leave "
                "it out and send standard output there"
            )
        with suppress(OSError):
            if options.path is not None and target.samefile(options.path):
                raise InputError(f"--output {target}: is the file of --file; name another")
    elif as_json:
        if options.format is not None:
            raise InputError("--json: is one document; leave out --format, or --json")
        return "json"
    format_ = format_named(target, options.format) or _TABLE
    if format_ == "parquet" and target is None:
        raise InputError("--format parquet: is no text for standard output; give --output FILE")
    if format_ == _TABLE and options.columns is not None:
        raise InputError("--columns: a table for the terminal has the texts only; give --output FILE or --format")
    return format_


@contextmanager
def _open_writer(
    location: Location, model: Predictor, example: Row, format_: str, target: Path | None, style: TableStyle
) -> Generator[RowWriter]:
    """Open the writer of the answers in ``format_`` to ``target`` (None: standard output)."""
    from edgeformer.artifacts.row_files import JsonDocument, writer_for

    with _open_stream(target, complete=format_ == "json") as stream:
        writer: RowWriter
        if format_ == _TABLE:
            from edgeformer.report.predictions import PredictionLines

            writer = PredictionLines(stream, f"{location.name} · {model.id}", example, stdout().width)
        elif format_ == "json":
            header = {"run": location.name, "artifact": model.id, "provider": model.provider, **model.promised()}
            writer = JsonDocument(stream, header, "predictions")
        else:
            writer = writer_for(format_, stream, example, style)
        yield writer
        writer.close()


@contextmanager
def _open_stream(target: Path | None, *, complete: bool) -> Generator[BinaryIO]:
    """Open a file, which gets its name once it is complete, or standard output.

    Args:
        target: None: standard output.
        complete: write to standard output only after everything is there, or nothing at all.
    """
    from edgeformer.system.leftovers import replace_exclusively

    if target is not None:
        with replace_exclusively(target) as temporary, temporary.open("wb") as file:
            yield file
        return
    try:
        sys.stdout.flush()
        if complete:
            with tempfile.TemporaryFile() as spooled:
                yield spooled
                spooled.seek(0)
                shutil.copyfileobj(spooled, sys.stdout.buffer)
        else:
            yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The reader (head, for instance) is done. Without this, the interpreter would report the unwritten rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise AlreadyReported("standard output was closed by its reader", _BROKEN_PIPE) from None
