"""edgeformer predict: label and probability of texts; of an embedding model, how similar they are, or vectors."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeformer.artifacts.errors import InputError
from edgeformer.cli.options import ADVANCED, Artifacts, Encoding, Json, OneRuntime, print_json, stdin, stdout
from edgeformer.cli.run_or_text import NamedRun, split

if TYPE_CHECKING:
    from edgeformer.data.rows import Text
    from edgeformer.inference.predict import Confidence, Model
    from edgeformer.run import Location


_TOP = 5
"""Texts of --nearest that are listed for each text."""


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
            "(export --exit all). [b]auto[/b]: at those that edgeformer exits found to cost little enough.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Answer the texts of FILE: CSV, TSV, JSONL, Parquet or plain text, of any size. -: standard input.",
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

    A text with nothing in it, or whose answer is no number, gets an error in place of an answer; the exit code is 3.

    Examples:

      edgeformer predict "a warm, funny and quietly moving film"

      edgeformer predict recurrent_sst2_fast-001 "not my kind of movie" "great fun"

      edgeformer predict --file reviews.csv --output labels.jsonl

      edgeformer predict path/to/bundle < reviews.txt

      edgeformer predict minilm "How do I reset my password?" --nearest questions.txt
    """
    given, sure = [*(words or ())], _confidence(confidence)
    if file is not None:
        from edgeformer.cli.predict_file import FileOptions, answer_file

        _refuse({"--nearest": nearest, "--top": top}, "is for single texts; with --file, --output has the vectors")
        options = FileOptions(file, text, pair or [], input_format, output, format_, columns, encoding)
        answer_file(given, run, artifacts, (artifact, sure, runtime), options, as_json=as_json)
        return
    of_file: dict[str, object] = {
        "--input-format": input_format,
        "--output": output,
        "--format": format_,
        "--columns": columns,
    }
    _refuse(of_file, "belongs to --file FILE")
    if nearest is None:
        _refuse({"--encoding": encoding}, "is of --file FILE or --nearest FILE; give that, or leave it out")
        _refuse({"--text": text}, "names a column of --file FILE or --nearest FILE; give that, or leave it out")
    _check(nearest, top, pair, confidence)
    location, texts = split(given, artifacts, run, "predict")
    texts = texts or ([] if sys.stdin.isatty() else _lines())
    _answer(location, texts, pair, (artifact, sure, runtime), (nearest, text, top or _TOP, encoding), as_json=as_json)


def _answer(
    location: Location,
    texts: list[str],
    pair: list[str] | None,
    how: tuple[str | None, Confidence, str | None],
    among: tuple[Path | None, str | None, int, str | None],
    *,
    as_json: bool,
) -> None:
    """Answer single texts.

    Args:
        how: artifact, confidence, runtime.
        among: file, column, number and encoding of --nearest.
    """
    from edgeformer.inference.predict import opened_for, predicts_vectors

    if among[0] is not None or (predicts_vectors(location) and not pair and how[1] is None):
        _similarities(location, texts, (how[0], how[2]), among, as_json=as_json)
        return
    given = _paired(texts, pair)
    with opened_for(location, given, *how) as model:
        window = model.answering.read(given)
        rows = [one.as_dict() for one in model.answering.answers(window, model.answering.run(model.run, window))]
    if as_json:
        about = {"run": location.name, "artifact": model.id, "provider": model.provider, **model.promised()}
        print_json({**about, "predictions": rows})
    else:
        from edgeformer.report.predictions import prediction_table

        stdout().print(prediction_table(location.name, model.id, rows))
    tell_notes(model)
    if any("error" in row for row in rows):
        raise typer.Exit(3)


def tell_notes(model: Model) -> None:
    """On stderr, what its answers are promised to be."""
    if notes := model.notes():
        from edgeformer.cli.console import say

        for note in notes:
            say(f"note: {note}", err=True)


def _confidence(given: str | None) -> Confidence:
    """What --confidence asks for. Raises InputError for what is no probability."""
    if given is None:
        return None
    if given == "auto":
        return "auto"
    with suppress(ValueError):
        if 0 <= (found := float(given)) <= 1:
            return found
    raise InputError(f"--confidence {given}: is neither a probability in 0…1 nor auto")


def _refuse(options: dict[str, object], why: str) -> None:
    """Raises InputError for the first option that is given, and would do nothing."""
    for option, value in options.items():
        if value is not None:
            raise InputError(f"{option}: {why}")


def _check(nearest: Path | None, top: int | None, pair: list[str] | None, confidence: str | None) -> None:
    """Raises InputError for options that would do nothing beside the others."""
    if nearest is None:
        if top is not None:
            raise InputError(
                "--top: says how many of --nearest FILE are listed; give --nearest, too, or leave out --top"
            )
        return
    for option, given in (("--pair", bool(pair)), ("--confidence", confidence is not None)):
        if given:
            raise InputError(f"{option}: is for classifiers, and --nearest for embedding models; leave out one of them")


def _similarities(
    location: Location,
    texts: list[str],
    how: tuple[str | None, str | None],
    among: tuple[Path | None, str | None, int, str | None],
    *,
    as_json: bool,
) -> None:
    from edgeformer.inference.similarity import Among, compare_texts

    path, column, top, encoding = among
    found = compare_texts(
        location, texts, how[0], Among(path, column, top, encoding) if path is not None else None, how[1]
    )
    if as_json:
        print_json({"run": location.name, **asdict(found)})
        return
    from edgeformer.report.predictions import similarity_table

    stdout().print(similarity_table(location.name, found))


def _paired(texts: list[str], pair: list[str] | None) -> list[Text]:
    if not pair:
        return [*texts]
    if len(pair) not in (1, len(texts)):
        raise InputError(f"--pair: {len(pair)} second texts for {len(texts)} texts; give one for all, or one for each")
    return [*zip(texts, pair * (len(texts) if len(pair) == 1 else 1), strict=True)]


def _lines() -> list[str]:
    return [line.strip() for line in stdin().split("\n") if line.strip()]
