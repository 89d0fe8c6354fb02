"""The figures of a task: which one it is judged by, which are shown, what adds them up, and losses of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.scores import Score

Array = NDArray[Any]
Arrays = Mapping[str, Array]
_ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class Metric:
    """The figure that a task is judged by.

    Attributes:
        name: as in JSON, e.g. ``accuracy``.
        higher_is_better: accuracy rises, perplexity falls.
        places: decimals in a table.
        lowest, highest: the range that a bound on it can have; None: open.
        flag: the option of ``profile --search`` that bounds it.
        found_on: what it is taken on, in a word.
        is_share: it is the share of rows that are right, so that the binomial distribution gives its interval.
    """

    name: str
    higher_is_better: bool
    places: int
    lowest: float
    highest: float | None
    flag: str
    found_on: str = "validation"
    is_share: bool = False

    def of(self, score: Score | None) -> float | None:
        """The figure of a score; None without one, or of another task's."""
        value: float | None = getattr(score, self.name, None)
        return value

    def text(self, value: float | None) -> str:
        """The figure for a table; an en dash where there is none."""
        return "–" if value is None else f"{value:,.{self.places}f}"


@dataclass(frozen=True)
class ScoreColumn:
    """One figure of a score in a table: its key in JSON, its heading, its decimals (None: a count)."""

    key: str
    heading: str
    places: int | None

    def text(self, value: float | None) -> str:
        """The figure in a table; an en dash where there is none."""
        if value is None:
            return "–"
        return f"{value:,}" if self.places is None else f"{value:,.{self.places}f}"


class Meter(ABC):
    """Adds up the answers of a model over a set, batch by batch, into a score."""

    @abstractmethod
    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count one batch.

        Args:
            outputs: what the model answered: ``logits``; of a model that answers at several exits ``logits_exitN``, or,
                where they would not fit, ``loss_exitN`` and perhaps ``confidence_exitN``.
            batch: what it was given, with the right answers, as :meth:`Task.batch` makes it.
        """

    @abstractmethod
    def score(self, words: int | None = None) -> Score:
        """The score so far. ``words``: of the text, for figures per word. Raises ValueError where nothing was added."""

    def earlier(self) -> Mapping[int, Score]:
        """Exit before the last → its score, where :meth:`score` does not tell them (``Score.by_exit``)."""
        return {}


def token_losses(logits: NDArray[np.floating], targets: NDArray[np.integer]) -> NDArray[np.float64]:
    """−log p(target) of every row or token in nats, float64 [n]; logits [n, V], targets [n] in 0…V−1.

    Raises:
        ValueError: a target outside the classes or the vocabulary, such as the mark of padding.
    """
    if len(targets) and not 0 <= targets.min() <= targets.max() < logits.shape[1]:
        raise ValueError(f"targets must be in 0…{logits.shape[1] - 1}; leave out what is not predicted")
    losses = np.empty(len(targets), dtype=np.float64)
    for rows in _parts(len(targets)):
        wide = logits[rows].astype(np.float64)
        top = wide.max(axis=-1)
        log_sum = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
        losses[rows] = log_sum - wide[np.arange(len(wide)), targets[rows]]
    return losses


def top_probability(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Probability of the likeliest class or token, float64 [n]: what early exit takes for confidence; logits [n, V]."""
    confidence = np.empty(len(logits), dtype=np.float64)
    for rows in _parts(len(logits)):
        wide = logits[rows].astype(np.float64)
        confidence[rows] = 1 / np.exp(wide - wide.max(axis=-1, keepdims=True)).sum(axis=-1)
    return confidence


def _parts(count: int) -> list[slice]:
    # In float64 a thousand rows of 50,000 logits are 400 MB.
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, count, _ROWS_AT_ONCE)]
