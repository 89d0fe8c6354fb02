from __future__ import annotations

import pytest

from edgeformer.artifacts.report import Check, Energy, Latency, Memory, Row
from edgeformer.benchmark.verdict import (
    Limits,
    check_budget,
    exempt_from_latency,
    judged_rows,
    shown,
    verdict_notes,
    without_figures,
)


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


def statuses(rows: list[Row], budget: Limits) -> dict[str, str]:
    return {check.name: check.status for check in check_budget(rows, budget).checks}


def absent(reason: str) -> list[Row]:
    return [without_figures(row(), reason)]


def artifact_rows(artifact: str, *rows: Row) -> list[Row]:
    return [row.model_copy(update={"artifact": artifact}) for row in rows]


def test_everything_inside_its_limit_passes() -> None:
    verdict = check_budget([row(16, 128, p50=99.0), row()], limits())
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
    verdict = check_budget([row()], limits(**change))
    assert verdict.status == "fail"
    assert [check.name for check in verdict.checks if check.status == "fail"] == [failed]


def test_an_absent_device_is_judged_by_size_only() -> None:
    rows = absent("not present on this host")
    assert statuses(rows, limits()) == {"size": "pass", "latency": "unknown", "memory": "unknown"}
    verdict = check_budget(rows, limits())
    assert verdict.status == "unknown"
    assert verdict.checks[1].reason == "not present on this host"
    assert check_budget(rows, limits(size_bytes=1)).status == "fail", "fail outweighs unknown"


def test_a_verdict_names_what_was_judged_and_what_was_not() -> None:
    full = check_budget([row()], limits())
    assert (full.judged, full.not_judged, full.is_partial) == (("size", "latency", "memory"), (), False)
    evidence = [row()]
    partial = check_budget(evidence, limits(size_bytes=None, latency_ms=None, profile="raspberry-pi-5"))
    assert (partial.status, partial.judged, partial.is_partial) == ("pass", ("memory",), True)
    why = "the profile raspberry-pi-5 sets no limit"
    assert [(kind.name, kind.reason) for kind in partial.not_judged] == [("size", why), ("latency", why)]
    (note,) = verdict_notes(partial, [], limits(), [])
    assert note == "no limit for size and latency; set one with --max-size and --max-latency"
    assert verdict_notes(full, [], limits(), []) == []


def test_unknown_checks_are_not_judged_and_have_a_reason() -> None:
    verdict = check_budget(absent("not present on this host"), limits(energy_mj=1.0))
    assert (verdict.status, verdict.judged, verdict.is_partial) == ("unknown", ("size",), False)
    assert [kind.name for kind in verdict.not_judged] == ["latency", "memory", "energy"]
    assert {kind.reason for kind in verdict.not_judged} == {"not present on this host"}
    assert verdict_notes(verdict, [], limits(), []) == []
    nothing = check_budget([], limits())
    assert {kind.reason for kind in nothing.not_judged} == {"no artifact can run on the device"}


def test_only_the_budgets_shape_and_phase_are_judged() -> None:
    elsewhere = [row(1, 64)]
    assert statuses(elsewhere, limits())["latency"] == "unknown"
    decode = [row()]
    assert statuses(decode, limits(phase="decode")) == {"size": "pass", "latency": "unknown", "memory": "pass"}


def test_unavailable_figures_are_unknown_with_their_reason() -> None:
    failed = row().model_copy(
        update={
            "latency_ms": Latency(status="unavailable", reason="it crashed"),
            "memory_bytes": Memory(status="unavailable", reason="it crashed"),
        }
    )
    verdict = check_budget([failed], limits())
    assert [(check.status, check.reason) for check in verdict.checks[1:]] == [("unknown", "it crashed")] * 2


def test_an_unstable_measurement_is_judged_but_says_so() -> None:
    verdict = check_budget([row(stable=False)], limits(shape_note="capped"))
    assert verdict.status == "pass"
    assert verdict.checks[1].reason == "p50 at 1×128: capped; the measurement is not stable"


