"""Command predict: labels of texts, or similarities and vectors of an embedding model; single texts or a file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import typer
from typer import Argument, Option

from edgeformer.artifacts.errors import AlreadyReported, InputError
from edgeformer.cli import options as opt
from edgeformer.cli.options import advanced

if TYPE_CHECKING:
    from edgeformer.artifacts.row_files import RowWriter
    from edgeformer.data.sources import Columns
    from edgeformer.inference.predict import Confidence, Predictor
    from edgeformer.run import Location

_BROKEN_PIPE = 141
"""Exit code of shells for SIGPIPE: 128 + 13."""


def command(
    context: typer.Context,
    words: list[str] | None = Argument(
        None, metavar="[RUN] TEXT…", help="Texts, after an optional run. Default: lines of standard input."
    ),
    artifact: str | None = Option(None, metavar="ID", help="Artifact to run. Default: the bundle's first."),
    confidence: str | None = Option(
        None,
        metavar="P|auto",
        help="Step bundles: exit early at this confidence; auto: at the thresholds that edgeformer exits chose.",
    ),
    file: str | None = Option(
        None,
        metavar="FILE",
        help="File of texts: CSV, TSV, JSONL, Parquet or plain text, of any size. -: standard input.",
    ),
    text: str | None = Option(None, metavar="COL", help="--file, --nearest: column of the texts."),
    pair: list[str] | None = Option(
        None,
        metavar="TEXT|COL",
        help="Pair classifiers: second text, once for all or once per TEXT; with --file its column.",
    ),
    input_format: Literal["text", "csv", "tsv", "jsonl", "parquet"] | None = advanced(
        None, metavar="FORMAT", help="--file -: format of the input: text (one per line), csv, tsv, jsonl or parquet."
    ),
    output: str | None = Option(
        None, metavar="OUT", help="--file: output file (.jsonl, .csv or .parquet). -: standard output."
    ),
    format_: Literal["jsonl", "csv", "parquet"] | None = Option(
        None,
        "--format",
        metavar="FORMAT",
        help="--file: output format: jsonl, csv or parquet. Default: by the name of OUT.",
    ),
    columns: str | None = advanced(
        None,
        metavar="all|none|A,B",
        help="--file: input columns to copy to the output (as input_NAME if the name is in use). Default: all.",
    ),
    encoding: opt.Encoding = None,
    nearest: Path | None = Option(
        None,
        metavar="FILE",
        help="Embedding models: rank the texts of this file (one per line) by similarity to each TEXT.",
    ),
    top: int | None = Option(None, min=1, metavar="K", help="--nearest: number of texts to print. Default: 5."),
    runtime: opt.Runtime = None,
    run: opt.NamedRun = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Classify or embed texts with an exported artifact.

    An empty text or an invalid result gets an error instead of an answer, and the exit code is 3. Needs no torch.

    Examples:
      edgeformer predict "a warm, funny and quietly moving film"
      edgeformer predict recurrent_sst2_fast-001 "not my kind of movie" "great fun"
      edgeformer predict --file reviews.csv --output labels.jsonl
      edgeformer predict path/to/bundle < reviews.txt
      edgeformer predict minilm "How do I reset my password?" --nearest questions.txt
    """
    probability: Confidence = "auto" if confidence == "auto" else None
    if confidence not in (None, "auto"):
        with suppress(ValueError):
            probability = float(confidence)
        if not isinstance(probability, float) or not 0 <= probability <= 1:
            raise InputError(f"--confidence {confidence}: is neither a probability in 0…1 nor auto")
    arguments, pairs = [*(words or ())], [*(pair or ())]
    if file is not None:
        from edgeformer.data.sources import Columns

        opt.refuse_options(context, ("nearest", "top"), "is for single texts; with --file, --output has the vectors")
        if len(arguments) > (run is None):
            raise InputError(
                f"--file {file}: has the texts, so {arguments[-1]!r} is one too many; leave out one of them"
            )
        if len(pairs) > 1:
            raise InputError("--pair: with --file it is the one column of the second texts")
        _predict_file(
            run or next(iter(arguments), None),
            artifacts,
            source=Path(file) if file != "-" else None,
            columns=Columns(text=text, text_pair=pairs[0] if pairs else None, encoding=encoding),
            input_format=input_format,
            target=Path(output) if output not in (None, "-") else None,
            format_=format_,
            kept_columns=columns,
            opening=(artifact, probability, runtime),
            as_json=as_json,
        )
        return
    opt.refuse_options(context, ("input_format", "output", "format_", "columns"), "belongs to --file FILE")
    if nearest is None:
        opt.refuse_options(context, ("encoding",), "is of --file FILE or --nearest FILE; give that, too")
        opt.refuse_options(context, ("text",), "names a column of --file FILE or --nearest FILE; give that, too")
        opt.refuse_options(context, ("top",), "says how many of --nearest FILE are listed; give --nearest, too")
    else:
        reason = "is for classifiers, and --nearest for embedding models; leave out one of them"
        opt.refuse_options(context, ("pair", "confidence"), reason)
    from edgeformer.inference.predict import TextList, compare_texts, open_predictor, predicts_vectors

    location, texts = opt.split_run_and_texts(arguments, artifacts, run, "predict")
    if not texts and not sys.stdin.isatty():
        texts = [line.strip() for line in opt.stdin().split("\n") if line.strip()]
    if nearest is not None or (predicts_vectors(location) and not pairs and probability is None):
        among = TextList(nearest, text, top or 5, encoding) if nearest is not None else None
        similarities = compare_texts(location, texts, artifact, among, runtime)
        if as_json:
            opt.print_json({"run": location.name, **asdict(similarities)})
        else:
            from edgeformer.report.predictions import similarity_table

            opt.stdout().print(similarity_table(location.name, similarities))
        return
    if pairs and len(pairs) not in (1, len(texts)):
        raise InputError(f"--pair: {len(pairs)} second texts for {len(texts)} texts; give one for all, or one for each")
    inputs = [*zip(texts, pairs * (len(texts) if len(pairs) == 1 else 1), strict=True)] if pairs else [*texts]
    with open_predictor(location, artifact, probability, runtime, texts=inputs) as model:
        window = model.answering.read(inputs)
        answers = model.answering.answers(window, model.answering.run(model.run, window))
        rows = [answer.as_dict() for answer in answers]
    if as_json:
        opt.print_json({**_header(location, model), "predictions": rows})
    else:
        from edgeformer.report.predictions import prediction_table

        opt.stdout().print(prediction_table(location.name, model.id, rows))
    _print_notes(model)
    if any("error" in row for row in rows):
        raise typer.Exit(3)


