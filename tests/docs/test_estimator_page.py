"""docs/estimator.md is what the script makes of the newest record, in either format."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.estimates import page
from benchmarks.estimates.record import kendall, median_tau, summary


def test_the_page_is_what_the_json_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: make results"


def row(model: str, log2: float, **changes: Any) -> dict[str, Any]:
    measured = {"small": 1.0, "middle": 2.0, "large": 8.0}[model]
    estimated = measured * 2**log2
    return {
        "model": model, "family": "f", "theirs": False, "artifact": "onnx-fp32", "precision": "fp32", "threads": 1,
        "phase": "steady", "batch": 1, "seq": 16, "measured_ms": measured, "raw_ms": measured * 1.3,
        "estimated_ms": estimated, "low_ms": estimated / 1.2, "high_ms": estimated * 1.2, "log2": log2,
        "first_ms": measured, "raw_first_ms": measured * 1.3, "again_ms": measured * 1.02, "raw_again_ms": measured,
        **changes,
    }  # fmt: skip


ROWS = [row("small", 0.05), row("middle", -0.1), row("large", 0.5, phase="decode")]


def test_errors_ranges_and_order_are_counted() -> None:
    found = summary(ROWS)
    assert (found["cases"], found["models"]) == (3, 3)
    assert found["within_15_percent"] == found["ranges_held"] == pytest.approx(2 / 3)
    assert found["median_error"] == pytest.approx(2**0.1 - 1) and found["worst_error"] == pytest.approx(2**0.5 - 1)
    assert found["widest"] == pytest.approx(1.44)
    assert found["repeatability"] == pytest.approx(0.02) and found["repeatability_raw"] == pytest.approx(0.3)
    assert found["wanted"] == {
        "within_15_percent": False, "median_error": False, "ranges_held": False, "widest": True, "tau": True
    }  # fmt: skip
    noisy = summary([{**one, "again_ms": one["measured_ms"] * 1.2} for one in ROWS])
    assert noisy["wanted"]["median_error"], "a machine that does not repeat itself cannot be estimated better"


def test_kendalls_tau_is_the_order_within_a_shape() -> None:
    assert kendall(ROWS) == 1.0 and kendall(ROWS[:1]) is None
    assert kendall([row("small", 0.0), row("middle", -2.0), row("large", 0.0)]) == pytest.approx(1 / 3)
    assert median_tau(ROWS) == 1.0, "the decoder is compared with nobody"
    assert median_tau(ROWS[:1]) is None


def test_a_record_of_left_out_models_has_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = summary(ROWS)
    record = {
        "format": "left-out-models", "measured": "2027-01-02T00", "host": {"cpu": "A 9", "cores": 2}, "summary": whole,
        "speeds": {"product_us": 450.0, "copy_us": 300.0, "two_speeds_us": [450.0, 600.0]},
        "families": {"encoders": whole}, "precisions": {"fp32": whole}, "cases": ROWS,
    }  # fmt: skip
    monkeypatch.setattr(page, "newest", lambda: (page.RESULTS / "here" / "2027-01-02-estimator.json", record))
    text = page.page()
    assert text.count("| small ") == text.count("| large ") == 1 and "1×16 token" in text
    assert "this machine has two speeds" in text and "67% of 3 cases within ±15 % (80 %): **missed**" in text
    assert "## Never checked" in text