def estimated(low_ms: float, high_ms: float, low: int = 100, high: int = 900) -> Row:
    return row().model_copy(
        update={
            "where": "device",
            "latency_ms": Latency(status="estimated", low=low_ms, high=high_ms, p50=(low_ms * high_ms) ** 0.5),
            "memory_bytes": Memory(status="estimated", low=low, high=high),
        }
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(4.0, 4.9, "pass"), (4.9, 5.1, "unknown"), (5.1, 4.9, "unknown"), (5.1, 9.0, "fail"), (4.0, 5.0, "pass")],
)
def test_a_limit_between_two_medians_is_unknown(first: float, second: float, expected: str) -> None:
    twice = row(p50=first).model_copy(update={"conditions": {"repeated_p50_ms": second}})
    check = check_budget([twice], limits()).checks[1]
    assert (check.status, check.value, check.basis) == (expected, first, "measured")
    assert (check.low, check.high) == (min(first, second), max(first, second))
    assert ("the limit lies within the range" in str(check.reason)) == (expected == "unknown")


@pytest.mark.parametrize(("stable", "expected"), [(True, "pass"), (False, "unknown")])
def test_an_unstable_sample_is_judged_by_its_quartiles(stable: bool, expected: str) -> None:
    """Half of its calls took 4 ms, the others 6 ms."""
    two_speeds = (*[4.0] * 21, *[6.0] * 20)
    single = row(stable=stable)
    latency = single.latency_ms.model_copy(update={"quantiles_ms": two_speeds})
    evidence = [single.model_copy(update={"latency_ms": latency})]
    assert statuses(evidence, limits())["latency"] == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 5.0, "pass"), (1.0, 5.001, "unknown"), (5.0, 9.0, "unknown"), (5.001, 9.0, "fail")],
)
def test_an_estimate_passes_or_fails_only_with_its_whole_range(low: float, high: float, expected: str) -> None:
    (check,) = (c for c in check_budget([estimated(low, high)], limits()).checks if c.unit == "ms")
    assert (check.status, check.basis, check.low, check.high) == (expected, "estimated", low, high)
    assert check.value == pytest.approx((low * high) ** 0.5)
    assert check.reason is not None and check.reason.startswith("estimated p50 at 1×128")
    assert ("lies within the range" in check.reason) == (expected == "unknown")


def test_an_estimate_of_memory_is_judged_by_its_range_too() -> None:
    by_limit = {
        limit: statuses([estimated(1, 2, 100, 900)], limits(memory_bytes=limit))["memory"]
        for limit in (99, 100, 899, 900)
    }
    assert by_limit == {99: "fail", 100: "unknown", 899: "unknown", 900: "pass"}
    without_range = estimated(1, 2).model_copy(update={"memory_bytes": Memory(status="estimated", peak=5)})
    assert statuses([without_range], limits())["memory"] == "unknown"


def test_measured_rows_win_over_estimates() -> None:
    verdict = check_budget([estimated(0.1, 0.2), row(p50=7.0)], limits(energy_mj=2.0))
    assert [(c.name, c.status, c.basis) for c in verdict.checks] == [
        ("size", "pass", "measured"),
        ("latency", "fail", "measured"),
        ("memory", "pass", "measured"),
        ("energy", "unknown", "unavailable"),
    ]
    assert verdict.checks[3].reason == "no counter"


@pytest.mark.parametrize(("limit", "expected"), [(3.0, "pass"), (2.9, "fail")])
def test_energy_is_judged_in_millijoules_per_call(limit: float, expected: str) -> None:
    charged = row().model_copy(update={"energy_mj": Energy(status="measured", value=3.0)})
    (check,) = (c for c in check_budget([charged], limits(energy_mj=limit)).checks[3:])
    assert (check.name, check.unit, check.status) == ("energy", "mJ", expected)


def test_the_thread_count_that_meets_most_limits_is_judged() -> None:
    rows = [
        row(p50=4.5, peak=900).model_copy(update={"threads": 1}),
        row(p50=3.0, peak=1100).model_copy(update={"threads": 2}),  # faster, but over the memory limit
        row(p50=9.0, peak=800).model_copy(update={"threads": 4}),
    ]
    verdict = check_budget(rows, limits())
    assert [(check.value, check.status) for check in verdict.checks[1:]] == [(4.5, "pass"), (900, "pass")]
    assert verdict.checks[1].reason == "p50 at 1×128, with 1 thread"
    assert check_budget(rows, limits(memory_bytes=2000)).checks[1].value == 3.0