def _header(location: Location, model: Predictor) -> dict[str, object]:
    return {"run": location.name, "artifact": model.id, "provider": model.provider, **model.promised()}


def _print_notes(model: Predictor) -> None:
    """Print on stderr what early exit guarantees for these answers."""
    if notes := model.notes():
        from edgeformer.cli.console import say  # imports rich, which an answer as JSON does not need

        say("\n".join(f"note: {note}" for note in notes), err=True)


def _predict_file(
    run: str | None,
    artifacts: Path,
    *,
    source: Path | None,
    columns: Columns,
    input_format: str | None,
    target: Path | None,
    format_: str | None,
    kept_columns: str | None,
    opening: tuple[str | None, Confidence, str | None],
    as_json: bool,
) -> None:
    """Run ``predict --file``: read texts, write one row for each, report the totals.

    ``source`` and ``target`` are None for standard input and output; ``opening`` is artifact, confidence and runtime.
    Raises InputError: options that exclude each other, or unreadable input; typer.Exit: 3, a row has no answer.
    """
    from edgeformer.artifacts.row_files import JsonRows, TableStyle, format_named, writer_for
    from edgeformer.artifacts.workspace import require_writable
    from edgeformer.cli.console import say
    from edgeformer.cli.progress import show_progress
    from edgeformer.data.unlabelled import Reading, unlabelled
    from edgeformer.inference.predict import check_answerable, open_predictor, predicts_vectors
    from edgeformer.inference.predict_file import choose_columns, example_row, predict_file
    from edgeformer.run import locate

    if target is None and as_json:
        if format_ is not None:
            raise InputError("--json: is one document; leave out --format, or --json")
        format_ = "json"
    elif target is not None:
        require_writable("--output", target)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise InputError(f"--output {target}: is a link or a device; name a file, or leave it out to use stdout")
        with suppress(OSError):
            if source is not None and target.samefile(source):
                raise InputError(f"--output {target}: is the file of --file; name another")
    format_ = format_named(target, format_) or "jsonl"
    if format_ == "parquet" and target is None:
        raise InputError("--format parquet: is no text for standard output; give --output FILE")
    location, confidence = locate(run, artifacts), opening[1]
    check_answerable(location, confidence, pairs=True if columns.text_pair else None)
    reading = Reading(location.open_model().data.parts, columns, input_format, single=predicts_vectors(location))
    with unlabelled(source, sys.stdin.buffer, reading) as texts:
        check_answerable(location, confidence, pairs=texts.pairs)
        with open_predictor(location, *opening) as model:
            example = example_row(model, pairs=texts.pairs)
            kept = choose_columns(texts, kept_columns, example, as_table=format_ in ("csv", "parquet"))
            types = {}
            if format_ == "parquet" and texts.source is not None and texts.source.path.lower().endswith(".parquet"):
                from pyarrow import parquet

                schema = parquet.read_schema(texts.source.path)
                types = {output: schema.field(name).type for name, output in kept.names.items()}
            style = TableStyle([*kept.names.values()], texts.delimiter, texts.bom, types)
            with _open_stream(target, complete=format_ == "json") as stream:
                if format_ == "json":
                    writer: RowWriter = JsonRows(stream, _header(location, model))
                else:
                    writer = writer_for(format_, stream, example, style)
                totals = predict_file(model, texts, writer, show_progress(), kept)
                writer.close()
            _print_notes(model)
    parts = [f"{totals.rows:,} rows in {totals.seconds:.1f} s ({totals.rows_per_s:,.0f} rows/s)"]
    if totals.errors:
        parts.append(f"{totals.errors:,} without an answer, each with its error")
    if totals.truncated:
        parts.append(f"{totals.truncated:,} longer than the model reads")
    say(f"{location.name} · {totals.artifact}: {', '.join(parts)}{f' → {target}' if target else ''}", err=True)
    if as_json and target is not None:
        facts = {**asdict(totals), "rows_per_s": totals.rows_per_s, "output": str(target)}
        opt.print_json({"run": location.name, **facts, **model.promised()})
    if totals.errors:
        raise typer.Exit(3)


@contextmanager
def _open_stream(target: Path | None, *, complete: bool) -> Generator[BinaryIO]:
    """Open a file, which gets its name once it is complete, or stdout; ``complete``: all at once at the end."""
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
