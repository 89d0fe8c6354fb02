"""A row is stable only where a second process finds the same median."""

from __future__ import annotations

from typing import Literal

import pytest

from edgeformer.formats.report import Energy, Latency, Memory, Row
from edgeformer.stages.profiling.measure import MeasureRules
from edgeformer.stages.profiling.repeating import confirmed, item_of, stable_items
from edgeformer.stages.profiling.statistics import summarise


def row(p50: float | None, stable: bool | None = True, phase: Literal["cold", "steady", "decode"] = "steady") -> Row:
    unknown = Latency(status="unavailable", reason="the process ended early")
    return Row(
        artifact="model",
        precision="fp32",
        provider="CPUExecutionProvider",
        where="host",
        phase=phase,
        batch=2,
        seq=8,
        latency_ms=unknown if p50 is None else summarise([p50] * 130, stable, ["noted"]),
        memory_bytes=Memory(status="unavailable"),
        size_bytes=1,
        energy_mj=Energy(status="unavailable"),
        conditions={"threads": 1},
    )


def test_only_stable_rows_are_worth_measuring_again() -> None:
    rows = [row(5.0, None, "cold"), row(5.0), row(5.0, False, "decode"), row(None)]
    assert stable_items(rows) == (("steady", 2, 8),)
    assert item_of(rows[0]) is None and item_of(rows[2]) == ("decode", 2, 8)


@pytest.mark.parametrize(
    ("second", "stable"), [(10.0, True), (10.49, True), (9.53, True), (10.51, False), (9.5, False)]
)
def test_a_median_within_the_tolerance_confirms(second: float, stable: bool) -> None:
    first = row(10.0)
    found = confirmed(first, row(second), MeasureRules().repeat_tolerance)
    assert found.latency_ms.stable is stable
    assert found.conditions == {"threads": 1, "repeated_p50_ms": second}
    assert (found.latency_ms.p50, found.latency_ms.n, found.memory_bytes) == (10.0, 130, first.memory_bytes)
    if not stable:
        assert found.latency_ms.warnings == (
            "noted",
            f"not confirmed: this process has a median of 10 ms, a second one found {second:.3g} ms",
            "the second process: noted",
        )


def test_a_second_process_without_an_answer_confirms_nothing() -> None:
    found = confirmed(row(10.0), row(None), 0.05)
    assert found.latency_ms.stable is False and found.latency_ms.p50 == 10.0
    assert "found nothing: the process ended early" in found.latency_ms.warnings[-1]


def test_the_second_process_takes_a_third_and_reads_no_energy() -> None:
    rules = MeasureRules().repeated()
    assert (rules.min_s, rules.min_calls, rules.max_s, rules.warmup_max_s) == (1.0, 34, 20.0, 10.0)
    assert rules.idle_s == rules.energy_s == 0.0
    assert (rules.warmup_min_s, rules.windows) == (MeasureRules().warmup_min_s, MeasureRules().windows)