def test_a_limit_per_token_is_for_the_graph_that_decodes() -> None:
    token = row(p50=4.0).model_copy(update={"phase": "decode"})
    full_graph = artifact_rows("full", row(p50=60.0))
    budget = limits(phase="decode", energy_mj=1.0)
    both = check_budget([*full_graph, *artifact_rows("decode", token)], budget, ["full"])
    assert [(c.artifact, c.name) for c in both.checks if c.name in ("latency", "energy")] == [
        ("decode", "latency"),
        ("decode", "energy"),
    ]
    assert exempt_from_latency([*full_graph, *artifact_rows("decode", token)], budget, ["full"]) == ("full",)
    assert {(c.artifact, c.name) for c in both.checks if c.name == "memory"} == {
        ("full", "memory"),
        ("decode", "memory"),
    }


def test_without_a_graph_that_decodes_a_token_costs_a_whole_pass() -> None:
    full_graph = artifact_rows("full", row(p50=60.0))
    check = next(c for c in check_budget(full_graph, limits(phase="decode"), ["full"]).checks if c.name == "latency")
    assert (check.value, check.status) == (60.0, "fail")
    assert check.reason is not None and "without caches" in check.reason
    assert exempt_from_latency(full_graph, limits(phase="decode"), ["full"]) == ()


def test_a_crashed_decode_graph_leaves_the_limit_unknown() -> None:
    full_graph = artifact_rows("full", row(p50=1.0))
    crashed = row().model_copy(update={"latency_ms": Latency(status="unavailable", reason="it crashed")})
    verdict = check_budget([*full_graph, *artifact_rows("decode", crashed)], limits(phase="decode"), ["full"])
    assert [(c.status, c.reason) for c in verdict.checks if c.name == "latency"] == [("unknown", "it crashed")]


def checks(rows: list[Row], **budget: object) -> dict[str, Check]:
    """Check by its name, of one artifact."""
    return {check.name: check for check in check_budget(rows, limits(**budget)).checks}


def test_a_check_states_its_shape() -> None:
    result = checks([row()])
    assert [check.reason for check in result.values()] == [None, "p50 at 1×128", "peak at 1×128"]
    result = checks([estimated(1.0, 2.0)])
    assert result["latency"].reason == "estimated p50 at 1×128"
    assert checks([estimated(8.0, 9.0)])["latency"].reason == "estimated p50 at 1×128"


def test_the_value_of_an_estimate_is_its_p50_or_geometric_middle() -> None:
    assert checks([estimated(1.0, 2.0, 100, 900)])["memory"].value == pytest.approx(300.0)
    with_p50 = estimated(1.0, 4.0).model_copy(
        update={"latency_ms": Latency(status="estimated", low=1.0, high=4.0, p50=3.0)}
    )
    assert checks([with_p50])["latency"].value == 3.0


@pytest.mark.parametrize("bounds", [{"low": 1.0}, {"high": 1.0}])
def test_an_estimate_with_half_a_range_decides_nothing(bounds: dict[str, float]) -> None:
    half = row().model_copy(update={"latency_ms": Latency(status="estimated", p50=1.0, **bounds)})
    assert checks([half])["latency"].status == "unknown"


def test_an_unknown_check_states_the_range() -> None:
    result = checks([estimated(1.0, 8.0, 100, 2**20)])
    assert result["latency"].reason.endswith("lies within the range 1.00 ms to 8.00 ms")
    assert result["memory"].reason.endswith("lies within the range 100 B to 1.0 MiB")
    assert (shown(2**20, "bytes"), shown(12.345, "ms"), shown(None, "mJ")) == ("1.0 MiB", "12.3 ms", "– mJ")


@pytest.mark.parametrize(
    ("threads", "explanation"), [((1,), ""), ((2,), ""), ((2, 1), ", with 2 threads"), ((1, 2), ", with 1 thread")]
)
def test_threads_are_named_if_several_counts_were_measured(threads: tuple[int, ...], explanation: str) -> None:
    rows = [row(p50=4.0 + place).model_copy(update={"threads": count}) for place, count in enumerate(threads)]
    assert checks(rows)["latency"].reason == f"p50 at 1×128{explanation}"


