"""edgeformer predict: label and probability of texts; of an embedding model, how similar they are."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeformer.cli.options import Artifacts, Json, print_json, stdin, stdout
from edgeformer.formats.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from edgeformer.data.rows import Text
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
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            help="Looped models: stop looping for a text at probability P, e.g. 0.95; needs the step bundle "
            "(export --exit all).",
        ),
    ] = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Classifiers of pairs: the second text of every TEXT; or one for each."),
    ] = None,
    nearest: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Embedding models: rank the texts of FILE, one per line, for every TEXT."),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, metavar="K", help="So many of --nearest. Default: 5.")] = None,
    artifacts: Artifacts = Path("artifacts"),
    as_json: Json = False,
) -> None:
    """Classify texts with an exported artifact, or compare them with an embedding model (no torch needed).

    Examples:

      edgeformer predict "a warm, funny and quietly moving film"

      edgeformer predict recurrent_sst2_fast-001 "not my kind of movie" "great fun"

      edgeformer predict path/to/bundle < reviews.txt

      edgeformer predict minilm "How do I reset my password?" --nearest questions.txt
    """
    from edgeformer.stages.evaluating.predict import predict, predicts_vectors

    _check(nearest, top, pair, confidence)
    location, texts = _split(list(words or []), artifacts)
    if nearest is not None or (predicts_vectors(location) and not pair and confidence is None):
        _similarities(location, texts, artifact, (nearest, top or _TOP), as_json=as_json)
        return
    chosen, predictions = predict(location, _paired(texts, pair), artifact, confidence)
    rows = [prediction.as_dict() for prediction in predictions]
    if as_json:
        print_json({"run": location.name, "artifact": chosen, "predictions": rows})
    else:
        from edgeformer.reporting.tables import prediction_table

        stdout().print(prediction_table(location.name, chosen, rows))


def _check(nearest: Path | None, top: int | None, pair: list[str] | None, confidence: float | None) -> None:
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
    location: Location, texts: list[str], artifact: str | None, among: tuple[Path | None, int], *, as_json: bool
) -> None:
    from edgeformer.stages.evaluating.similarity import compare_texts

    found = compare_texts(location, texts, artifact, *among)
    if as_json:
        print_json({"run": location.name, **asdict(found)})
        return
    from edgeformer.reporting.similarity_tables import similarity_table

    stdout().print(similarity_table(location.name, found))


def _paired(texts: list[str], pair: list[str] | None) -> list[Text]:
    if not pair:
        return [*texts]
    if len(pair) not in (1, len(texts)):
        raise InputError(f"--pair: {len(pair)} second texts for {len(texts)} texts; give one for all, or one for each")
    return [*zip(texts, pair * (len(texts) if len(pair) == 1 else 1), strict=True)]


def _split(words: list[str], artifacts: Path) -> tuple[Location, list[str]]:
    """The run, and the texts. The first word is a run if it names one and texts follow or come on stdin."""
    from edgeformer.run import locate

    piped = not sys.stdin.isatty()
    if len(words) >= 2 or (words and piped):
        try:
            location = locate(words[0], artifacts)
            return location, words[1:] or _lines()
        except ArtifactError:
            if _looks_like_a_path(words[0], artifacts):
                raise
    return locate(None, artifacts), words or (_lines() if piped else [])


def _looks_like_a_path(word: str, artifacts: Path) -> bool:
    from edgeformer.run import is_there

    if any(character.isspace() for character in word):
        return False  # a text such as "9/10, would watch again"
    return "/" in word or "\\" in word or is_there(Path(word)) or is_there(artifacts / word)


def _lines() -> list[str]:
    return [line.strip() for line in stdin().split("\n") if line.strip()]
