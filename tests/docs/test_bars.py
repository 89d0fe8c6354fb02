"""Bars of benchmarks: a verdict only where there is one, within the time, and on a quiet machine."""

import time

import pytest

from benchmarks import judging
from benchmarks.judging import INCOMPLETE, MET, NOT_JUDGED, NOT_MET, Limit, Watch, judged, report_bars, unless
from edgeformer.measurement.conditions import CpuReading


def test_the_median_decides_in_the_sense_of_the_bar() -> None:
    ratios = [2.5, 3.1, 9.0]
    assert judged("speed", ratios, 3, at_least=True)["verdict"] == MET
    assert judged("time", ratios, 3, at_least=False)["verdict"] == NOT_MET
    assert {"median": 3.1, "low": 2.5, "high": 9.0}.items() <= judged("speed", ratios, 3, at_least=True).items()


def test_two_rounds_and_what_is_missing_judge_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    few, missing = judged("speed", [4.0, 5.0], 3, at_least=True), ["gone"]
    bars = [few, judged("peer", [4.0] * 3, 1, at_least=True, missing=missing)]
    assert [bar["verdict"] for bar in bars] == [NOT_JUDGED] * 2
    assert [bar["reason"] for bar in bars] == ["2 of at least 3 rounds were measured", "gone"]
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
