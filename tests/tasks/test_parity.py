"""How close is close enough: the bars are fixed, and each precision has its own."""

from __future__ import annotations

import numpy as np

from edgeformer.tasks.parity import measure_parity, out_of_tolerance


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
