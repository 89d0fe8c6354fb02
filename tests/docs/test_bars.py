"""Bars of benchmarks: a verdict only where there is one, within the time, and on a quiet machine."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save

from benchmarks import _torch_routes, judging, peers
from benchmarks._decode import weight_bytes
from benchmarks._torch_routes import tune
from benchmarks.decode import bars_of, rates, summary, with_speedups
from benchmarks.floors import Needed, bar_of, rounds_of
from benchmarks.judging import INCOMPLETE, MET, NOT_JUDGED, NOT_MET, Limit, Watch, judged, report_bars, unless
from benchmarks.waiting import seconds
from benchmarks.ways import Way, environment
from edgeformer.measurement.conditions import CpuReading


def test_the_median_decides_in_the_sense_of_the_bar() -> None:
    ratios = [2.5, 3.1, 9.0]
    assert judged("speed", ratios, 3, at_least=True)["verdict"] == MET
    assert judged("time", ratios, 3, at_least=False)["verdict"] == NOT_MET
    assert {"median": 3.1, "low": 2.5, "high": 9.0}.items() <= judged("speed", ratios, 3, at_least=True).items()


def test_two_rounds_and_what_is_missing_judge_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bars = [
        judged("speed", [4.0, 5.0], 3, at_least=True),
        judged("peer", [4.0] * 3, 1, at_least=True, missing=["gone"]),
    ]
    assert [(bar["verdict"], bar["reason"]) for bar in bars] == [
        (NOT_JUDGED, "2 of at least 3 rounds were measured"), (NOT_JUDGED, "gone"),
    ]  # fmt: skip
    assert report_bars(bars) == INCOMPLETE
    assert "2 of 2 bars were not judged" in capsys.readouterr().err.splitlines()[-1]
    assert report_bars([judged("speed", [1.0] * 3, 3, at_least=True)]) == 0, "a bar that is not met was judged"


def test_nothing_is_judged_where_others_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [judged("speed", [4.0] * 3, 3, at_least=True)]
    assert unless(None, bars) == bars
    (bar,) = unless("other processes used 1.5 cores", bars)
    assert (bar["verdict"], bar["reason"]) == (NOT_JUDGED, "other processes used 1.5 cores")
    # Ten seconds in which this process and its children used 12, and all processes 27.
    times = iter([CpuReading(0.0, 100.0, 10.0, 0.0, None), CpuReading(10.0, 127.0, 22.0, 0.0, None)])
    monkeypatch.setattr(judging, "_reading", lambda: next(times))
    results = Watch().conditions(1)
    assert (results["foreign_cores"], results["own_cores"]) == (1.5, 1.2)
    assert results["disturbed"] == "other processes used 1.5 cores while this was measured"


def test_rounds_end_before_the_time_is_over_and_parts_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def rounds(limit: Limit, took: float) -> int:
        done = 0
        for _ in limit.rounds(100):
            clock[0] += took
            done += 1
        return done

    limit = Limit(10, parts=2)
    assert rounds(limit, 70) == 4  # 280 of 300 seconds
    assert rounds(limit, 50) == 6  # 300 of the 320 that are left
    assert rounds(limit, 99) == 1, "the first is always done"


def test_only_torch_alone_is_pinned() -> None:
    """Pinned, the main thread has one core, which the threads of ONNX Runtime and OpenVINO would all inherit."""
    assert environment(2, torch_alone=True)["OMP_PROC_BIND"] == "true"
    assert environment(2, torch_alone=False)["OMP_PROC_BIND"] == "false"


def test_a_way_that_ends_says_its_last_words() -> None:
    with ExitStack() as stack:
        removed = Way("gone", [sys.executable, "-c", "raise SystemExit('no such library')"], {}, stack)
        assert removed.reason == "it ended: no such library"
        absent = "from benchmarks.ways import serve; serve('absent', lambda: 1 / 0)"
        assert (
            "division" in Way("absent", [sys.executable, "-c", absent], environment(1, torch_alone=False), stack).reason
        )
        echo = "from benchmarks.ways import serve; serve('echo', lambda: lambda asked: 1 / asked)"
        way = Way("echo", [sys.executable, "-c", echo], environment(1, torch_alone=False), stack)
        assert (way.reason, way.ask(4)) == ("", 0.25)
        with pytest.raises(SystemExit, match="echo ended at 0: ZeroDivisionError"):
            way.ask(0)


def test_without_a_peer_its_bar_is_not_judged() -> None:
    results = {"edgeformer:CPUExecutionProvider": [2.0] * 3, "light, edgeformer:openvino-cpu": [1.0] * 3}
    results |= {"torch:eager": [4.0] * 3}
    bars = {bar["what"]: bar for bar in peers.bars_of("1x16", results)}
    assert bars["1x16 torch:eager over ours"]["median"] == 2.0
    assert bars["1x16 torch:eager over ours"]["verdict"] == MET
    rival = bars["1x16 optimum-onnxruntime:O2 over ours"]
    assert (rival["verdict"], rival["reason"].split(";")[0]) == (NOT_JUDGED, "optimum-onnxruntime:O2 is unavailable")
    light = bars["1x16 light over MiniLM, both ours"]
    assert (light["median"], light["verdict"]) == (0.5, MET)
    (*_, light) = peers.bars_of("1x16", {"edgeformer:CPUExecutionProvider": [2.0] * 3})
    assert light["verdict"] == NOT_JUDGED


def test_a_processor_that_becomes_faster_puts_no_runtime_below_its_floor() -> None:
    """A way of 10 ms at least, between a slow and a fast moment: the floor is that of the fast one."""
    speeds = iter([{"fp32": 1e9, "bandwidth": 1e12}, {"fp32": 4e9, "bandwidth": 1e12}] * 2)
    machine: Any = SimpleNamespace(rates=lambda: next(speeds))
    session: Any = SimpleNamespace(run=lambda call: time.sleep(0.01))
    results = rounds_of({"onnx-fp32": session}, {}, Needed(operations=2e7, weight_bytes=0), machine, range(2))
    for ms, floors in results["onnx-fp32"]:
        assert ms >= 10
        assert floors == pytest.approx(ms / 1000 / (2e7 / 4e9))


def test_a_floor_is_missed_for_good_only_where_every_runtime_is_there() -> None:
    absent = ["OpenVINO is unavailable"]

    def verdict(values: list[float], absent: list[str]) -> str:
        bar = bar_of("light", "16x128", "fp32", values, absent)
        assert bar is not None
        return str(bar["verdict"])

    assert verdict([1.3] * 3, absent) == MET
    assert verdict([1.5] * 3, []) == NOT_MET
    assert verdict([1.5] * 3, absent) == verdict([], []) == NOT_JUDGED
    assert bar_of("light", "16x128", "bf16", [1.5] * 3, []) is None


def decode_times() -> dict[str, list[float]]:
    """Times of three rounds: a head of 10 ms and loops of 5 ms each."""
    times = {"torch": [150.0] * 3, "fp32 decode graph": [45.0] * 3, "int4 decode graph": [20.0] * 3}
    times |= {"int8 decode graph": [30.0] * 3, "nbits8 decode graph": [27.0] * 3}
    for precision in ("fp32", "int8"):
        times |= {f"{precision} steps, exit {loop}": [10.0 + 5 * loop] * 3 for loop in (2, 4, 8)}
        times |= {f"{precision} embedding and head": [10.0] * 3}
        times |= {f"{precision} prefill": [400.0] * 3, f"{precision} full forward": [250.0] * 3}
    return times


def test_exits_are_judged_whole_first_and_then_without_embedding_and_head() -> None:
    """30 of 50 ms at half the loops are 1.67 times as fast, 83 % of two; the loops alone are twice as fast."""
    bars = {bar["what"]: bar for bar in bars_of(decode_times(), (2, 4, 8))}
    complete = bars["exit 4 over all loops, fp32: share of the loops' ratio"]
    loops = bars["loops only (embedding and head subtracted), exit 4, fp32: share of the loops' ratio"]
    assert complete["median"] == pytest.approx(50 / 30 / 2) and complete["verdict"] == NOT_MET
    assert loops["median"] == pytest.approx(1) and loops["verdict"] == MET
    assert [*bars].index(complete["what"]) < [*bars].index(loops["what"])
    assert bars["torch over the decode graph, int4"]["median"] == pytest.approx(7.5)
    assert bars["prefill over one forward, int8"]["verdict"] == NOT_MET


def test_an_older_result_gets_its_undivided_ratio_from_its_medians() -> None:
    times = decode_times()
    now = {**summary(times, (2, 4, 8), 512), "bars": bars_of(times, (2, 4, 8)), "conditions": {"disturbed": None}}
    assert with_speedups(now) == now
    old = {**now, "bars": [bar for bar in now["bars"] if " over all loops" not in bar["what"]]}
    for precision in ("fp32", "int8"):
        old[precision] = {key: value for key, value in now[precision].items() if key != "all_loops_over_exit"}
    for bar in old["bars"]:
        exit_, _, precision = bar["what"].partition("exit ")[2].partition(":")[0].partition(", ")
        if precision in ("fp32", "int8"):
            bar["what"] = f"share of the loops' ratio, exit {exit_}, {precision}"
    upgraded = with_speedups(old)
    assert upgraded["fp32"]["all_loops_over_exit"]["4"] == {"median": pytest.approx(50 / 30)}
    assert {bar["what"]: bar["verdict"] for bar in upgraded["bars"]} == {
        bar["what"]: bar["verdict"] for bar in bars_of(times, (2, 4, 8))
    }
    assert {bar.get("reason") for bar in upgraded["bars"] if " over all loops" in bar["what"]} == {"ratio of medians"}
    disturbed = with_speedups({**old, "conditions": {"disturbed": "other processes used 1.5 cores"}})
    assert {bar["verdict"] for bar in disturbed["bars"] if " over all loops" in bar["what"]} == {NOT_JUDGED}


def test_reading_alone_is_no_slower_than_what_reads() -> None:
    """1 GB of weights: memory is asked for its rate in every round, and one way was faster than it twice."""
    times = {"torch": [100.0, 100.0, 200.0], "fp32 decode graph": [50.0, 20.0, 50.0]}
    times |= {f"{precision} decode graph": [50.0] * 3 for precision in ("int8", "int4", "nbits8")}
    read = {"fp32": 10**9, "int8": 10**8, "int4": 10**8, "nbits8": 10**8}
    results = rates(times, read, [25e9, 40e9, 10e9])
    assert results["torch_over_reading_weights"]["fp32"] == pytest.approx({"median": 4.0, "low": 2.5, "high": 5.0})
    assert results["memory_gb_per_s"] == 25 and results["gb_per_s"]["fp32 decode graph"] == 20


class Small(torch.nn.Module):
    """The parts of a CRT that a token's products are counted by."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.trm, self.head = (
            torch.nn.Linear(8, 8, bias=False),
            torch.nn.Linear(8, 4),
            torch.nn.Linear(4, 9),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.trm(self.attention(x)))
        return result


