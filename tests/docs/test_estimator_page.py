"""docs/estimator.md is what the script makes of the newest record."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.estimates import page
from benchmarks.estimates.record import enough, order_of, summary
from edgeformer.estimate import estimate


def test_the_page_is_what_the_json_says() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: make results"


def test_the_record_that_ships_is_that_of_the_page() -> None:
    """Its figures are read from the measurements, so that no report states others than the page."""
    assert estimate.shipped_record() == page.shipped_record(), "run: make results"
    record = estimate.shipped_record()
    assert f"{record.within_15_percent:.0%} of {record.cases} cases within" in page.page()
    assert f"median error {record.median_error:.1%}" in page.page()


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


def test_a_case_without_an_estimate_is_a_case_that_was_missed() -> None:
    absent = {"log2": None, "estimated_ms": None, "low_ms": None, "high_ms": None, "reason": "no estimate: Conv"}
    figures = summary([ROWS[0], {**ROWS[1], **absent}])
    assert (figures["cases"], figures["unavailable"]) == (2, 1)
    assert (figures["within_15_percent"], figures["ranges_held"]) == (0.5, 0.5)
    assert figures["held_by_model"] == {"small": 1.0, "middle": 0.0}
    assert figures["worst_error"] is None and figures["median_error"] is None and not figures["wanted"]["median_error"]
    nothing = summary([{**ROWS[1], **absent}])
    assert not any(nothing["wanted"].values()), "nothing that is not known is met"


def case(measured_ms: float, estimated_ms: float, **changes: Any) -> dict[str, Any]:
    return row("small", 0.0, measured_ms=measured_ms, estimated_ms=estimated_ms, **changes)


def test_kendalls_tau_is_the_order_of_all_pairs_at_one_shape() -> None:
    assert order_of(ROWS) == 1.0, "the decoder is compared with nobody"
    assert order_of(ROWS[:1]) is None
    right, wrong = [case(1, 1), case(8, 8)], [case(1, 8), case(1.5, 4), case(9, 9)]
    assert order_of(wrong) == pytest.approx(1 / 3)
    assert order_of([*right, *({**case, "seq": 64} for case in wrong)]) == pytest.approx(2 / 4), (
        "pairs count, not shapes"
    )
    assert order_of([case(1, 2), case(2, 2)]) == 0.0, "a tie is no order"
    assert order_of(wrong, within=2.0) == -1.0 and order_of(right, within=2.0) is None


@pytest.mark.parametrize(
    ("rows", "lacks"),
    [
        (lambda row: True, None),
        (lambda row: (row["threads"] == 1) == (row["precision"] == "fp32"), "60 cases"),
        (lambda row: row["threads"] == 1 and row["model"] != "m0", "1 and 2 threads"),
        (lambda row: row["precision"] == "fp32" and row["model"] != "m0", "FP32 and INT8"),
        (lambda row: row["model"] not in ("m0", "m1"), "3 of them not ours"),
        (lambda row: row["model"] in ("m0", "m1", "m2", "m5"), "5 models"),
        (lambda row: row["seq"] != 16, "4 shapes"),
    ],
)
def test_few_cases_are_not_enough_whatever_they_say(rows: Any, lacks: str | None) -> None:
    every = [
        {"model": f"m{model}", "theirs": model < 4, "phase": "steady", "batch": 1, "seq": seq, "threads": threads,
         "precision": precision}
        for model in range(6) for seq in (8, 16, 24, 64) for threads in (1, 2) for precision in ("fp32", "int8")
    ]  # fmt: skip
    figures = enough([case for case in every if rows(case)], 0.0)
    assert all(figures.values()) is (lacks is None) and (lacks is None or not figures[lacks])
    assert enough(every, 0.2)["at most 10% of the processes disturbed"] is False


def test_a_record_of_left_out_models_has_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = summary(ROWS)
    figures["enough"] = enough(ROWS, 0.0)
    figures["wanted"]["enough"] = all(figures["enough"].values())
    unestimated = {**ROWS[0], "model": "lost", "log2": None, "reason": "no estimate: 80% of the time"}
    record: dict[str, Any] = {
        "format": "left-out-models", "measured": "2027-01-02T00", "host": {"cpu": "A 9", "cores": 2},
        "summary": figures, "families": {"encoders": figures}, "precisions": {"fp32": figures},
        "without_kind": summary(ROWS[:2]), "doubted": None, "cases": [*ROWS, unestimated],
        "missing": [{"model": "x", "artifact": "a", "threads": "1", "shape": "8×64", "why": "beyond the 60 s"}],
    }  # fmt: skip
    monkeypatch.setattr(page, "newest", lambda: (page.RESULTS / "here" / "2027-01-02-estimator.json", record))
    text = page.page()
    assert text.count("| small ") == 2 and text.count("| large ") == 2 and "1×16 token" in text
    assert "67% of 3 cases within ±15 % (80 %): **missed**" in text
    assert "enough cases and a quiet machine: not 60 cases, 5 models" in text
    assert "without any model of their kind" in text and "No case has operators" in text
    assert "beyond the 60 s" in text and "no estimate: 80% of the time" in text, "what was left out is listed"
    assert "## Never checked" in text
    record["doubted"] = {**summary(ROWS), "cases": 44}
    assert "44 cases have operators of which estimates were never checked; targets: **missed**" in page.page()
