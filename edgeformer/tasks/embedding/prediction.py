"""What an embedding model answers to one text, and how close texts are by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.tasks.embedding.scoring import unit_rows
from edgeformer.tasks.prediction import Prediction


@dataclass(frozen=True)
class TextVector(Prediction):
    """The vector of one text, float32 [d]."""

    vector: NDArray[np.float32]

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "vector": self.vector.tolist()}


def cosines(first: Sequence[TextVector], second: Sequence[TextVector]) -> NDArray[np.float64]:
    """Cosine of every vector of ``first`` with every one of ``second``, [len(first), len(second)]."""
    left, right = (unit_rows(np.stack([found.vector for found in one])) for one in (first, second))
    result: NDArray[np.float64] = left @ right.T
    return result


def nearest(asked: Sequence[TextVector], among: Sequence[TextVector], most: int) -> list[list[tuple[int, float]]]:
    """For each of ``asked`` up to ``most`` numbers of ``among`` with their cosines, the closest first."""
    found = cosines(asked, among)
    order = np.argsort(-found, axis=1, kind="stable")[:, :most]
    return [[(int(number), float(row[number])) for number in best] for row, best in zip(found, order, strict=True)]
