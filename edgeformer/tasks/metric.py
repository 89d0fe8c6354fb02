"""Metrics of a task: figures, table columns, meters, losses from logits, and numerical parity with torch FP32."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.manifest import Parity, Precision
from edgeformer.artifacts.scores import Score
from edgeformer.tasks.arrays import Array, Arrays, Bools, Float64s, Floats
from edgeformer.tasks.early_exit import ExitRecords, exit_logits

_BLOCK = 128  # rows converted to float64 at a time: a thousand rows of 50,000 logits are 400 MB


@dataclass(frozen=True)
class ScoreColumn:
    """One figure of a score in a table: key in JSON, such as ``accuracy``, heading, decimals (None: a count)."""

    name: str
    heading: str
    places: int | None

    def text(self, value: float | None) -> str:
        """Format the figure for a table; an en dash for None."""
        if value is None:
            return "–"
        return f"{value:,}" if self.places is None else f"{value:,.{self.places}f}"


@dataclass(frozen=True)
class Metric(ScoreColumn):
    """The column by which models of a task are compared."""

    higher_is_better: bool = True
    lowest: float = 0.0  # range of a limit on the metric (``--min-score``)
    highest: float | None = 1.0  # None: unlimited
    evaluated_on: str = "validation"  # data on which it is computed
    is_share: bool = False  # of rows, so that the binomial distribution gives its interval

    def of(self, score: Score | None) -> float | None:
        """Return the figure of a score; None for no score or one of another task."""
        value: float | None = getattr(score, self.name, None)
        return value

    def loss(self, value: float, change: float) -> float:
        """Return a change for the worse as a positive number, in the metric's unit if it is a share, else relative."""
        loss = -change if self.higher_is_better else change
        return loss if self.highest is not None else loss / max(abs(value), 1e-12)


class Meter(ABC):
    """Accumulates the outputs of a model over a set, batch by batch, into a score."""

    @abstractmethod
    def add(self, outputs: Arrays, batch: Arrays) -> None:
        """Count one batch from :meth:`RowSource.batch`.

        ``outputs``: ``logits``, of several exits ``logits_exitN``, or ``loss_exitN`` and ``confidence_exitN``.
        """

    @abstractmethod
    def score(self, words: int | None = None) -> Score:
        """Return the score so far; ``words``: for figures per word. Raises ValueError for an empty set."""

    def earlier(self) -> Mapping[int, Score]:
        """Return exit before the last → score, for scores without ``Score.by_exit``."""
        return {}


class RowsMeter(Meter):
    """Keeps logits and labels of every row, for figures that are not sums over batches, such as F1.

    ``score_rows`` gets logits and labels [n, …], in the order of the row numbers if batches have ``rows``. ``records``
    receives the loss and confidence of every class answer at every exit.
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

    def score(self, words: int | None = None, loop: int | None = None) -> Score:
        """Return the score of an exit, by default the last one. Raises ValueError for an empty set."""
        if not self._labels:
            raise ValueError("cannot score an empty set")
        name = list(self._loops)[-1] if loop is None else exit_logits(loop)
        logits, labels = np.concatenate(self._logits[name]), np.concatenate(self._labels)
        if self._numbers:
            order = np.argsort(np.concatenate(self._numbers), kind="stable")
            logits, labels = logits[order], labels[order]
        return self._score_rows(logits, labels)

    def earlier(self) -> dict[int, Score]:
        return {loop: self.score(loop=loop) for loop in list(self._loops.values())[:-1]}


def token_losses(logits: Floats, targets: NDArray[np.integer]) -> Float64s:
    """Return −log p(target) of every row or token in nats, float64 [n]; logits [n, V], targets [n].

    Raises ValueError: a target is not in 0…V−1.
    """
    if len(targets) and not 0 <= targets.min() <= targets.max() < logits.shape[1]:
        raise ValueError(f"targets must be in 0…{logits.shape[1] - 1}; leave out what is not predicted")
    losses = np.empty(len(targets), dtype=np.float64)
    for start in range(0, len(targets), _BLOCK):
        rows = slice(start, start + _BLOCK)
        wide = logits[rows].astype(np.float64)
        top = wide.max(axis=-1)
        log_sum = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
        losses[rows] = log_sum - wide[np.arange(len(wide)), targets[rows]]
    return losses


def top_probability(logits: Floats) -> Float64s:
    """Return the probability of the likeliest class or token, float64 [n]; logits [n, V]. Early exit compares it."""
    confidence = np.empty(len(logits), dtype=np.float64)
    for start in range(0, len(logits), _BLOCK):
        rows = slice(start, start + _BLOCK)
        wide = logits[rows].astype(np.float64)
        confidence[rows] = 1 / np.exp(wide - wide.max(axis=-1, keepdims=True)).sum(axis=-1)
    return confidence


def spearman(first: NDArray[np.number[Any]], second: NDArray[np.number[Any]]) -> float:
    """Return Spearman's rank correlation of two lists [n], with mean ranks for ties; NaN if a list is constant."""
    # Not scipy.stats.spearmanr: `evaluate` runs on devices, and the base installation has no scipy.
    centred = []
    for values in (first, second):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
        centred.append(ranks - ranks.mean())
    spread = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / spread if spread else float("nan")


