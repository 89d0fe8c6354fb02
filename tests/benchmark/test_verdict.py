"""Verdicts: limits against measured values, ranges and missing values, of all settings and shapes of an artifact."""

from dataclasses import replace
from typing import Any

import pytest

from edgeformer.artifacts.report import QUANTILES, Check, Conditions, Energy, Latency, Memory, Row
from edgeformer.benchmark.limits import Limit, Requirements, figures_of
from edgeformer.benchmark.verdict import check_budget, exempt_from_latency, judged_rows
from edgeformer.measurement.artifact import absent_figures
from edgeformer.report.sentences import shown, verdict_notes
from tests.benchmark import choice_cases

CPU, ROUNDS = "CPUExecutionProvider", "openvino-cpu-bf16"
CRASHED = {
    "latency_ms": Latency(status="unavailable", reason="it crashed"),
    "memory_bytes": Memory(status="unavailable", reason="it crashed"),
}


def row(p50: float = 4.0, *, stable: bool = True, name: str = "model", **changes: Any) -> Row:
    latency = Latency(status="measured", p50=p50, n=100, stable=stable)
    return choice_cases.row(name, **{"threads": None, "latency_ms": latency, **changes})


def estimated(low_ms: float, high_ms: float, low: int = 100, high: int = 900) -> Row:
    latency = Latency(status="estimated", low=low_ms, high=high_ms, p50=(low_ms * high_ms) ** 0.5)
    return row(where="device", latency_ms=latency, memory_bytes=Memory(status="estimated", low=low, high=high))


def limits(*at_command: Limit, **changes: Any) -> Requirements:
    """Limits of 500 B, 5 ms and 1000 B at the budget's shape, None: no such limit; and ``at_command``."""
    facts = {name: changes.pop(name) for name in ("phase", "shape_note", "profile") if name in changes}
    values = {"size": 500, "latency": 5.0, "memory": 1000, **changes}
    budget = choice_cases.requirements(**{name: value for name, value in values.items() if value is not None})
    return replace(budget, limits=(*budget.limits, *at_command), **facts)


def checks(*rows: Row, **budget: Any) -> dict[str, Check]:
    return {check.name: check for check in check_budget(rows, limits(**budget)).checks}


def statuses(*rows: Row, **budget: Any) -> dict[str, str]:
    return {name: check.status for name, check in checks(*rows, **budget).items()}


def test_everything_inside_its_limit_passes_and_one_exceeded_fails_only_its_check() -> None:
    verdict = check_budget([row(99.0, batch=16), row()], limits())
    assert verdict.status == "pass"
    assert [(check.name, check.limit, check.value, check.unit, check.reason) for check in verdict.checks] == [
        ("size", 500, 500, "bytes", None),
        ("latency", 5.0, 4.0, "ms", "p50 at 1×128"),
        ("memory", 1000, 1000, "bytes", "peak at 1×128"),
    ]
    for name, limit in {"size": 499, "latency": 3.9, "memory": 999}.items():
        verdict = check_budget([row()], limits(**{name: limit}))
        assert verdict.status == "fail"
        assert [check.name for check in verdict.checks if check.status == "fail"] == [name]


def test_an_absent_device_is_judged_by_size_only() -> None:
    absent = row(**absent_figures("not present on this host"))
    assert statuses(absent) == {"size": "pass", "latency": "unknown", "memory": "unknown"}
    verdict = check_budget([absent], limits(energy=1.0))
    assert (verdict.status, verdict.judged, verdict.is_partial) == ("unknown", ("size",), False)
    assert [kind.name for kind in verdict.not_judged] == ["latency", "memory", "energy"]
    reasons = [{kind.reason for kind in kinds} for kinds in (verdict.not_judged, verdict.checks[1:])]
    assert reasons == [{"not present on this host"}] * 2
    assert verdict_notes(verdict, ()) == []
    assert check_budget([absent], limits(size=1)).status == "fail", "fail outweighs unknown"
    nothing = check_budget([], limits())
    assert {kind.reason for kind in nothing.not_judged} == {"no artifact can run on the device"}


def test_a_verdict_names_what_was_judged_and_what_was_not() -> None:
    full = check_budget([row()], limits())
    assert (full.judged, full.not_judged, full.is_partial) == (("size", "latency", "memory"), (), False)
    partial = check_budget([row()], limits(size=None, latency=None, profile="raspberry-pi-5"))
    assert (partial.status, partial.judged, partial.is_partial) == ("pass", ("memory",), True)
    why = "the profile raspberry-pi-5 sets no limit"
    assert [(kind.name, kind.reason) for kind in partial.not_judged] == [("size", why), ("latency", why)]
    (note,) = verdict_notes(partial, ())
    assert note == "not judged: size and latency; set a limit with --max-size and --max-latency"
    assert verdict_notes(full, ()) == []


