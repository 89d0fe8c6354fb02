"""What the training loop asks of a task: rows as batches, a loss, and a score on a set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeformer.formats.scores import ClassificationScore, LanguageScore
from edgeformer.stages.training.batches import Batch

Score = ClassificationScore | LanguageScore


@dataclass(frozen=True)
class Losses:
    """Sums over what counts in a micro-batch, in nats: the one to minimise, and named parts of it for the log."""

    total: Tensor
    parts: dict[str, Tensor]


class Objective(Protocol):
    """One task's side of training."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every training row, int64 [n]."""

    @property
    def tests(self) -> tuple[str, ...]:
        """Names of the test sets; the first is the protocol's own."""

    def batch(self, rows: NDArray[np.int64], device: torch.device) -> Batch:
        """Training rows as one padded batch on ``device``."""

    def weight(self, batch: Batch) -> int:
        """How much of the batch counts in its loss: rows, or predicted tokens."""

    def losses(self, model: nn.Module, batch: Batch) -> Losses:
        """Summed losses of a micro-batch, with gradients."""

    def evaluate(self, model: nn.Module, name: str, device: torch.device) -> Score:
        """Score of ``model`` in float32 on "validation" or a test set; leaves it in evaluation mode."""

    def criterion(self, score: Score) -> float:
        """What picks the epoch whose weights are kept; smaller is better."""

    def record(self, score: Score) -> dict[str, float]:
        """A validation score as figures for metrics.jsonl."""

    def describe(self, score: Score) -> str:
        """A validation score in a line for people."""
