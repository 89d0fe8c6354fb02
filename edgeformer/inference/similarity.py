"""predict on an embedding model: how similar texts are to each other, and which of a list are nearest to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.inference.predict import predict, predicts_vectors
from edgeformer.run import Location
from edgeformer.tasks.embedding import cosines, nearest
from edgeformer.tasks.task import Unanswered


@dataclass(frozen=True)
class Match:
    """One text of the list, and the cosine of its vector with that of the text that was asked for."""

    text: str
    cosine: float


@dataclass(frozen=True)
class Similarities:
    """What the vectors of some texts say of them.

    Attributes:
        artifact: that made the vectors.
        predictions: a vector per text, as JSON has them.
        cosines: of every text with every other.
        nearest: of every text the nearest of the list, the closest first; None: there was no list.
    """

    artifact: str
    predictions: list[dict[str, object]]
    cosines: list[list[float]]
    nearest: list[list[Match]] | None

    @property
    def texts(self) -> list[str]:
        """As they were given."""
        return [str(prediction["text"]) for prediction in self.predictions]


@dataclass(frozen=True)
class Among:
    """A list of texts to be ranked.

    Attributes:
        path: a file with one text per line, or a table with a column of texts.
        column: of the table; None: one that the model's own data or the field calls so.
        top: so many of the list for each text.
        encoding: of the file, e.g. cp1252; None: UTF-8.
    """

    path: Path
    column: str | None = None
    top: int = 5
    encoding: str | None = None


def compare_texts(
    location: Location,
    texts: Sequence[str],
    artifact: str | None = None,
    among: Among | None = None,
    runtime: str | None = None,
) -> Similarities:
    """Vectors of texts, their cosines, and for each text the nearest of a list.

    Args:
        location: of an embedding model.
        texts: one or more.
        artifact: as of :func:`~edgeformer.inference.predict.predict`.
        among: the list; empty texts in it are passed over. None: no list.
        runtime: as of ``predict``.

    Raises:
        InputError: no text, an empty one, an unknown artifact, or a model that makes no vectors.
        DataError: the list cannot be read, or is empty.
    """
    if not predicts_vectors(location):
        raise InputError(f"{location.name}: makes no vectors of texts, so none is near another")
    listed = _texts_of(among, location) if among is not None else []
    chosen, found = predict(location, [*texts, *listed], artifact, runtime=runtime)
    asked: Any = found[: len(texts)]  # of an embedding model
    for number, answer in enumerate(asked, start=1):
        if isinstance(answer, Unanswered):
            raise InputError(f"text {number} ({answer.text!r}): {answer.error}, so nothing is similar to it")
    others: Any = [answer for answer in found[len(texts) :] if not isinstance(answer, Unanswered)]
    matches = None
    if among is not None:
        if not others:
            raise DataError(f"{among.path}: no text in it")
        ranked = nearest(asked, others, among.top)
        matches = [[Match(others[number].text, cosine) for number, cosine in row] for row in ranked]
    return Similarities(chosen, [one.as_dict() for one in asked], cosines(asked, asked).tolist(), matches)


def _texts_of(among: Among, location: Location) -> list[str]:
    """All texts of the list, each by itself: where the table has pairs, the column must be named."""
    from edgeformer.data.sources import Columns
    from edgeformer.data.unlabelled import Reading, unlabelled

    owner = location.open_bundle() if location.bundle is not None else location.open_run()
    how = Reading(owner.data.parts, Columns(text=among.column, encoding=among.encoding), single=True)
    with unlabelled(among.path, sys.stdin.buffer, how) as given:
        return [str(text) for text in given.texts()]
