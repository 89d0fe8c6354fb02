"""Figures: losses of logits, and parity with torch FP32 within the tolerance of each precision."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from edgeformer.cli import profile
from edgeformer.tasks import all_tasks
from edgeformer.tasks.classification import ClassificationScore
from edgeformer.tasks.metric import (
    FP16_RELATIVE,
    FP32_ABSOLUTE,
    Metric,
    ScoreColumn,
    as_parity,
    measure_parity,
    out_of_tolerance,
    token_losses,
    top_probability,
)

ACCURACY = Metric("accuracy", "accuracy", 4)
SCORE = ClassificationScore(n=12345, accuracy=0.5, precision=0.0, recall=0.0, f1=0.0, loss=1.0)


def test_the_help_says_what_min_score_limits() -> None:
    assert all(task.metric.name in str(profile.command.__doc__).lower() for task in all_tasks())


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
        losses, confidence = token_losses(logits, targets), top_probability(logits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < logits.nbytes
    wide = np.exp(logits.astype(np.float64))
    assert losses == pytest.approx(-np.log(wide[targets, targets] / wide.sum(axis=-1)))
    assert confidence == pytest.approx(wide.max(axis=-1) / wide.sum(axis=-1))
    logits = np.array([[3e4, -3e4, 0.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    assert token_losses(logits, np.array([1, 2])) == pytest.approx([6e4, np.log(3)]), "large logits do not overflow"
    assert top_probability(logits) == pytest.approx([1.0, 1 / 3])


@pytest.mark.parametrize("target", [-100, -1, 3])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    with pytest.raises(ValueError, match=r"targets must be in 0…2"):
        token_losses(np.zeros((2, 3)), np.array([0, target]))
    assert token_losses(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)).shape == (0,)


REFERENCE = np.array([[4.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 3.0, 2.0], [5.0, 1.0, 0.0]], dtype=np.float32)


def test_errors_of_logits() -> None:
    logits = REFERENCE.copy()
    logits[2] = [0.0, 3.0, 3.5]  # another class, in this row only
    parity = measure_parity(logits, REFERENCE, "fp16", "CUDA")
    assert (parity.status, parity.n, parity.provider) == ("measured", 4, "CUDA")
    assert (parity.max_abs_error, parity.mean_abs_error) == (1.5, 1.5 / 12)
    assert parity.relative_error == pytest.approx(1.5 / REFERENCE.std())
    assert parity.top1_agreement == 0.75
    assert (parity.tolerance_kind, parity.tolerance) == ("relative", FP16_RELATIVE)


def test_errors_that_are_not_finite_are_out_of_tolerance() -> None:
    """INT8 is judged by the task score, but not if it overflows."""
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
        ("fp32", "absolute", FP32_ABSOLUTE, 0.5),
        ("fp32", "absolute", 100 * FP32_ABSOLUTE, 100.0),
        ("fp16", "relative", FP16_RELATIVE, 1.0),
    ],
)
def test_an_error_up_to_the_tolerance_passes(precision: Any, kind: str, tolerance: float, spread: float) -> None:
    for error, rejected in ((0.0, False), (tolerance, False), (np.nextafter(tolerance, 1), True)):
        reason = out_of_tolerance(as_parity(np.array([error]), spread, np.array([True]), precision, "CPU"))
        assert reason is None if not rejected else f"parity: {kind} error" in str(reason)
