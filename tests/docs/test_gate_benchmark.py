"""benchmarks/gate.py: its bars can be missed, its runs go on where they stopped, and it says how long they take."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gate import cases_of, fault, judged
from edgeformer.artifacts.command_results import GateCheck

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
