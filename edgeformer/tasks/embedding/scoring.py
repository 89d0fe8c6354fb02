"""Scores of an embedding model from its vectors, and how close vectors are to those of torch FP32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeformer.formats.manifest import Parity, Precision
from edgeformer.formats.scores import Score
from edgeformer.tasks.early_exit import exit_logits
from edgeformer.tasks.metric import Arrays, Meter
from edgeformer.tasks.parity import as_parity

Float64s = NDArray[np.float64]


class EmbeddingScore(Score):
    """How good vectors are: by pairs that people have scored, or else by those of the model in FP32."""

    n: int = Field(description="pairs, or texts where there are no pairs")
    similarity: float = Field(
        description="`pairs`: Spearman's rank correlation of cosines with the scores; `fp32`: mean cosine with the "
        "vectors that the whole model computes in torch FP32; 0 where cosines are not finite or, of pairs, all equal"
    )
    compared_with: Literal["pairs", "fp32"]


def unit_rows(vectors: NDArray[np.floating]) -> Float64s:
    """Rows [n, d] scaled to length 1, in float64; one of zeros stays so."""
    wide = vectors.astype(np.float64)
    result: Float64s = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return result


def row_cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Float64s:
    """Cosine of each row of ``first`` with the same row of ``second``, both [n, d] → [n]."""
    result: Float64s = (unit_rows(first) * unit_rows(second)).sum(axis=1)
    return result


def spearman(first: NDArray[np.number[Any]], second: NDArray[np.number[Any]]) -> float:
    """Rank correlation of two lists [n]; equal values share the mean of their ranks. NaN where one does not vary."""
    # Not scipy.stats.spearmanr: `evaluate` runs on devices, and the base installation has no scipy.
    ranks = [_ranks(values) for values in (first, second)]
    centred = [values - values.mean() for values in ranks]
    spread = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / spread if spread else float("nan")


def _ranks(values: NDArray[np.number[Any]]) -> Float64s:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    result: Float64s = (last - (count - 1) / 2)[place]
    return result


def pairs_score(vectors: NDArray[np.floating], scores: NDArray[np.int64]) -> EmbeddingScore:
    """Of flat pairs: rows 2i and 2i + 1 of ``vectors`` [2m, d] are pair i, and so of ``scores`` [2m]."""
    close = row_cosines(vectors[::2], vectors[1::2])
    found = _finite(spearman(close, scores[::2]) if np.isfinite(close).all() else float("nan"))
    return EmbeddingScore(n=len(vectors) // 2, similarity=found, loss=1 - found, compared_with="pairs")


def reference_score(vectors: NDArray[np.floating], reference: NDArray[np.floating]) -> EmbeddingScore:
    """Of ``vectors`` [n, d] against those of the whole model in FP32."""
    found = _finite(float(row_cosines(vectors, reference).mean()))
    return EmbeddingScore(n=len(vectors), similarity=found, loss=1 - found, compared_with="fp32")


def _finite(similarity: float) -> float:
    """JSON has no NaN, and what ranks nothing is no better than chance: 0."""
    return similarity if np.isfinite(similarity) else 0.0


def vector_parity(
    vectors: NDArray[np.float32], reference: NDArray[np.float32], precision: Precision, provider: str
) -> Parity:
    """Compare vectors [n, d] with torch FP32's.

    Top-1 agreement is that of a search: the share of rows to which, among all other rows of the reference, the same
    one is nearest.
    """
    error = np.abs(vectors - reference)
    agrees = _nearest_other(vectors, reference) == _nearest_other(reference, reference)
    return as_parity(error, float(reference.std()), agrees, precision, provider)


def _nearest_other(vectors: NDArray[np.floating], among: NDArray[np.floating]) -> NDArray[np.intp]:
    close = unit_rows(vectors) @ unit_rows(among).T
    np.fill_diagonal(close, -np.inf)
    found: NDArray[np.intp] = close.argmax(axis=1)
    return found


class PairsMeter(Meter):
    """Keeps the vectors of every row, which come longest first; the two of a pair are put together in the end.

    Args:
        exits: loops that answer, in rising order; fewer than two: there is one answer.
    """

    def __init__(self, exits: Sequence[int] = ()) -> None:
        self._names = {exit_logits(loop): loop for loop in exits} if len(exits) > 1 else {"logits": 0}
        self._vectors: dict[str, list[NDArray[Any]]] = {name: [] for name in self._names}
        self._rows: list[NDArray[np.int64]] = []
        self._scores: list[NDArray[np.int64]] = []

    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count one batch: vectors [B, d] under ``logits`` (with several exits ``logits_exitN``), and ``rows`` [B]."""
        self._rows.append(batch["rows"])
        self._scores.append(batch["labels"])
        for name in self._names:
            self._vectors[name].append(outputs[name])

    def score(self, words: int | None = None) -> EmbeddingScore:
        """The last exit's score of all pairs so far. Raises ValueError where there is none."""
        return self._score(list(self._names)[-1])

    def earlier(self) -> dict[int, Score]:
        return {loop: self._score(name) for name, loop in list(self._names.items())[:-1]}

    def _score(self, name: str) -> EmbeddingScore:
        if not self._rows:
            raise ValueError("cannot score an empty set")
        order = np.argsort(np.concatenate(self._rows))
        return pairs_score(np.concatenate(self._vectors[name])[order], np.concatenate(self._scores)[order])