def test_a_provider_without_a_thread_count_names_none() -> None:
    card = row(p50=1.0).model_copy(update={"provider": "CUDAExecutionProvider"})
    reason = checks([card, row().model_copy(update={"threads": 2})])["latency"].reason
    assert reason == "p50 at 1×128, on CUDAExecutionProvider"


ROUNDS = "openvino-cpu-bf16"


def of(provider: str, *rows: Row, threads: int | None = None) -> list[Row]:
    return [first_rows.model_copy(update={"provider": provider, "threads": threads}) for first_rows in rows]


def test_a_provider_is_named_if_there_are_several() -> None:
    result = checks([row(), *of("openvino-cpu", row(p50=2.0))])
    assert [check.reason for check in result.values()] == [
        None, "p50 at 1×128, on openvino-cpu", "peak at 1×128, on openvino-cpu",
    ]  # fmt: skip


def test_a_rounding_provider_is_judged_only_alone() -> None:
    fast = of(ROUNDS, row(p50=1.0))
    result = checks([row(p50=6.0), *fast])["latency"]
    assert (result.status, result.value, result.reason) == ("fail", 6.0, "p50 at 1×128, on CPUExecutionProvider")
    crashed = row().model_copy(update={"latency_ms": Latency(status="unavailable", reason="it crashed")})
    assert checks([crashed, *fast])["latency"].status == "unknown"
    alone = checks(fast)["latency"]
    assert (alone.status, alone.reason) == ("pass", f"p50 at 1×128, on {ROUNDS}, which rounds to bf16")


def test_all_shapes_are_kept_by_one_provider_with_one_thread_count() -> None:
    """Each of the two keeps one limit; a deployment is one of them."""
    requested = tuple(limits(size_bytes=None, memory_bytes=None, batch=batch) for batch in (1, 8))
    budget = {"latency_ms": None, "by_command": requested}
    first_rows, two = (of("CPUExecutionProvider", row(1, p50=a), row(8, p50=b), threads=threads)
                for a, b, threads in ((4.0, 6.0, 1), (7.0, 4.5, 2)))  # fmt: skip
    result = [c for c in check_budget([*first_rows, *two], limits(**budget)).checks
             if c.name == "latency"]  # fmt: skip
    assert [(check.batch, check.value, check.status) for check in result] == [(1, 7.0, "fail"), (8, 4.5, "pass")]
    assert {str(check.reason).partition(", ")[2] for check in result} == {"with 2 threads"}, "the faster at the largest"
    three = of("CPUExecutionProvider", row(1, p50=4.9), row(8, p50=4.9), threads=3)
    verdict = check_budget([*first_rows, *two, *three], limits(**budget))
    assert verdict.status == "pass"


def test_the_provider_with_fewest_unknowns_then_the_fastest_is_judged() -> None:
    unknown = Memory(status="unavailable", reason="no figure")
    faster = row(p50=1.0).model_copy(update={"memory_bytes": unknown, "threads": 1})
    assert checks([faster, row(p50=4.0).model_copy(update={"threads": 2})])["latency"].value == 4.0
    crashed = {"latency_ms": Latency(status="measured", n=1), "threads": 2}
    timeless = [row().model_copy(update={**crashed, "threads": threads}) for threads in (3, 4)]
    assert checks([*timeless, faster])["latency"].value == 1.0


@pytest.mark.parametrize("turned", [False, True])
def test_tokens_are_judged_by_decode_rows_in_any_order(turned: bool) -> None:
    token, full_graph = row(p50=4.0).model_copy(update={"phase": "decode"}), row(p50=60.0)
    rows = [token, full_graph] if turned else [full_graph, token]
    budget = limits(phase="decode")
    assert judged_rows(rows, budget, is_whole_text=False) == [token]
    assert judged_rows(rows, budget, is_whole_text=True) == [full_graph]
    assert judged_rows([], budget, is_whole_text=False) == []
