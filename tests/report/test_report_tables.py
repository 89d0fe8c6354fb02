"""The search and the calibration on the terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from edgeformer.artifacts.device import Calibration, EstimateError, FittedCase
from edgeformer.artifacts.report import Candidate, Report, Search
from edgeformer.report.report_tables import measurements, print_report, print_search
from edgeformer.report.verification import print_calibration
from tests.report.made_reports import estimated, made_report, made_row, measured


def candidate(name: str, **changes: Any) -> Candidate:
    measured = Candidate(
        artifact=name,
        precision="fp32",
        exit=None,
        trimmed=False,
        provider="CPUExecutionProvider",
        threads=2,
        score=0.9123,
        latency_ms=4.0,
        latency_status="measured",
        size_bytes=2**20,
        memory_bytes=2**21,
        feasible=True,
        on_front=False,
    )
    return measured.model_copy(update=changes)


def search(*candidates: Candidate, **changes: Any) -> Search:
    found = Search(
        metric="accuracy", bound=0.9, minimize="latency", candidates=candidates, pick=0, reason="because it is"
    )
    return found.model_copy(update=changes)


def printed(found: Search) -> str:
    console = Console(width=160, file=io.StringIO())
    print_search(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if f" {name} " in line]


def test_the_fastest_comes_first_and_the_pick_and_the_front_are_marked() -> None:
    text = printed(search(candidate("slow", on_front=True), candidate("fast", latency_ms=1.0)))
    assert text.index("fast") < text.index("slow")
    (slow,), (fast,) = lines_of(text, "slow"), lines_of(text, "fast")
    assert "▶" in slow and "●" in slow and "feasible" in slow and "4.00 ms" in slow and "0.9123" in slow
    assert "▶" not in fast and "●" not in fast
    assert "pick because it is" in text and "accuracy ≥ 0.9" in text


def test_an_estimate_never_looks_like_a_measurement() -> None:
    guess = candidate("guess", latency_status="estimated", low_ms=1.0, high_ms=9.0, latency_ms=3.0, threads=None)
    text = printed(search(guess, candidate("known"), basis="estimated"))
    (line,) = lines_of(text, "guess")
    assert "≈ 1.00 to 9.00 ms" in line and "3.00" not in line and "≈ 2.0 MiB" in line
    assert "≈" not in lines_of(text, "known")[0]
    assert "THIS HOST" in printed(search(candidate("known"), basis="host"))


def test_what_speaks_against_a_candidate_is_said_and_nothing_is_markup() -> None:
    crashed = candidate("crashed", feasible=False, reason="no time is known: [red]boom[/]", latency_ms=None, score=None)
    doubtful = candidate("doubtful", unknown=("memory",))
    text = printed(search(crashed, doubtful, pick=None, not_in_bundle=("FP16 graphs: edgeformer export tiny --fp16",)))
    assert "[red]boom[/]" in lines_of(text, "crashed")[0]
    assert "not known: memory" in lines_of(text, "doubtful")[0]
    assert "no pick because it is" in text
    assert "not in the bundle FP16 graphs: edgeformer export tiny --fp16" in text


def test_a_calibration_shows_its_cases_and_its_error() -> None:
    case = FittedCase(run="light", artifact="onnx-fp32", batch=1, seq=16, measured_ms=2.0, estimated_ms=4.0)
    calibration = Calibration(
        created="2026-11-21T00:00:00.000+00:00",
        processor="a processor",
        threads=1,
        provider="CPUExecutionProvider",
        efficiencies={},
        fitted_on=(case,),
    )
    console = Console(width=160, file=io.StringIO())
    print_calibration(calibration, Path("host.yaml"), console)
    error = EstimateError(
        kind="cpu", device="a processor", cases=18, median_log2=0.1, worst_log2=1.0, created=calibration.created
    )
    print_calibration(calibration.model_copy(update={"error": error}), None, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "never checked" in text and "profile host.yaml" in text
    assert "2.00 ms" in text and "≈ 4.00 ms" in text and "+1.00" in text
    assert "typically within a factor of 1.07, at worst 2.00" in text


def test_every_runtime_has_its_own_first_call() -> None:
    quick, slow = "CPUExecutionProvider", "openvino-cpu"
    rows = [
        made_row(measured(p50), phase=phase, provider=provider, threads=2)
        for provider, cold in ((quick, 30.0), (slow, 900.0))
        for phase, p50 in (("cold", cold), ("steady", 5.0))
    ]
    rows.sort(key=lambda row: row.phase)  # both cold ones before the others
    report = made_report(*rows)
    table = measurements(report).pick("provider", "phase", "first_call").csv(report.rows)
    assert table.split()[1:] == [f"{quick},cold,", f"{slow},cold,", f"{quick},steady,30.0", f"{slow},steady,900.0"]


def test_the_terminal_says_for_how_many_threads_something_is_estimated() -> None:
    def title(report: Report) -> str:
        console = Console(width=160, file=io.StringIO())
        print_report(report, [], console)
        assert isinstance(console.file, io.StringIO)
        return next(line for line in console.file.getvalue().splitlines() if "NOT MEASURED" in line).strip()

    assert title(made_report()).endswith("RTX 4050 Laptop GPU"), "a card's have none"
    on_cores = made_row(estimated(), "device", provider="CPUExecutionProvider", threads=4)
    assert title(made_report(on_cores)).endswith("RTX 4050 Laptop GPU, with 4 threads")