@pytest.mark.parametrize(
    ("changes", "budget", "expected"),
    [
        ({"seq": 64}, {}, {"latency": "unknown", "memory": "unknown"}),
        ({}, {"phase": "decode"}, {"latency": "unknown", "memory": "pass"}),
        (CRASHED, {}, {"latency": "unknown", "memory": "unknown"}),
        ({"energy_mj": Energy(status="measured", value=3.0)}, {"energy": 3.0}, {"energy": "pass"}),
        ({"energy_mj": Energy(status="measured", value=3.0)}, {"energy": 2.9}, {"energy": "fail"}),
        ({}, {"energy": 2.0}, {"energy": "unknown"}),
        # An estimate with half a range, or none, decides nothing.
        ({"latency_ms": Latency(status="estimated", p50=1.0, low=1.0)}, {}, {"latency": "unknown"}),
        ({"latency_ms": Latency(status="estimated", p50=1.0, high=1.0)}, {}, {"latency": "unknown"}),
        ({"memory_bytes": Memory(status="estimated", peak=5)}, {}, {"memory": "unknown"}),
    ],
)
def test_only_known_values_of_the_judged_call_decide(changes, budget, expected):
    assert expected.items() <= statuses(row(**changes), **budget).items()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(4.0, 4.9, "pass"), (4.9, 5.1, "unknown"), (5.1, 4.9, "unknown"), (5.1, 9.0, "fail"), (4.0, 5.0, "pass")],
)
def test_a_limit_between_two_medians_is_unknown(first: float, second: float, expected: str) -> None:
    check = checks(row(first, conditions=Conditions(repeated_p50_ms=second)))["latency"]
    assert (check.status, check.value, check.basis) == (expected, first, "measured")
    assert (check.low, check.high) == (min(first, second), max(first, second))
    assert ("the limit lies within the range" in str(check.reason)) == (expected == "unknown")


@pytest.mark.parametrize(("stable", "expected"), [(True, "pass"), (False, "unknown")])
def test_an_unstable_sample_is_judged_by_its_quartiles(stable: bool, expected: str) -> None:
    """Half of its calls took 4 ms, the others 6 ms."""
    single = row(stable=stable)
    latency = single.latency_ms.model_copy(update={"quantiles_ms": (*[4.0] * 21, *[6.0] * 20)})
    assert statuses(single.model_copy(update={"latency_ms": latency}))["latency"] == expected
    reason = checks(single, shape_note="capped")["latency"].reason
    assert reason == "p50 at 1×128: capped" + ("" if stable else "; the measurement is unstable")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1.0, 5.0, "pass"), (1.0, 5.001, "unknown"), (5.0, 9.0, "unknown"), (5.001, 9.0, "fail")],
)
def test_an_estimate_passes_or_fails_only_with_its_whole_range(low: float, high: float, expected: str) -> None:
    check = checks(estimated(low, high))["latency"]
    assert (check.status, check.basis, check.low, check.high) == (expected, "estimated", low, high)
    assert check.value == pytest.approx((low * high) ** 0.5)
    assert check.reason is not None and check.reason.startswith("estimated p50 at 1×128")
    assert ("lies within the range" in check.reason) == (expected == "unknown")


def test_an_estimate_of_memory_is_judged_by_its_range_too_and_measured_rows_win() -> None:
    by_limit = {limit: statuses(estimated(1, 2), memory=limit)["memory"] for limit in (99, 100, 899, 900)}
    assert by_limit == {99: "fail", 100: "unknown", 899: "unknown", 900: "pass"}
    assert checks(estimated(1.0, 2.0))["memory"].value == pytest.approx(300.0), "the geometric middle"
    result = checks(estimated(1.0, 8.0, 100, 2**20))
    assert str(result["latency"].reason).endswith("lies within the range 1.00 ms to 8.00 ms")
    assert str(result["memory"].reason).endswith("lies within the range 100 B to 1.0 MiB")
    assert (shown(2**20, "bytes"), shown(12.345, "ms"), shown(None, "mJ")) == ("1.0 MiB", "12.3 ms", "– mJ")
    result = checks(estimated(0.1, 0.2), row(7.0))
    assert {check.basis for check in result.values()} == {"measured"}
    assert [check.status for check in result.values()] == ["pass", "fail", "pass"]


