"""The pages on estimates are written from the newest record."""

from typing import Any

import pytest

from benchmarks.estimates import page
from benchmarks.estimates.record import enough, summary
from edgeformer.estimate import estimate


def test_page_and_shipped_record_are_what_the_json_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: make results"
    assert page.EXPLANATION.read_text(encoding="utf-8") == page.explanation(), "run: make results"
    assert estimate.shipped_record() == page.shipped_record(), "run: make results"
    record = estimate.shipped_record()
    assert f"{record.within_15_percent:.0%} of {record.cases} estimated times are within 15%" in page.page()
    assert f"median error is {record.median_error:.1%}" in page.page()
    assert f"cases within ±15%: {record.within_15_percent:.0%} of {record.cases} |" in page.explanation()


def row(model: str, log2: float, **changes: Any) -> dict[str, Any]:
    measured = {"small": 1.0, "middle": 2.0, "large": 8.0}[model]
    estimated = measured * 2**log2
    return {
        "model": model, "family": "f", "theirs": False, "artifact": "onnx-fp32", "precision": "fp32", "threads": 1,
        "phase": "steady", "batch": 1, "seq": 16, "measured_ms": measured, "process_ms": [measured, measured * 1.02],
        "estimated_ms": estimated, "low_ms": estimated / 1.2, "high_ms": estimated * 1.2, "log2": log2,
        "doubts": [], "reason": "calibrated",
        **changes,
    }  # fmt: skip


ROWS = [row("small", 0.05), row("middle", -0.1), row("large", 0.5, phase="decode")]


def test_errors_ranges_and_order_are_counted() -> None:
    figures = summary(ROWS)
    assert (figures["cases"], figures["models"]) == (3, 3)
    assert figures["within_15_percent"] == figures["ranges_held"] == pytest.approx(2 / 3)
    assert figures["median_error"] == pytest.approx(2**0.1 - 1) and figures["worst_error"] == pytest.approx(2**0.5 - 1)
    assert figures["widest"] == pytest.approx(1.44)
    assert figures["repeatability"] == pytest.approx(0.02)
    assert figures["wanted"] == {
        "within_15_percent": False, "median_error": False, "ranges_held": False, "widest": True, "tau": True
    }  # fmt: skip


def test_a_record_of_left_out_models_has_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = summary(ROWS)
    figures["enough"] = enough(ROWS, 0.0)
    figures["wanted"]["enough"] = all(figures["enough"].values())
    unestimated = {**ROWS[0], "model": "lost", "log2": None, "reason": "no estimate, because up to 80% of the time"}
    record: dict[str, Any] = {
        "format": "left-out-models", "measured": "2027-01-02T00", "host": {"cpu": "A 9", "cores": 2},
        "summary": figures, "families": {"encoders": figures}, "precisions": {"fp32": figures},
        "without_kind": summary(ROWS[:2]), "doubted": None, "cases": [*ROWS, unestimated],
        "missing": [{"model": "x", "artifact": "a", "threads": "1", "shape": "8×64", "why": "beyond the 60 s"}],
    }  # fmt: skip
    monkeypatch.setattr(page, "newest", lambda: (page.RESULTS / "here" / "2027-01-02-estimator.json", record))
    text, explanation = page.page(), page.explanation()
    assert text.count("| small ") == 2 and text.count("| large ") == 2 and "1×16 token" in text
    assert "| cases within ±15%: 67% of 3 | 80% | **missed** |" in explanation
    assert "| enough cases, idle machine: not 60 cases, 5 models" in explanation
    assert "without models of the same family" in explanation and "No case has unchecked operators" in explanation
    assert "beyond the 60 s" in text and "no estimate, because up to 80% of the time" in text, (
        "what was left out is listed"
    )
    assert "## Not checked" in explanation
    record["doubted"] = {**summary(ROWS), "cases": 44}
    assert "44 further cases have unchecked operators" in page.explanation()
    assert "they miss 3 of 5 targets" in page.explanation()
