"""How wide a range is that left-out models make: as wide as the worst of them needs it."""

from __future__ import annotations

import pytest

from edgeformer.artifacts.device import FittedCase
from edgeformer.artifacts.documents import load_profile
from edgeformer.estimate.calibrate import error_of, spread


def test_the_worst_model_says_how_wide_a_range_is_however_few_cases_it_has() -> None:
    many = {f"m{number}": [0.1] * 100 for number in range(4)}
    assert spread(many) == pytest.approx(0.1)
    assert spread({**many, "other": [0.4, 0.5, 0.6]}) == pytest.approx(0.59), "three of 403 cases, but one of 5 models"
    assert spread({"one": [0.1] * 99 + [3.0]}) == pytest.approx(0.1), "one case of a hundred is beyond"


def test_an_error_is_of_so_many_models() -> None:
    cases = [
        FittedCase(run=run, artifact="a", batch=1, seq=1, measured_ms=1.0, estimated_ms=estimated)
        for run, estimated in (("x", 2.0), ("x", 2.0), ("y", 1.0), ("z", None))
    ]
    device = load_profile("host")
    from edgeformer.artifacts.device import Calibration

    known = Calibration(created="now", processor="p", threads=1, provider="p", efficiencies={})
    found = error_of(device.model_copy(update={"calibration": known}), cases)
    assert (found.models, found.cases, found.spread_log2) == (2, 3, 1.0)