def test_a_limit_per_token_is_for_the_graph_that_decodes_or_costs_a_whole_pass() -> None:
    rows, budget = [row(60.0, name="full"), row(name="decode", phase="decode")], limits(phase="decode", energy=1.0)
    names = [f"{check.artifact} {check.name}" for check in check_budget(rows, budget, ["full"]).checks]
    kinds = ("size", "latency", "memory", "energy")
    assert names == ["full size", "full memory", *(f"decode {kind}" for kind in kinds)]
    assert exempt_from_latency(rows, budget, ["full"]) == ("full",)
    crashed = [rows[0], row(name="decode", **CRASHED)]
    verdict = check_budget(crashed, limits(phase="decode"), ["full"])
    assert [(c.status, c.reason) for c in verdict.checks if c.name == "latency"] == [("unknown", "it crashed")]
    full_graph = [row(60.0, name="full")]
    check = next(c for c in check_budget(full_graph, limits(phase="decode"), ["full"]).checks if c.name == "latency")
    assert (check.value, check.status) == (60.0, "fail") and "without caches" in str(check.reason)
    assert exempt_from_latency(full_graph, limits(phase="decode"), ["full"]) == ()


@pytest.mark.parametrize("reverse", [False, True])
def test_tokens_are_judged_by_decode_rows_in_any_order(reverse: bool) -> None:
    token, full_graph = row(phase="decode"), row(60.0)
    rows, budget = ([token, full_graph] if reverse else [full_graph, token]), limits(phase="decode")
    assert judged_rows(rows, (1, 128), budget, is_whole_text=False) == [token]
    assert judged_rows(rows, (1, 128), budget, is_whole_text=True) == [full_graph]
    assert judged_rows([], (1, 128), budget, is_whole_text=False) == []


@pytest.mark.parametrize(
    ("rows", "value", "status", "where"),
    [
        ([row(threads=2)], 4.0, "pass", ""),
        ([row(threads=2), row(4.5, threads=1)], 4.0, "pass", ", with 2 threads"),
        ([row(1.0, provider="CUDAExecutionProvider"), row(threads=2)], 1.0, "pass", ", on CUDAExecutionProvider"),
        ([row(), row(2.0, provider="openvino-cpu")], 2.0, "pass", ", on openvino-cpu"),
        # The setting that meets most limits, then the one with fewest unknowns, then the fastest.
        ([row(4.5, threads=1, peak=900), row(3.0, threads=2, peak=1100)], 4.5, "pass", ", with 1 thread"),
        ([row(1.0, threads=1, memory_bytes=CRASHED["memory_bytes"]), row(threads=2)], 4.0, "pass", ", with 2 threads"),
        # A provider that rounds is judged only alone.
        ([row(6.0), row(1.0, provider=ROUNDS)], 6.0, "fail", f", on {CPU}"),
        ([row(1.0, provider=ROUNDS)], 1.0, "pass", f", on {ROUNDS}, which rounds to bf16"),
    ],
)  # fmt: skip
def test_one_provider_and_thread_count_is_judged(rows: list[Row], value: float, status: str, where: str) -> None:
    check = checks(*rows)["latency"]
    assert (check.value, check.status, check.reason) == (value, status, f"p50 at 1×128{where}")
    assert checks(row(**CRASHED), row(1.0, provider=ROUNDS))["latency"].status == "unknown", "no other one that rounds"


def test_all_shapes_are_kept_by_one_provider_with_one_thread_count() -> None:
    """Each of the two keeps one limit; a deployment is one of them."""
    budget = limits(*(Limit("latency", 5.0, (batch, 128)) for batch in (1, 8)), latency=None)
    times = {(1, 1): 4.0, (1, 8): 6.0, (2, 1): 7.0, (2, 8): 4.5}
    rows = [row(p50, batch=batch, threads=threads) for (threads, batch), p50 in times.items()]
    result = [check for check in check_budget(rows, budget).checks if check.name == "latency"]
    assert [(check.batch, check.value, check.status) for check in result] == [(1, 7.0, "fail"), (8, 4.5, "pass")]
    assert {str(check.reason).partition(", ")[2] for check in result} == {"with 2 threads"}, "the faster at the largest"
    three = [row(4.9, batch=batch, threads=3) for batch in (1, 8)]
    assert check_budget([*rows, *three], budget).status == "pass"


