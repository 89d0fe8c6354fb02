"""Command predict: labels of texts, or similarities and vectors of an embedding model; single texts or a file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import typer
from typer import Argument, Option

from edgeformer.artifacts.errors import AlreadyReported, InputError
from edgeformer.cli import options as opt

if TYPE_CHECKING:
    from edgeformer.artifacts.row_files import RowWriter
    from edgeformer.data.unlabelled import Reading
    from edgeformer.inference.predict import Confidence, Predictor
    from edgeformer.inference.predict_file import FileSummary
    from edgeformer.inference.rank import RankOptions
    from edgeformer.run import Location
    from edgeformer.tasks.embedding import VectorKind

    Opening = tuple[str | None, Confidence, str | None]  # artifact, confidence and runtime

_BROKEN_PIPE = 141  # exit code of shells for SIGPIPE: 128 + 13


def command(
    context: typer.Context,
    words: list[str] | None = Argument(
        None, metavar="[RUN] TEXT…", help="An optional run, then the texts. Default: lines of standard input."
    ),
    artifact: str | None = Option(
        None, metavar="ID", help="Artifact to run. Default: the first of the bundle that runs here."
    ),
    confidence: str | None = Option(
        None,
        metavar="P|auto",
        help="Step artifacts: exit when the top probability reaches P (0 to 1); auto: thresholds that exits chose.",
    ),
    file: str | None = Option(
        None,
        metavar="FILE",
        help="File of texts: CSV, TSV, JSONL, Parquet or plain text, of any size. -: standard input.",
    ),
    text: str | None = Option(None, metavar="COL", help="With --file: column of the texts. Default: detected."),
    pair: list[str] | None = Option(
        None,
        metavar="TEXT|COL",
        help="Classifiers of pairs: the second text, once for all or once per TEXT; with --file: its column.",
    ),
    input_format: Literal["text", "csv", "tsv", "jsonl", "parquet"] | None = opt.advanced(
        None,
        metavar="FORMAT",
        help="With --file -: format of the input: text (one per line), csv, tsv, jsonl or parquet.",
    ),
    output: str | None = Option(
        None,
        metavar="OUT",
        help="With --file: output file (.jsonl, .csv, .parquet; vectors: .npy). -: standard output.",
    ),
    format_: Literal["jsonl", "csv", "parquet", "npy"] | None = opt.advanced(
        None,
        "--format",
        metavar="FORMAT",
        help="With --file: output format: jsonl, csv, parquet or npy. Default: by the name of OUT.",
    ),
    vectors: Literal["float32", "int8", "binary"] | None = Option(
        None,
        metavar="float32|int8|binary",
        help="With --file, for embedding models: number format of the vectors. Default: float32.",
    ),
    prompt: Literal["query", "document"] | None = opt.advanced(
        None,
        metavar="query|document",
        help="With --file, for embedding models: put the model's prompt of queries or documents in front of each text.",
    ),
    columns: str | None = opt.advanced(
        None,
        metavar="all|none|A,B",
        help="With --file: input columns to copy to the output (as input_NAME if the name is in use). Default: all.",
    ),
    encoding: opt.Encoding = None,
    query: list[str] | None = Option(
        None,
        metavar="TEXT",
        help="With --file, for embedding models and rerankers: rank its texts for this query. May be repeated.",
    ),
    top: int | None = Option(None, min=1, metavar="K", help="With --query: number of texts to print. Default: 10."),
    runtime: opt.Runtime = None,
    run: opt.NamedRun = None,
    artifacts: opt.Artifacts = Path("artifacts"),
    as_json: opt.Json = False,
) -> None:
    """Classify, score, embed or rank texts, or find spans in them, with an exported artifact.

    An empty text or an invalid result gets an error instead of an answer, and the exit code is 3. Needs no torch.

    Examples:
      edgeformer predict "a warm, funny and quietly moving film"
      edgeformer predict recurrent_sst2_fast-001 "not my kind of movie" "great fun"
      edgeformer predict --file reviews.csv --output labels.jsonl
      edgeformer predict path/to/bundle < reviews.txt
      edgeformer predict minilm --query "How do I reset my password?" --file answers.csv --top 10
      edgeformer predict minilm --file answers.csv --output vectors.parquet --vectors int8
    """
    # 1. Options of both ways
    probability: Confidence = "auto" if confidence == "auto" else None
    if confidence not in (None, "auto"):
        with suppress(ValueError):
            probability = float(confidence)
        if not isinstance(probability, float) or not 0 <= probability <= 1:
            raise InputError(f"--confidence {confidence}: give a probability from 0 to 1, or auto")
    arguments, pairs = [*(words or ())], [*(pair or ())]
    # 2. A file of texts
    if file is not None:
        from edgeformer.data.sources import Columns

        if query:
            reason = "does not apply to a ranking; leave out this option or --query"
            opt.refuse_options(context, ("pair", "output", "format_", "prompt", "confidence"), reason)
        else:
            opt.refuse_options(context, ("top",), "is the number of ranked texts; add --query TEXT")
        if len(arguments) > (run is None):
            text_here = f"the text {arguments[-1]!r} on the command line"
            raise InputError(f"--file {file}: excludes {text_here}; leave out one of them")
        if len(pairs) > 1:
            raise InputError("--pair: with --file, it names the column of the second texts; give it once")
        from edgeformer.data.unlabelled import Reading
        from edgeformer.inference.rank import RankOptions

        location = opt.locate(run or next(iter(arguments), None), artifacts)
        source = Path(file) if file != "-" else None
        owner, opening = location.open_model(), (artifact, probability, runtime)
        file_columns = Columns(text=text, text_pair=pairs[0] if pairs else None, encoding=encoding)
        single = bool(query) or owner.task.has_vectors
        reading = Reading(owner.data.parts, file_columns, input_format, single=single)
        if query:
            options = RankOptions(query, top or 10, vectors or "float32", columns)
            _rank_file(location, source, reading, options, opening, as_json=as_json)
        else:
            target = Path(output) if output not in (None, "-") else None
            writing = target, format_, columns, vectors, prompt
            _predict_file(location, source, reading, opening, *writing, as_json=as_json)
        return
    # 3. Texts of the command line, or lines of standard input
    of_files = ("input_format", "output", "format_", "columns", "vectors", "prompt", "query")
    opt.refuse_options(context, of_files, "is for a file of texts; add --file FILE")
    opt.refuse_options(context, ("encoding", "text"), "describes a file; add --file FILE")
    opt.refuse_options(context, ("top",), "is the number of ranked texts; add --query TEXT --file FILE")
    from edgeformer.inference.predict import open_predictor

    location, texts = opt.split_run_and_texts(arguments, artifacts, run, "predict")
    if not texts and not sys.stdin.isatty():
        texts = [line.strip() for line in opt.stdin().split("\n") if line.strip()]
    if location.open_model().task.has_vectors and not pairs and probability is None:
        from edgeformer.inference.rank import compare_texts

        similarities = compare_texts(location, texts, artifact, runtime)
        if as_json:
            opt.print_json({"run": location.name, **asdict(similarities)})
        else:
            from edgeformer.report.predictions import similarity_table

            opt.stdout().print(similarity_table(location.name, similarities))
        return
    if pairs and len(pairs) not in (1, len(texts)):
        times = f"given {len(pairs)} times for {len(texts)} texts"
        raise InputError(f"--pair: {times}; give it once, or once for each text")
    inputs = [*zip(texts, pairs * (len(texts) if len(pairs) == 1 else 1), strict=True)] if pairs else [*texts]
    with open_predictor(location, artifact, probability, runtime, texts=inputs) as model:
        answers = model.answer(inputs)
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


def _predict_file(
    location: Location, source: Path | None, reading: Reading, opening: Opening, target: Path | None,
    format_: str | None, kept_columns: str | None, vectors: VectorKind | None,
    prompt: Literal["query", "document"] | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Run ``predict --file``: read texts, write one row for each, report the totals.

    ``source`` and ``target`` are None for standard input and output.
    Raises InputError: options that exclude each other, or unreadable input; typer.Exit: 3, a row has no answer.
    """
    from edgeformer.artifacts.row_files import FORMATS, JsonRows, TableStyle, writer_for
    from edgeformer.artifacts.workspace import require_writable
    from edgeformer.data.unlabelled import unlabelled
    from edgeformer.inference.predict import check_answerable, open_predictor
    from edgeformer.inference.predict_file import choose_columns, example_row, predict_file
    from edgeformer.tasks.embedding import VectorStore, check_vector_kind

    # 1. Where the answers go
    if target is None and as_json:
        if format_ is not None:
            raise InputError("--json: prints one JSON document to standard output; leave out --format, or --json")
        format_ = "json"
    elif target is not None:
        require_writable("--output", target)
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise InputError(
                f"--output {target}: is a link or a device; give a file, or leave it out to use standard output"
            )
        with suppress(OSError):
            if source is not None and target.samefile(source):
                raise InputError(f"--output {target}: is also the input of --file; give another file")
        if format_ is None:
            format_ = target.suffix.lower().removeprefix(".").replace("ndjson", "jsonl")
            if format_ not in FORMATS:
                formats = ", .".join(FORMATS)
                raise InputError(f"--output {target}: the suffix names no format; use .{formats}, or add --format")
    format_ = format_ or "jsonl"
    if format_ in ("parquet", "npy") and target is None:
        raise InputError(f"--format {format_}: cannot go to standard output; give --output FILE")
    # 2. What the model can answer
    owner, confidence = location.open_model(), opening[1]
    for option, is_set in {"--vectors": vectors, "--prompt": prompt, "--format npy": format_ == "npy"}.items():
        if is_set and not owner.task.has_vectors:
            raise InputError(f"{option}: is for vectors, and {location.name} makes none; leave it out")
    prompts: dict[str, str] = getattr(owner.data, "prompts", {})
    if prompt is not None and prompt not in prompts:
        raise InputError(
            f"--prompt {prompt}: {location.name} has no such prompt (it has {', '.join(prompts) or 'none'}); leave it "
            f"out, or import the model again with --{prompt}-prompt TEXT"
        )
    if format_ == "npy" and kept_columns not in (None, "none"):
        raise InputError(f"--columns {kept_columns}: an .npy file has the vectors only; give a .parquet file")
    check_vector_kind(location.name, owner.data, vectors or "float32")
    store = VectorStore(vectors) if vectors is not None else None
    check_answerable(location, confidence, pairs=True if reading.columns.text_pair else None)
    # 3. Read, answer, write
    with unlabelled(source, sys.stdin.buffer, reading) as texts:
        check_answerable(location, confidence, pairs=texts.pairs)
        with open_predictor(location, *opening) as model:
            if prompt is not None:
                model = replace(model, answering=replace(model.answering, prompt=prompts[prompt]))
            example = example_row(model, pairs=texts.pairs, vectors=vectors)
            kept_columns = "none" if format_ == "npy" else kept_columns
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
                totals = predict_file(model, texts, writer, opt.show_progress(), kept, store)
                writer.close()
            _print_notes(model)
    # 4. Totals
    if prompts.keys() - {"default"} and prompt is None:
        opt.say("note: the model has prompts for queries and documents, which were not used; see --prompt", err=True)
    unanswered = f"without an answer ({'see error in the output' if format_ != 'npy' else 'each is a row of zeros'})"
    opt.say(f"{location.name} · {_totals(totals, unanswered)}{f' → {target}' if target else ''}", err=True)
    loss = store.loss() if store is not None else None
    if loss is not None:
        opt.say(loss.sentence(), err=True)
    if as_json and target is not None:
        facts = {**asdict(totals), "rows_per_s": totals.rows_per_s, "output": str(target)}
        facts |= {"vectors": asdict(loss)} if loss is not None else {}
        opt.print_json({"run": location.name, **facts, **model.promised()})
    if totals.errors:
        raise typer.Exit(3)


