"""Classification scores against scikit-learn, and the allowed score drop of an artifact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from edgeformer.tasks.classification import TASK, ClassificationScore, score, softmax


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(2))
def test_scores_equal_scikit_learn(classes: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(200, classes)).astype(np.float32) * 3
    labels = generator.integers(0, classes, 200)
    result = score(logits, labels)
    predicted = logits.argmax(-1)
    average = "binary" if classes == 2 else "macro"
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(labels, predicted, average=average)
    assert result.n == 200
    assert result.accuracy == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert (result.precision, result.recall, result.f1) == pytest.approx((precision, recall, f1))
    assert result.loss == pytest.approx(metrics.log_loss(labels, softmax(logits), labels=range(classes)), rel=1e-6)


def test_classes_without_rows_or_predictions() -> None:
    """A class without rows that is predicted counts as 0; one that occurs nowhere does not count."""
    result = score(np.array([[2.0, 0.0], [1.0, 0.0]]), np.array([1, 0]))
    assert (result.accuracy, result.precision, result.recall, result.f1) == (0.5, 0.0, 0.0, 0.0)
    labels = np.array([0, 1, 1, 0])
    for predicted in ([0, 1, 0, 0], [0, 1, 3, 0]):
        result = score(np.eye(5)[predicted], labels)
        expected = metrics.precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)
        assert (result.precision, result.recall, result.f1) == pytest.approx(expected[:3])


def test_an_empty_set_is_refused() -> None:
    for empty in (lambda: score(np.zeros((0, 2)), np.zeros(0, dtype=np.int64)), TASK.meter().score):
        with pytest.raises(ValueError, match="empty"):
            empty()


def score_with(right: int, rows: int = 10_000) -> ClassificationScore:
    labels = np.arange(rows) % 2
    return score(np.eye(2, dtype=np.float32)[np.where(np.arange(rows) < right, labels, 1 - labels)], labels)


@pytest.mark.parametrize(("precision", "trimmed", "allowed"), [("fp16", False, 10), ("int8", False, 30)])
def test_accuracy_drop_has_a_limit(precision: Any, trimmed: bool, allowed: int) -> None:
    reference = score_with(9000)
    assert TASK.lost(score_with(9000 - allowed + 1), reference, precision, trimmed=trimmed) is None
    reason = TASK.lost(score_with(9000 - allowed - 1), reference, precision, trimmed=trimmed)
    assert reason is not None and "below FP32 on 10,000 rows" in reason
    assert TASK.lost(score_with(59, 64), score_with(60, 64), "int8", trimmed=False) is None, "a drop of one row"
    reason = TASK.lost(score_with(58, 64), score_with(60, 64), "int8", trimmed=False)
    assert reason == "accuracy 0.9062 is 0.0312 below FP32 on 64 rows; the limit is 0.0234"