def test_limits_are_judged_and_ranked_at_their_shapes() -> None:
    at_command = [Limit("latency", 5.0, (batch, 64)) for batch in (1, 8)]
    nothing = {"latency": None, "memory": None}
    assert limits().shapes == limits(**nothing).shapes == ((1, 128),)
    assert limits(*at_command).shapes == ((1, 128), (1, 64), (8, 64))
    assert limits(*at_command, **nothing).shapes == ((1, 64), (8, 64))
    assert limits(*at_command, **nothing, energy=1.0).shapes == ((1, 128), (1, 64), (8, 64))
    assert limits().command_shapes == () and limits(*at_command).command_shapes[-1] == (8, 64)


def test_a_shape_of_the_profile_is_explained_where_it_is_judged_and_a_score_is_no_limit_of_a_row() -> None:
    note, rows = "the model reads 128 tokens at most", [row(), row(batch=8, seq=64)]
    budget = limits(Limit("latency", 9.0, (8, 64)), Limit("score", 0.9, None), shape_note=note, memory=None)
    result = [(check.name, check.batch, check.reason) for check in check_budget(rows, budget).checks]
    latency = [("latency", 1, f"p50 at 1×128: {note}"), ("latency", 8, "p50 at 8×64")]
    assert result == [("size", None, None), *latency]
    budget = limits(Limit("latency", 9.0, (1, 128)), latency=None, memory=None, shape_note=note)
    assert check_budget(rows, budget).checks[1].reason == f"p50 at 1×128: {note}"


def test_notes_name_missing_limits_and_exempt_graphs() -> None:
    bare = {"size": None, "latency": None, "memory": None}
    (note,) = verdict_notes(check_budget([row()], limits(**bare)), ())
    assert note.startswith("nothing was judged")
    (note,) = verdict_notes(check_budget([row()], limits(memory=None)), ())
    assert note == "not judged: memory; set a limit with --max-vram"
    rows, budget = [row(name="full"), row(name="decode", phase="decode")], limits(phase="decode")
    (note,) = verdict_notes(check_budget(rows, budget, ["full"]), exempt_from_latency(rows, budget, ["full"]))
    assert note.endswith("for the artifacts that decode only, not for full")
    assert check_budget([row()], limits(**bare)).not_judged[0].reason == "no limit is set"


def test_figures_of_unstable_times_estimates_and_energy() -> None:
    """Quantiles are 0, 1 … ms from the smallest to the largest."""
    quantiles = tuple(map(float, range(QUANTILES)))
    latency = Latency(status="measured", p50=20.0, n=100, stable=False, quantiles_ms=quantiles)
    check = figures_of(row(latency_ms=latency))["latency"]
    quarter = QUANTILES // 4
    assert (check.value, check.low, check.high) == (20.0, quarter, QUANTILES - 1 - quarter)
    repeated = row(latency_ms=latency, conditions=Conditions(repeated_p50_ms=2.0))
    assert figures_of(repeated)["latency"].low == 2.0
    single = figures_of(row())["latency"]
    assert (single.low, single.high) == (None, None)
    energy = Energy(status="measured", value=3.0)
    check = figures_of(row(energy_mj=energy))["energy"]
    assert (check.value, check.basis) == (3.0, "measured")
    assert figures_of(row(energy_mj=Energy(status="estimated", value=3.0)))["energy"].basis == "unavailable"
    for figures in ({"low": 4.0}, {"high": 4.0}):
        assert figures_of(row(latency_ms=Latency(status="estimated", **figures)))["latency"].value is None
    half = checks(row(latency_ms=Latency(status="estimated", p50=1.0, low=1.0)))["latency"]
    assert str(half.reason).endswith("an estimate without a range gives no verdict")


def test_the_reason_of_an_absent_shape_names_what_was_measured() -> None:
    result = checks(row(seq=64), row(batch=2), energy=1.0)
    assert result["latency"].reason == "there is no row at 1×128, but at 1×64, 2×128"
    shapes = {name: (check.batch, check.seq) for name, check in result.items()}
    assert shapes == {"size": (None, None), **dict.fromkeys(("latency", "memory", "energy"), (1, 128))}
    energy = {"energy_mj": Energy(status="measured", value=0.5)}
    result = checks(row(**energy), phase="decode", energy=1.0)
    assert result["latency"].reason == result["energy"].reason == "decoding at 1×128 was not measured"
    crashes = [row(seq=64, latency_ms=Latency(status="unavailable", reason="elsewhere")), row(**CRASHED)]
    assert checks(*crashes)["latency"].reason == "it crashed", "that of the judged shape first"
    assert (checks(row(**energy), energy=1.0)["latency"].reason) == "p50 at 1×128"