def _print_notes(model: Predictor) -> None:
    """Print on stderr what early exit guarantees for these answers."""
    if notes := model.notes():
        opt.say("\n".join(f"note: {note}" for note in notes), err=True)


def _rank_file(
    location: Location, source: Path | None, reading: Reading, options: RankOptions, opening: Opening, *, as_json: bool
) -> None:
    """Run ``predict --query --file``: print the best texts of the file; ``source`` None: standard input.

    Raises InputError: a model that cannot rank, or unreadable input; typer.Exit: 3, a text has no score.
    """
    from edgeformer.data.unlabelled import unlabelled
    from edgeformer.inference.predict import open_predictor
    from edgeformer.inference.rank import check_rankable, rank_file
    from edgeformer.report.predictions import ranking_table

    check_rankable(location.open_model(), options, is_stream=source is None)
    with unlabelled(source, sys.stdin.buffer, reading) as texts, open_predictor(location, *opening) as model:
        ranked = rank_file(model, texts, options, opt.show_progress())
        _print_notes(model)
    loss, title = ranked.loss, f"{location.name} · {_totals(ranked.summary, 'without a score')}"
    if as_json:
        facts = {**asdict(ranked.summary), "rankings": [asdict(ranking) for ranking in ranked.rankings]}
        facts |= {"vectors": asdict(loss)} if loss is not None else {}
        opt.print_json({**_header(location, model), **facts})
        opt.say(title, err=True)
    else:
        opt.stdout().print(ranking_table(title, ranked.rankings, loss.sentence() if loss is not None else None))
    if ranked.summary.errors:
        raise typer.Exit(3)


def _totals(summary: FileSummary, unanswered: str) -> str:
    """Return what was read as a line of text; ``unanswered`` describes texts without an answer."""
    rate = f"({summary.rows_per_s:,.0f} rows/s)"
    parts = [f"{summary.artifact}: {summary.rows:,} rows in {summary.seconds:.1f} s {rate}"]
    if summary.errors:
        parts.append(f"{summary.errors:,} {unanswered}")
    if summary.truncated:
        parts.append(f"{summary.truncated:,} cut to the length that the model reads")
    return ", ".join(parts)


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
        # The reader (head, for instance) is done: discard the rest, which the interpreter would report at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise AlreadyReported("standard output was closed by its reader", _BROKEN_PIPE) from None
