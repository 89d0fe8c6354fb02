"""Figures of a task: its metric, table columns, meters that collect a score, and losses of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.scores import Score
from edgeformer.tasks.early_exit import ExitRecords, exit_logits

Array = NDArray[Any]
Arrays = Mapping[str, Array]


@dataclass(frozen=True)
class Metric:
    """The figure by which models of a task are compared.

    Attributes:
        name: key in JSON, such as ``accuracy``.
        higher_is_better: true for accuracy, false for perplexity.
        places: decimals in a table.
        lowest, highest: range of a limit on it; None: open.
        flag: option of ``profile --search`` that limits it.
        evaluated_on: name of the data that it is computed on.
        is_share: it is a share of right rows, so the binomial distribution gives its interval.
    """

    name: str
    higher_is_better: bool
    places: int
    lowest: float
    highest: float | None
    flag: str
    evaluated_on: str = "validation"
    is_share: bool = False

    def of(self, score: Score | None) -> float | None:
        """Return the figure of a score; None for no score or one of another task."""
        value: float | None = getattr(score, self.name, None)
        return value

    def text(self, value: float | None) -> str:
        """Format the figure for a table; an en dash for None."""
        return "–" if value is None else f"{value:,.{self.places}f}"


@dataclass(frozen=True)
class ScoreColumn:
    """One figure of a score in a table: key in JSON, heading, decimals (None: a count)."""

    key: str
    heading: str
    places: int | None

    def text(self, value: float | None) -> str:
        """Format the figure for a table; an en dash for None."""
        if value is None:
            return "–"
        return f"{value:,}" if self.places is None else f"{value:,.{self.places}f}"


class Meter(ABC):
    """Collects the answers of a model over a set, batch by batch, into a score."""

    @abstractmethod
    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count one batch.

        Args:
            outputs: ``logits``; with several exits ``logits_exitN``, or, where logits are too large, ``loss_exitN``
                and optionally ``confidence_exitN``.
            batch: inputs and right answers from :meth:`Task.batch`.
        """

    @abstractmethod
    def score(self, words: int | None = None) -> Score:
        """Return the score so far. Raises ValueError for an empty set.

        Args:
            words: number of words in the text, for figures per word.
        """

    def earlier(self) -> Mapping[int, Score]:
        """Return exit before the last → score, for scores without ``Score.by_exit``."""
        return {}


class RowsMeter(Meter):
    """Keeps logits and labels of every row, for figures that are no sums over batches, such as F1.

    Args:
        score_rows: computes a score of logits [n, …] and labels [n, …]. Rows are in the order of their numbers if
            batches have ``rows``, else in the order of the batches.
        exits: loops that answer, in rising order; fewer than two: the model has one answer, ``logits``.
        records: receives the loss and confidence of every class answer at every exit.
    """

    def __init__(
        self, score_rows: Callable[[Array, Array], Score], exits: Sequence[int] = (), records: ExitRecords | None = None
    ) -> None:
        self._score_rows, self._records = score_rows, records
        self._loops = {exit_logits(loop): loop for loop in exits} if len(exits) > 1 else {"logits": 0}
        self._logits: dict[str, list[Array]] = {name: [] for name in self._loops}
        self._labels: list[Array] = []
        self._numbers: list[Array] = []

    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count one batch: ``logits`` [B, …] (with several exits ``logits_exitN``) and ``labels`` [B, …]."""
        labels = batch["labels"]
        self._labels.append(labels)
        if "rows" in batch:
            self._numbers.append(batch["rows"])
        for name, loop in self._loops.items():
            logits = outputs[name]
            self._logits[name].append(logits)
            if self._records is not None:
                right = logits.argmax(axis=-1) == labels
                self._records.add(loop, token_losses(logits, labels), top_probability(logits), right)

    def score(self, words: int | None = None) -> Score:
        """Return the score of the last exit. Raises ValueError for an empty set."""
        return self._score_of(list(self._loops)[-1])

    def earlier(self) -> dict[int, Score]:
        return {loop: self._score_of(name) for name, loop in list(self._loops.items())[:-1]}

    def _score_of(self, name: str) -> Score:
        if not self._labels:
            raise ValueError("cannot score an empty set")
        logits, labels = np.concatenate(self._logits[name]), np.concatenate(self._labels)
        if self._numbers:
            order = np.argsort(np.concatenate(self._numbers))
            logits, labels = logits[order], labels[order]
        return self._score_rows(logits, labels)


def token_losses(logits: NDArray[np.floating], targets: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return −log p(target) of every row or token in nats, float64 [n]; logits [n, V], targets [n] in 0…V−1.

    Raises:
        ValueError: a target outside the classes or the vocabulary, such as the padding mark.
    """
    if len(targets) and not 0 <= targets.min() <= targets.max() < logits.shape[1]:
        raise ValueError(f"targets must be in 0…{logits.shape[1] - 1}; leave out what is not predicted")
    losses = np.empty(len(targets), dtype=np.float64)
    for rows in _row_blocks(len(targets)):
        wide = logits[rows].astype(np.float64)
        top = wide.max(axis=-1)
        log_sum = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
        losses[rows] = log_sum - wide[np.arange(len(wide)), targets[rows]]
    return losses


def top_probability(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the probability of the likeliest class or token, float64 [n]; logits [n, V]. Early exit compares it."""
    confidence = np.empty(len(logits), dtype=np.float64)
    for rows in _row_blocks(len(logits)):
        wide = logits[rows].astype(np.float64)
        confidence[rows] = 1 / np.exp(wide - wide.max(axis=-1, keepdims=True)).sum(axis=-1)
    return confidence


def _row_blocks(count: int, size: int = 128) -> list[slice]:
    # In float64 a thousand rows of 50,000 logits are 400 MB.
    return [slice(start, start + size) for start in range(0, count, size)]
