"""predict on an embedding model: how similar texts are to each other, and which of a list are nearest to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.formats.errors import InputError
from edgeformer.run import Location
from edgeformer.stages.evaluating.predict import predict, predicts_vectors
from edgeformer.tasks.embedding.prediction import cosines, nearest


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


def compare_texts(
    location: Location, texts: Sequence[str], artifact: str | None = None, among: Path | None = None, top: int = 5
) -> Similarities:
    """Vectors of texts, their cosines, and for each text the nearest of a list.

    Args:
        location: of an embedding model.
        texts: one or more.
        artifact: as of :func:`~edgeformer.stages.evaluating.predict.predict`.
        among: a file with one text per line, or a table with a column of texts; None: no list.
        top: so many of the list for each text.

    Raises:
        InputError: no text, an unknown artifact, or a model that makes no vectors.
        DataError: the list cannot be read, or is empty.
    """
    if not predicts_vectors(location):
        raise InputError(f"{location.name}: makes no vectors of texts, so none is near another")
    listed = _texts_of(among) if among is not None else []
    chosen, found = predict(location, [*texts, *listed], artifact)
    vectors: Any = found  # of an embedding model
    asked, others = vectors[: len(texts)], vectors[len(texts) :]
    matches = None
    if listed:
        matches = [[Match(listed[number], cosine) for number, cosine in row] for row in nearest(asked, others, top)]
    return Similarities(chosen, [one.as_dict() for one in asked], cosines(asked, asked).tolist(), matches)


def _texts_of(path: Path) -> list[str]:
    from edgeformer.data.pairs import read_texts
    from edgeformer.data.sources import file_source

    return [str(text) for text in read_texts([file_source(path, labelled=False)]).texts]
