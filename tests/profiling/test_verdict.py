from __future__ import annotations

import pytest

from edgeformer.schema.report import Energy, Latency, Memory, Row
from edgeformer.stages.profiling.verdict import Judged, Limits, judge


def row(batch: int = 1, seq: int = 128, p50: float = 4.0, peak: int = 1000, stable: bool = True) -> Row:
    return Row(
        artifact="model",
        precision="fp32",
        provider="CPUExecutionProvider",
        where="host",
        phase="steady",
        batch=batch,
        seq=seq,
        latency_ms=Latency(status="measured", p50=p50, n=100, stable=stable),
        memory_bytes=Memory(status="measured", peak=peak),
        size_bytes=500,
        energy_mj=Energy(status="unavailable", reason="no counter"),
    )


def limits(**changes: object) -> Limits:
    values: dict[str, object] = {
        "size_bytes": 500,
        "latency_ms": 5.0,
        "memory_bytes": 1000,
        "batch": 1,
        "seq": 128,
    }
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def statuses(judged: Judged, wanted: Limits) -> dict[str, str]:
    return {check.name: check.status for check in judge([judged], wanted).checks}


def test_everything_inside_its_limit_passes() -> None:
    verdict = judge([Judged("model", 500, [row(16, 128, p50=99.0), row()], "")], limits())
    assert verdict.status == "pass"
    assert [(check.name, check.limit, check.value, check.unit) for check in verdict.checks] == [
        ("size", 500, 500, "bytes"),
        ("latency", 5.0, 4.0, "ms"),
        ("memory", 1000, 1000, "bytes"),
    ]
    assert verdict.checks[1].reason == "p50 at 1×128"


@pytest.mark.parametrize(
    ("change", "failed"),
    [({"size_bytes": 499}, "size"), ({"latency_ms": 3.9}, "latency"), ({"memory_bytes": 999}, "memory")],
)
def test_one_limit_exceeded_fails_the_verdict_and_only_its_check(change: dict[str, object], failed: str) -> None:
    verdict = judge([Judged("model", 500, [row()], "")], limits(**change))
    assert verdict.status == "fail"
    assert [check.name for check in verdict.checks if check.status == "fail"] == [failed]


def test_an_absent_device_leaves_latency_and_memory_unknown_and_still_judges_size() -> None:
    absent = Judged("model", 500, [], "not present on this host")
    assert statuses(absent, limits()) == {"size": "pass", "latency": "unknown", "memory": "unknown"}
    verdict = judge([absent], limits())
    assert verdict.status == "unknown"
    assert verdict.checks[1].reason == "not present on this host"
    assert judge([absent], limits(size_bytes=1)).status == "fail", "fail outweighs unknown"


def test_an_absent_limit_is_not_checked_and_nothing_checked_is_unknown() -> None:
    bare = limits(size_bytes=None, latency_ms=None, memory_bytes=None)
    verdict = judge([Judged("model", 500, [row()], "")], bare)
    assert (verdict.status, verdict.checks) == ("unknown", ())


def test_only_the_budgets_shape_and_phase_are_judged() -> None:
    elsewhere = Judged("model", 500, [row(1, 64)], "1×128 was not measured")
    assert statuses(elsewhere, limits())["latency"] == "unknown"
    decode = Judged("model", 500, [row()], "decoding is not measured yet")
    assert statuses(decode, limits(phase="decode")) == {"size": "pass", "latency": "unknown", "memory": "pass"}


def test_what_could_not_be_measured_is_unknown_with_its_reason() -> None:
    failed = row().model_copy(
        update={
            "latency_ms": Latency(status="unavailable", reason="it crashed"),
            "memory_bytes": Memory(status="unavailable", reason="it crashed"),
        }
    )
    verdict = judge([Judged("model", 500, [failed], "")], limits())
    assert [(check.status, check.reason) for check in verdict.checks[1:]] == [("unknown", "it crashed")] * 2


def test_an_unstable_measurement_is_judged_but_says_so() -> None:
    verdict = judge([Judged("model", 500, [row(stable=False)], "")], limits(shape_note="capped"))
    assert verdict.status == "pass"
    assert verdict.checks[1].reason == "p50 at 1×128: capped; the measurement is not stable"
