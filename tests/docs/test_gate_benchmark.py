"""benchmarks/gate.py: its bars can be missed, its runs go on where they stopped, and it says how long they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gate import cases_of, fault, judged, main, minutes_left, next_case, seconds_of
from edgeformer.artifacts.command_results import GateCheck
from tests.runtimes.tiny_bundle import classifier_graph, write_bundle

CASES = cases_of(20, 10)
SAME, LARGE, SMALL = (case.name for case in CASES)


def run_of(case: str, status: str = "pass", found: str = "no different", **more: Any) -> dict[str, Any]:
    """A run as the script writes it."""
    existing = {"artifact": "a", "rounds": 8}
    latency = GateCheck.model_validate({"name": "latency", "status": status, "found": found, **existing})
    memory = GateCheck.model_validate({"name": "memory", "artifact": "a", "status": more.pop("memory", "pass")})
    checks = [check.model_dump(mode="json") for check in (latency, memory)]
    return {"case": case, "seconds": 20.0, "checks": checks, **more}


def good() -> list[dict[str, Any]]:
    """Runs that meet every bar."""
    return [
        *(run_of(SAME) for _ in range(20)),
        *(run_of(LARGE, "fail", "slower") for _ in range(10)),
        *(run_of(SMALL, "undecided", "slower") for _ in range(10)),
    ]


def missed(runs: list[dict[str, Any]]) -> list[str]:
    return [bar["bar"].split(",")[0] for bar in judged(runs, CASES) if bar["met"] is False]


@pytest.mark.parametrize(
    "bad",
    [
        run_of(SAME, "pass", "slower"),
        run_of(SAME, "pass", "faster"),
        run_of(SAME, "fail", "slower"),
        run_of(SAME, memory="fail"),
        {"case": SAME, "seconds": 1.0, "error": "the file is gone"},
        {**run_of(SAME), "checks": [GateCheck(name="latency", artifact="a", status="fail").model_dump(mode="json")]},
    ],
)
def test_whatever_is_said_of_the_same_file_against_itself_is_an_alarm(bad: dict[str, Any]) -> None:
    """One of twenty is allowed, a second one is not."""
    assert fault(bad) is not None and fault(run_of(SAME)) is None and fault(run_of(SAME, "undecided")) is None
    assert missed(good()) == []
    assert missed([bad, *good()[1:]]) == []
    assert missed([bad, bad, *good()[2:]]) == ["alarms and errors of the same file"]


@pytest.mark.parametrize(
    ("runs", "bars"),
    [
        ([run_of(LARGE, "undecided", "slower")] * 2, ["10 % found"]),
        ([{"case": LARGE, "seconds": 1.0, "error": "gone"}] * 2, ["10 % found"]),
        ([run_of(SMALL, "pass", "no different")], ["3 % undecided or found"]),
        ([run_of(SMALL, "undecided", "faster")], ["3 % called faster"]),
        ([run_of(SAME, seconds=61.0)] * 11, ["median seconds of the same file"]),
    ],
)
def test_every_bar_can_be_missed(runs: list[dict[str, Any]], bars: list[str]) -> None:
    kept = good()
    for run in runs:
        kept.remove(next(item for item in kept if item["case"] == run["case"] and item not in runs))
    assert missed([*kept, *runs]) == bars


def test_no_bar_is_met_before_all_runs_are_there() -> None:
    assert {bar["met"] for bar in judged(good(), CASES)} == {True}
    assert {bar["met"] for bar in judged(good()[1:2], CASES)} == {None}


def test_the_cases_take_turns_and_their_own_runs_say_how_long_the_others_take() -> None:
    runs: list[dict[str, Any]] = []
    while (case := next_case(runs, CASES)) is not None:
        runs.append(run_of(case.name, seconds={SAME: 10.0, LARGE: 20.0, SMALL: 60.0}[case.name]))
    assert [runs[:20].count(run) for run in (runs[0], runs[1], runs[2])] == [10, 5, 5] and len(runs) == 40
    rounds_s = {SAME: 2.0, LARGE: 3.0, SMALL: 4.0}
    assert seconds_of(CASES[1], runs[:2], rounds_s) == 3.0 * CASES[1].rounds
    assert minutes_left(runs[:20], CASES, {}) == pytest.approx((10 * 10 + 5 * 20 + 5 * 60) / 60)


def test_a_run_is_kept_at_once_and_never_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, runs = write_bundle(tmp_path / "bundle", {"model": classifier_graph()}), tmp_path / "made" / "runs.jsonl"
    arguments = [str(bundle), "--runs", str(runs), "--artifact", "model", "--seq", "8", "--threads", "1"]
    arguments += ["--longest", "0.001", "--planted", "0"]
    assert main([*arguments, "--same", "1", "--json", str(tmp_path / "gate.json")]) == 0
    settings, only = map(json.loads, runs.read_text(encoding="utf-8").splitlines())
    assert settings["artifact"] == "model" and only["case"] == SAME
    assert {check["name"] for check in only["checks"]} == {"latency", "memory"}
    assert json.loads((tmp_path / "gate.json").read_text(encoding="utf-8"))["runs"] == [only]
    assert "0 runs are there; about " in capsys.readouterr().out
    with runs.open("a", encoding="utf-8") as file:
        file.write('{"case": "cut o')
    main([*arguments, "--same", "1"])
    assert "1 runs are there; about 0 minutes are left" in capsys.readouterr().out
    main([*arguments, "--same", "2", "--minutes", "0"])
    assert "the minutes are used up" in capsys.readouterr().out
    assert len(runs.read_text(encoding="utf-8").splitlines()) == 2, "the line that was cut off is gone"
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, "--same", "2", "--seq", "16"])
    assert "of another seq" in capsys.readouterr().err