def test_torch_is_told_nothing_that_costs_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small()
    rows = torch.randn(1, 1, 8), torch.randn(1, 3, 8), torch.randn(2, 1, 8)
    expected = [model(row) for row in rows]

    def rounded(layers: list[torch.nn.Linear]) -> None:
        for layer in layers:
            layer.forward = lambda x, layer=layer: torch.zeros(*x.shape[:-1], layer.out_features)  # type: ignore

    exact = {name: _torch_routes.ROUTES[name] for name in ("highest", "product with a vector")}
    monkeypatch.setattr(_torch_routes, "ROUTES", {**exact, "a fast one": rounded})
    results = tune(model, 1e-5)
    assert results["routes"]["a fast one"]["error"] == 1
    assert results["chosen"] in exact
    exact["product with a vector"]([model.attention, model.trm, model.head])
    for row, result in zip(rows, expected, strict=True):
        torch.testing.assert_close(model(row), result, atol=1e-5, rtol=1e-5)


def test_the_weights_of_a_product_count_as_often_as_it_is_computed(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in (("x", "y"), ("y", "z"))]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 4)) for name in ("x", "z")]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    save(helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])), tmp_path / "g.onnx")
    assert weight_bytes(tmp_path / "g.onnx") == 2 * 4 * 4 * 4


def test_of_what_is_timed_only_a_profile_may_miss_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = subprocess.CompletedProcess([], 3, "report_bars", "an artifact was rejected")
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: missed)
    assert seconds("profile", allowed=(0, 3))[1] == "report_bars"
    with pytest.raises(SystemExit, match="edgeformer export: exit code 3: an artifact was rejected"):
        seconds("export")