def rank_correlation(first: NDArray[np.number[Any]], second: NDArray[np.number[Any]]) -> float:
    """Return :func:`spearman`, and 0, the score of chance, where it is undefined: JSON has no NaN."""
    correlation = spearman(first, second)
    return correlation if math.isfinite(correlation) else 0.0


def perplexity_of(loss: float) -> float:
    """Return exp(loss), limited to the largest float, because JSON has no infinity."""
    return math.exp(min(loss, 709.0))


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient as a Python float; 0 if the denominator is 0."""
    return float(numerator / denominator) if denominator else 0.0


FP32_ABSOLUTE = 1e-4
FP16_RELATIVE = 1e-2
"""Tolerance relative to the standard deviation of the reference logits."""

Kind = Literal["absolute", "relative", "rms", "score"]
TOLERANCES: dict[Precision, tuple[Kind, float | None]] = {
    "fp32": ("absolute", FP32_ABSOLUTE), "fp16": ("relative", FP16_RELATIVE),
    "int8": ("score", None), "int4": ("score", None),
}  # fmt: skip
"""Precision → kind and limit. INT8 and INT4 are judged by the score drop, which logit errors hardly predict."""


def measure_parity(logits: Floats, reference: Floats, precision: Precision, provider: str) -> Parity:
    """Compare logits [n, C] computed with ``provider`` with those of torch FP32; n counts rows or tokens."""
    error = np.abs(logits - reference)  # in float32: the difference of close numbers is exact
    return as_parity(error, float(reference.std()), logits.argmax(-1) == reference.argmax(-1), precision, provider)


def as_parity(error: Floats, spread: float, agrees: Bools, precision: Precision, provider: str) -> Parity:
    """Return the parity record of a manifest from absolute errors of logits; all are None if one is not finite.

    ``spread``: standard deviation of the reference logits. ``agrees``: whether the likeliest class or token is the
    same, [n].
    """
    finite = bool(np.isfinite(error).all())
    kind, tolerance = TOLERANCES[precision]
    if kind == "absolute" and tolerance is not None:
        tolerance *= max(1.0, spread)  # rounding grows with the logits: those of SmolLM2 spread by 6
    return Parity(
        status="measured", n=len(agrees), provider=provider, max_abs_error=float(error.max()) if finite else None,
        mean_abs_error=float(error.mean(dtype=np.float64)) if finite else None,
        relative_error=float(error.max()) / spread if spread and finite else None, top1_agreement=float(agrees.mean()),
        tolerance=tolerance, tolerance_kind=kind,
    )  # fmt: skip


def out_of_tolerance(parity: Parity) -> str | None:
    """Explain why an artifact fails parity; None if it is within tolerance or judged by task score."""
    if parity.max_abs_error is None:
        outputs = f"output {parity.output!r} is" if parity.output is not None else "its logits are"
        return f"{outputs} not finite on the golden inputs (overflow)"
    if parity.tolerance is None:
        return None
    figures = {"absolute": parity.max_abs_error, "relative": parity.relative_error, "rms": parity.rms_error}
    kind, error = parity.tolerance_kind, figures[parity.tolerance_kind]
    if error is None:
        return "the reference logits are constant, so a relative error is undefined"
    if error > parity.tolerance:
        output = f" of output {parity.output!r}" if parity.output is not None else ""
        return f"parity: {kind} error {error:.2e}{output} is above the tolerance {parity.tolerance:.0e}"
    return None
