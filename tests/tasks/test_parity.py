"""Parity of logits with torch FP32: errors, and the fixed tolerance of each precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeformer.tasks.metric import FP16_RELATIVE, FP32_ABSOLUTE, as_parity, measure_parity, out_of_tolerance

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


def test_int8_is_judged_by_task_score() -> None:
    parity = measure_parity(REFERENCE * 2, REFERENCE, "int8", "CPU")
    assert (parity.tolerance_kind, parity.tolerance, out_of_tolerance(parity)) == ("score", None, None)


def test_overflow_is_out_of_tolerance() -> None:
    logits = REFERENCE.copy()
    logits[0, 0] = np.inf
    parity = measure_parity(logits, REFERENCE, "int8", "CPU")
    assert out_of_tolerance(parity) == "its logits are not finite on real inputs (overflow)"


def test_errors_are_averaged_in_double_precision() -> None:
    error = np.concatenate([[2.0**24], np.ones(3)]).astype(np.float32)
    assert as_parity(error, 1.0, np.ones(4, dtype=bool), "fp32", "CPU").mean_abs_error == (2**24 + 3) / 4


def test_errors_that_are_not_finite_are_none() -> None:
    parity = as_parity(np.array([0.0, np.nan]), 1.0, np.array([True, False]), "fp16", "CPU")
    assert (parity.max_abs_error, parity.mean_abs_error, parity.relative_error) == (None, None, None)
    assert (parity.n, parity.top1_agreement) == (2, 0.5)


def test_a_constant_reference_has_no_relative_error() -> None:
    parity = as_parity(np.array([0.5]), 0.0, np.array([True]), "fp16", "CPU")
    assert (parity.max_abs_error, parity.relative_error) == (0.5, None)
    assert out_of_tolerance(parity) == "the reference logits do not vary, so a relative error is undefined"


@pytest.mark.parametrize(
    ("precision", "kind", "tolerance", "spread"),
    [("fp32", "absolute", FP32_ABSOLUTE, 100.0), ("fp16", "relative", FP16_RELATIVE, 1.0)],
)
def test_an_error_up_to_the_tolerance_passes(precision: Any, kind: str, tolerance: float, spread: float) -> None:
    for error, rejected in ((0.0, False), (tolerance, False), (np.nextafter(tolerance, 1), True)):
        reason = out_of_tolerance(as_parity(np.array([error]), spread, np.array([True]), precision, "CPU"))
        assert reason is None if not rejected else f"parity: {kind} error" in str(reason)
