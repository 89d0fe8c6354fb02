"""Metrics against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from edgeformer.tasks.classification.scoring import cross_entropy, score, softmax


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_scikit_learns(classes: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(200, classes)).astype(np.float32) * 3
    labels = generator.integers(0, classes, 200)
    found = score(logits, labels)
    predicted = logits.argmax(-1)
    average = "binary" if classes == 2 else "macro"
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(labels, predicted, average=average)
    assert found.n == 200
    assert found.accuracy == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert (found.precision, found.recall, found.f1) == pytest.approx((precision, recall, f1))
    assert found.loss == pytest.approx(metrics.log_loss(labels, softmax(logits), labels=range(classes)), rel=1e-6)


def test_a_class_that_is_never_predicted_counts_as_zero() -> None:
    found = score(np.array([[2.0, 0.0], [1.0, 0.0]]), np.array([1, 0]))
    assert (found.precision, found.recall, found.f1) == (0.0, 0.0, 0.0)
    assert found.accuracy == 0.5


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, -1e4]], dtype=np.float32)
    assert cross_entropy(logits, np.array([0])) == pytest.approx(0.0)
    assert cross_entropy(logits, np.array([1])) == pytest.approx(2e4)


def test_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        score(np.zeros((0, 2)), np.zeros(0, dtype=np.int64))
