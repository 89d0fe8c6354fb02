"""Crashes, kills, a thread that spins, a median that is not there again: told per row, and the other rows survive."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edgeformer.benchmark.measurement import measure_in_child
from tests.benchmark.measuring_child import RULES, Recorder, make_spec, reasons, run_as, states
from tests.runtimes.tiny_bundle import write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("surviving") / "bundle")


# The real child, whose runtime ends the process at one batch size, in a way that no Python code can prevent.
DIES = """
import ctypes, os, signal, sys
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.benchmark import process
real = OnnxSession.run
def run(session, inputs):
    if len(inputs.get("input_ids", ())) in {batches}:  # what tells the speed of the processor has none
        {end}
    return real(session, inputs)
OnnxSession.run = run
process.run_worker()
"""
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
THREE_SHAPES = ((1, 8), (2, 8), (3, 8))


@needs_signals
@pytest.mark.parametrize(
    ("end", "named"), [("ctypes.string_at(0)", "SIGSEGV"), ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL")]
)
def test_an_artifact_that_crashes_the_runtime_at_one_shape_costs_that_shape_only(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, end: str, named: str
) -> None:
    rows = run_as(monkeypatch, bundle, DIES.format(batches=(2,), end=end), shapes=THREE_SHAPES)
    assert states(rows) == [
        ("cold", 1, "measured"),
        ("steady", 1, "measured"),
        ("steady", 2, "unavailable"),
        ("steady", 3, "measured"),
    ], "another child measured the rest, and its first call is no second cold row"
    assert f"ended early: killed by signal {9 if named == 'SIGKILL' else 11} ({named})" in str(
        rows[2].latency_ms.reason
    )
    assert ("memory runs out" in str(rows[2].latency_ms.reason)) == (named == "SIGKILL")
    assert rows[2].threads == 1


@needs_signals
def test_an_artifact_that_always_crashes_is_given_up_after_two_children(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path
) -> None:
    log = tmp_path / "started"
    program = f"open({str(log)!r}, 'a').write('x')\n" + DIES.format(batches=(1, 2, 3), end="ctypes.string_at(0)")
    rows = run_as(monkeypatch, bundle, program, shapes=THREE_SHAPES)
    assert all("SIGSEGV" in reason for reason in reasons(rows)) and len(rows) == 3
    assert log.read_text(encoding="ascii") == "xx"


@needs_signals
def test_a_child_that_is_killed_from_outside_leaves_its_rows_and_the_rest_is_measured(bundle: Path) -> None:
    class Killer(Recorder):
        def advance(self, amount: int = 1, **fields: float) -> None:
            super().advance(amount, **fields)
            if self.advanced == 1:
                # Only what was started here: multiprocessing's servers are children of this process too.
                for child in set(psutil.Process().children()) - before:
                    child.kill()

    before, progress = set(psutil.Process().children()), Killer()
    rows = measure_in_child(make_spec(bundle, shapes=THREE_SHAPES), progress)
    assert states(rows) == [
        ("cold", 1, "measured"),
        ("steady", 1, "measured"),
        ("steady", 2, "unavailable"),
        ("steady", 3, "measured"),
    ]
    assert "SIGKILL" in str(rows[2].latency_ms.reason)
    assert len(progress.messages) == 1 and "model at 2×8: not measured: " in progress.messages[0]


# Calls take 10 ms in the first process and 50 ms in those after it, whatever else the machine does.
SLOWER_THE_SECOND_TIME = """
import os, sys, time
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.benchmark import conditions, process
seconds = 0.05 if os.path.exists({log!r}) else 0.010
open({log!r}, "a").write("x")
real = OnnxSession.run
def run(session, inputs):
    until = time.perf_counter() + seconds
    found = real(session, inputs)
    time.sleep(max(0.0, until - time.perf_counter()))
    return found
OnnxSession.run = run
conditions.CpuUse.disturbed = lambda *_: False
process.run_worker()
"""


def test_what_a_second_process_does_not_find_again_is_not_stable(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path
) -> None:
    log = tmp_path / "children"
    rules = replace(RULES, window_calls=5, min_calls=20, min_s=0.2, window_tolerance=9.0)
    program = SLOWER_THE_SECOND_TIME.format(log=str(log))
    _, steady = run_as(monkeypatch, bundle, program, shapes=((1, 8),), rules=rules)
    assert log.read_text(encoding="ascii") == "xx"
    assert steady.latency_ms.stable is False and steady.latency_ms.n >= 20
    assert 10 <= (steady.latency_ms.p50 or 0) < 50 <= steady.conditions["repeated_p50_ms"]
    assert any(warning.startswith("not confirmed: ") for warning in steady.latency_ms.warnings)


SPINS = """
import sys, threading
from edgeformer.benchmark import process
def spin():
    while True:
        sum(range(1000))
threading.Thread(target=spin, daemon=True).start()
process.run_worker()
"""


def test_a_thread_that_spins_in_the_measuring_process_is_reported_on_the_row(
    monkeypatch: pytest.MonkeyPatch, bundle: Path
) -> None:
    rules = replace(RULES, min_s=0.4, max_s=1.0)
    (steady,) = [
        row for row in run_as(monkeypatch, bundle, SPINS, shapes=((1, 8),), rules=rules) if row.phase == "steady"
    ]
    assert steady.latency_ms.status == "measured" and steady.latency_ms.stable is False
    assert any("that are not the artifact's computed" in warning for warning in steady.latency_ms.warnings)
