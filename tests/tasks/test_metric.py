"""Formatted figures, and the memory that losses of many rows need."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from edgeformer.tasks.classification import ClassificationScore
from edgeformer.tasks.metric import Metric, ScoreColumn, token_losses, top_probability

ACCURACY = Metric("accuracy", True, 4, 0.0, 1.0, "--min-accuracy")
SCORE = ClassificationScore(n=12345, accuracy=0.5, precision=0.0, recall=0.0, f1=0.0, loss=1.0)


def test_a_metric_reads_its_figure_from_a_score() -> None:
    assert ACCURACY.of(SCORE) == 0.5
    assert ACCURACY.of(None) is None
    assert Metric("perplexity", False, 2, 1.0, None, "--max-perplexity").of(SCORE) is None


def test_figures_are_formatted_for_tables() -> None:
    assert ACCURACY.text(0.87654) == "0.8765"
    assert ACCURACY.text(None) == "–"
    assert Metric("perplexity", False, 2, 1.0, None, "").text(12345.678) == "12,345.68"
    assert ScoreColumn("loss", "loss", 3).text(1234.56789) == "1,234.568"
    assert ScoreColumn("n", "rows", None).text(12345) == "12,345"
    assert ScoreColumn("n", "rows", None).text(None) == ScoreColumn("loss", "loss", 3).text(None) == "–"


def test_losses_use_less_memory_than_the_logits() -> None:
    """In float64 the logits of all rows would take twice their bytes, and the exponentials as much again."""
    logits = np.random.default_rng(0).normal(size=(2000, 2000)).astype(np.float32)
    targets = np.arange(2000)
    tracemalloc.start()
    try:
        losses, confidence = token_losses(logits, targets), top_probability(logits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < logits.nbytes
    wide = np.exp(logits.astype(np.float64))
    assert losses == pytest.approx(-np.log(wide[targets, targets] / wide.sum(axis=-1)))
    assert confidence == pytest.approx(wide.max(axis=-1) / wide.sum(axis=-1))


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e4, -3e4, 0.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    assert token_losses(logits, np.array([1, 2])) == pytest.approx([6e4, np.log(3)])
    assert top_probability(logits) == pytest.approx([1.0, 1 / 3])


@pytest.mark.parametrize("target", [-100, -1, 3])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    with pytest.raises(ValueError, match=r"targets must be in 0…2"):
        token_losses(np.zeros((2, 3)), np.array([0, target]))
    assert token_losses(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)).shape == (0,)
