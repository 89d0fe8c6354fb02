"""Metrics against scikit-learn, and how much of them an artifact may lose."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from edgeformer.tasks.classification import TASK, ClassificationScore, score, softmax
from edgeformer.tasks.metric import token_losses


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


def test_a_class_that_is_neither_there_nor_predicted_counts_as_zero() -> None:
    labels = np.array([0, 1, 1, 0])
    found = score(np.eye(3)[[0, 1, 0, 0]], labels)
    expected = metrics.precision_recall_fscore_support(
        labels, [0, 1, 0, 0], labels=range(3), average="macro", zero_division=0
    )
    assert (found.precision, found.recall, found.f1) == pytest.approx(expected[:3])


def test_probabilities_of_one_row_do_not_depend_on_the_others() -> None:
    found = softmax(np.array([[1000.0, 999.0], [-1000.0, -1001.0]], dtype=np.float32))
    assert found.dtype == np.float64
    assert found == pytest.approx(np.array([[0.73105857863, 0.26894142137]] * 2))


@pytest.mark.parametrize("exits", [(), (8,)])
def test_a_model_with_one_answer_calls_it_logits(exits: tuple[int, ...]) -> None:
    meter = TASK.meter(exits)
    for right in (True, False):
        meter.add({"logits": np.eye(2)[[0, int(right)]]}, {"labels": np.array([0, 1])})
    assert (meter.score().n, meter.score().accuracy, meter.earlier()) == (4, 0.75, {})


def test_a_model_with_two_exits_has_a_score_of_each() -> None:
    meter = TASK.meter((1, 2))
    answers = {"logits_exit1": np.eye(2)[[0, 0]], "logits_exit2": np.eye(2)[[0, 1]]}
    meter.add(answers, {"labels": np.array([0, 1])})
    assert {loop: found.accuracy for loop, found in meter.earlier().items()} == {1: 0.5}  # type: ignore[attr-defined]
    assert meter.score().accuracy == 1.0


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1e4, -1e4]], dtype=np.float32)
    assert token_losses(logits, np.array([0])) == pytest.approx(0.0)
    assert token_losses(logits, np.array([1])) == pytest.approx(2e4)


def test_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        score(np.zeros((0, 2)), np.zeros(0, dtype=np.int64))


def scored(right: int, rows: int = 10_000) -> ClassificationScore:
    labels = np.arange(rows) % 2
    answers = np.where(np.arange(rows) < right, labels, 1 - labels)
    return score(np.eye(2, dtype=np.float32)[answers], labels)


@pytest.mark.parametrize(
    ("precision", "trimmed", "bar"), [("fp16", False, 10), ("int8", False, 30), ("int8", True, 50)]
)
def test_accuracy_may_fall_as_far_as_the_bar_and_no_further(precision: str, trimmed: bool, bar: int) -> None:
    reference = scored(9000)
    assert TASK.lost(scored(9000 - bar + 1), reference, precision, trimmed=trimmed) is None  # type: ignore[arg-type]
    reason = TASK.lost(scored(9000 - bar - 1), reference, precision, trimmed=trimmed)  # type: ignore[arg-type]
    assert reason is not None and "below FP32's on 10,000 rows" in reason


def test_one_row_of_few_is_no_loss_but_two_are() -> None:
    assert TASK.lost(scored(59, 64), scored(60, 64), "int8", trimmed=False) is None
    assert "at most 0.0234 may be lost" in str(TASK.lost(scored(58, 64), scored(60, 64), "int8", trimmed=False))
