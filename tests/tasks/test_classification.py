"""Scores and figures: classification against scikit-learn, losses of logits, parity, and limits of a score drop."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

from edgeformer.tasks import metric
from edgeformer.tasks.classification import TASK, ClassificationScore, score, softmax
from edgeformer.tasks.metric import Metric, ScoreColumn, as_parity, measure_parity, out_of_tolerance


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


def test_classes_without_rows_or_predictions_and_empty_sets() -> None:
    """A class without rows that is predicted counts as 0; one that occurs nowhere does not count."""
    result = score(np.array([[2.0, 0.0], [1.0, 0.0]]), np.array([1, 0]))
    assert (result.accuracy, result.precision, result.recall, result.f1) == (0.5, 0.0, 0.0, 0.0)
    labels = np.array([0, 1, 1, 0])
    for predicted in ([0, 1, 0, 0], [0, 1, 3, 0]):
        result = score(np.eye(5)[predicted], labels)
        expected = metrics.precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)
        assert (result.precision, result.recall, result.f1) == pytest.approx(expected[:3])
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


ACCURACY = Metric("accuracy", "accuracy", 4)
SCORE = ClassificationScore(n=12345, accuracy=0.5, precision=0.0, recall=0.0, f1=0.0, loss=1.0)


def test_figures_of_a_score_are_formatted_for_tables() -> None:
    perplexity = Metric("perplexity", "perplexity", 2, higher_is_better=False, lowest=1.0, highest=None)
    assert (ACCURACY.of(SCORE), ACCURACY.of(None), perplexity.of(SCORE)) == (0.5, None, None)
    assert (ACCURACY.text(0.87654), ACCURACY.text(None), perplexity.text(12345.678)) == ("0.8765", "–", "12,345.68")
    columns = ScoreColumn("loss", "loss", 3), ScoreColumn("n", "rows", None)
    assert [column.text(12345) for column in columns] == ["12,345.000", "12,345"]
    assert [column.text(None) for column in columns] == ["–", "–"]


def test_losses_use_less_memory_than_the_logits() -> None:
    """In float64 the logits of all rows would take twice their bytes, and the exponentials as much again."""
    logits = np.random.default_rng(0).normal(size=(2000, 2000)).astype(np.float32)
    targets = np.arange(2000)
    tracemalloc.start()
    try:
        losses, confidence = metric.token_losses(logits, targets), metric.top_probability(logits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < logits.nbytes
    wide = np.exp(logits.astype(np.float64))
    assert losses == pytest.approx(-np.log(wide[targets, targets] / wide.sum(axis=-1)))
    assert confidence == pytest.approx(wide.max(axis=-1) / wide.sum(axis=-1))
    logits = np.array([[3e4, -3e4, 0.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    losses = metric.token_losses(logits, np.array([1, 2]))
    assert losses == pytest.approx([6e4, np.log(3)]), "large logits do not overflow"
    assert metric.top_probability(logits) == pytest.approx([1.0, 1 / 3])


@pytest.mark.parametrize("target", [-100, -1, 3])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    with pytest.raises(ValueError, match=r"targets must be in 0…2"):
        metric.token_losses(np.zeros((2, 3)), np.array([0, target]))
    assert metric.token_losses(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)).shape == (0,)


REFERENCE = np.array([[4.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 3.0, 2.0], [5.0, 1.0, 0.0]], dtype=np.float32)


def test_errors_of_logits_and_what_is_not_finite() -> None:
    logits = REFERENCE.copy()
    logits[2] = [0.0, 3.0, 3.5]  # another class, in this row only
    parity = measure_parity(logits, REFERENCE, "fp16", "CUDA")
    assert (parity.status, parity.n, parity.provider) == ("measured", 4, "CUDA")
    assert (parity.max_abs_error, parity.mean_abs_error) == (1.5, 1.5 / 12)
    assert parity.relative_error == pytest.approx(1.5 / REFERENCE.std())
    assert parity.top1_agreement == 0.75
    assert (parity.tolerance_kind, parity.tolerance) == ("relative", metric.FP16_RELATIVE)
    assert out_of_tolerance(measure_parity(REFERENCE * 2, REFERENCE, "int8", "CPU")) is None
    parity = measure_parity(np.where(REFERENCE == 4, np.inf, REFERENCE), REFERENCE, "int8", "CPU")
    assert (parity.max_abs_error, parity.mean_abs_error, parity.relative_error) == (None, None, None)
    assert out_of_tolerance(parity) == "its logits are not finite on the golden inputs (overflow)"
    parity = as_parity(np.array([0.5]), 0.0, np.array([True]), "fp16", "CPU")
    assert (parity.max_abs_error, parity.relative_error) == (0.5, None)
    assert out_of_tolerance(parity) == "the reference logits are constant, so a relative error is undefined"
    error = np.concatenate([[2.0**24], np.ones(3)]).astype(np.float32)
    parity = as_parity(error, 1.0, np.ones(4, dtype=bool), "fp32", "CPU")
    assert parity.mean_abs_error == (2**24 + 3) / 4, "errors are averaged in double precision"


@pytest.mark.parametrize(
    ("precision", "kind", "tolerance", "spread"),
    [
        ("fp32", "absolute", metric.FP32_ABSOLUTE, 0.5),
        ("fp32", "absolute", 100 * metric.FP32_ABSOLUTE, 100.0),
        ("fp16", "relative", metric.FP16_RELATIVE, 1.0),
    ],
)
def test_an_error_up_to_the_tolerance_passes(precision: Any, kind: str, tolerance: float, spread: float) -> None:
    for error, rejected in ((0.0, False), (tolerance, False), (np.nextafter(tolerance, 1), True)):
        reason = out_of_tolerance(as_parity(np.array([error]), spread, np.array([True]), precision, "CPU"))
        assert reason is None if not rejected else f"parity: {kind} error" in str(reason)
