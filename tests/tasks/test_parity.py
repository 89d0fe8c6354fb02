"""How close is close enough: the bars are fixed, and each precision has its own."""

from __future__ import annotations

import numpy as np
import pytest

from edgeformer.tasks.parity import FP16_RELATIVE, FP32_ABSOLUTE, as_parity, measure_parity, out_of_tolerance


class TestParity:
    reference = np.array([[1.0, -1.0], [-2.0, 2.0]], dtype=np.float32)

    def test_exact(self) -> None:
        parity = measure_parity(self.reference, self.reference, "fp32", "CPU")
        assert parity.max_abs_error == 0.0
        assert out_of_tolerance(parity) is None

    def test_fp32_bar_is_absolute(self) -> None:
        off = self.reference + np.float32(2e-4)
        reason = out_of_tolerance(measure_parity(off, self.reference, "fp32", "CPU"))
        assert reason is not None and "absolute error" in reason

    def test_fp16_bar_is_relative_to_the_logits_spread(self) -> None:
        for error, rejected in ((0.01, False), (0.02, True)):  # the spread is 1.58
            off = self.reference + np.float32(error)
            reason = out_of_tolerance(measure_parity(off, self.reference, "fp16", "CPU"))
            assert (reason is not None) is rejected

    def test_int8_is_judged_by_task_score(self) -> None:
        parity = measure_parity(self.reference * 2, self.reference, "int8", "CPU")
        assert (parity.tolerance_kind, parity.tolerance) == ("score", None)
        assert out_of_tolerance(parity) is None

    def test_overflow(self) -> None:
        off = self.reference.copy()
        off[0, 0] = np.inf
        with np.errstate(invalid="ignore"):
            reason = out_of_tolerance(measure_parity(off, self.reference, "fp16", "CPU"))
        assert reason is not None and "not finite" in reason

    def test_what_is_noted_of_logits_that_differ(self) -> None:
        reference = np.array([[4.0, 1.0, 0.0], [0.0, 2.0, 1.0], [0.0, 3.0, 2.0], [5.0, 1.0, 0.0]], dtype=np.float32)
        logits = reference.copy()
        logits[2] = [0.0, 3.0, 3.5]  # another class; and only this row
        parity = measure_parity(logits, reference, "fp16", "CUDA")
        assert (parity.status, parity.n, parity.provider) == ("measured", 4, "CUDA")
        assert (parity.max_abs_error, parity.mean_abs_error) == (1.5, 1.5 / 12)
        assert parity.relative_error == pytest.approx(1.5 / reference.std())
        assert parity.top1_agreement == 0.75
        assert (parity.tolerance_kind, parity.tolerance) == ("relative", FP16_RELATIVE)

    def test_errors_are_averaged_in_double_precision(self) -> None:
        error = np.concatenate([[2.0**24], np.ones(3)]).astype(np.float32)
        parity = as_parity(error, 1.0, np.ones(4, dtype=bool), "fp32", "CPU")
        assert parity.mean_abs_error == (2**24 + 3) / 4

    def test_no_error_is_told_of_what_is_not_finite(self) -> None:
        parity = as_parity(np.array([0.0, np.nan]), 1.0, np.array([True, False]), "fp16", "CPU")
        assert (parity.max_abs_error, parity.mean_abs_error, parity.relative_error) == (None, None, None)
        assert (parity.n, parity.top1_agreement) == (2, 0.5)

    def test_a_reference_that_does_not_vary_has_no_relative_error(self) -> None:
        parity = as_parity(np.array([0.5]), 0.0, np.array([True]), "fp16", "CPU")
        assert (parity.max_abs_error, parity.relative_error) == (0.5, None)
        assert out_of_tolerance(parity) == "the reference logits do not vary, so a relative error is undefined"

    @pytest.mark.parametrize(
        ("precision", "bar", "spread"), [("fp32", FP32_ABSOLUTE, 100.0), ("fp16", FP16_RELATIVE, 1.0)]
    )
    def test_the_bar_itself_is_within(self, precision: str, bar: float, spread: float) -> None:
        for error, rejected in ((bar, False), (np.nextafter(bar, 1), True)):
            parity = as_parity(np.array([error]), spread, np.array([True]), precision, "CPU")  # type: ignore[arg-type]
            assert (out_of_tolerance(parity) is not None) is rejected
