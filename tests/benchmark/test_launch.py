"""What can happen to a measuring child and the rows that are left of it; a row is stable only where a second process
finds the same median."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import psutil
import pytest

from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.benchmark import measurement, process
from edgeformer.benchmark.measure import MeasureRules, summarise
from edgeformer.benchmark.measurement import (
    FinishedRow,
    Refusal,
    Start,
    confirmed,
    item_of,
    measure_in_child,
    stable_items,
    unavailable_row,
)
from tests.benchmark.measuring_child import Recorder, another, make_spec, reasons, run_as
from tests.runtimes.tiny_bundle import write_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("launch") / "bundle")


def test_a_real_child_measures_every_shape(bundle: Path) -> None:
    progress = Recorder()
    rows = measure_in_child(make_spec(bundle), progress)
    assert [(row.phase, row.batch, row.seq) for row in rows] == [
        ("cold", 1, 8),
        ("steady", 1, 8),
        ("steady", 2, 8),
    ]
    for row in rows:
        assert row.latency_ms.status == "measured" and (row.latency_ms.p50 or 0) > 0
        assert row.memory_bytes.status == "measured" and (row.memory_bytes.peak or 0) > 0
        assert row.memory_bytes.method and (row.memory_bytes.baseline or 0) > 2**20
        assert row.where == "host" and row.provider == "CPUExecutionProvider"
        assert row.threads == row.conditions["threads"] == 1 and row.device_ms is None
    assert rows[0].load_ms is not None and rows[0].load_ms > 0
    assert rows[0].latency_ms.n == 1
    assert rows[1].latency_ms.n >= 100 and rows[1].throughput_per_s is not None
    assert len(rows[1].latency_ms.quantiles_ms) == 41
    assert rows[1].latency_ms.quantiles_ms[20] == pytest.approx(rows[1].latency_ms.p50, abs=1e-6)
    assert not progress.open and progress.messages == []
    assert 2 <= progress.advanced <= 4, "and once more for each that was stable"


def test_a_shape_that_the_artifact_refuses_does_not_stop_the_others(bundle: Path) -> None:
    rows = measure_in_child(
        make_spec(bundle, shapes=((1, 8), (1, 30)), checked=another(make_spec(bundle), max_positions=99)), Silent()
    )
    assert [(row.seq, row.latency_ms.status) for row in rows if row.phase == "steady"] == [
        (8, "measured"),
        (30, "unavailable"),
    ]
    assert "the graph refuses input_ids int64[1, 30]" in str(rows[-1].latency_ms.reason)


def test_an_artifact_that_cannot_be_opened_is_a_reason(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    rows = measure_in_child(make_spec(bundle, checked=another(make_spec(bundle), file=tmp_path / "bad.onnx")), Silent())
    assert all("truncated, damaged, or not an ONNX file" in reason for reason in reasons(rows))


def test_an_unknown_provider_is_a_reason(bundle: Path) -> None:
    rows = measure_in_child(make_spec(bundle, provider="NoSuchProvider"), Silent())
    assert "'NoSuchProvider' is not available" in reasons(rows)[0]
    assert rows[0].provider == "NoSuchProvider"


def test_a_child_that_is_killed_leaves_a_reason(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    found = reasons(run_as(monkeypatch, bundle, "import os; os.abort()"))
    assert len(found) == 2
    assert "the measuring process ended early: " in found[0]
    if sys.platform != "win32":
        assert "SIGABRT" in found[0]


def test_the_last_words_of_a_crash_are_kept(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    program = "import sys; sys.stderr.write('first\\nlibgpu: out of luck\\n'); raise SystemExit(7)"
    found = reasons(run_as(monkeypatch, bundle, program))
    assert found[0] == "the measuring process ended early: exit code 7; last line on stderr: libgpu: out of luck"


def test_rows_that_were_finished_before_the_crash_survive(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path
) -> None:
    spec = make_spec(bundle)
    row = unavailable_row(
        spec.checked.artifact, 1, ("steady", 1, 8), "CPUExecutionProvider", "host", "stands for a measured one"
    )
    said = [
        Start(item=("steady", 1, 8), provider="P"), FinishedRow(row=row), Start(item=("steady", 2, 8), provider="P"),
    ]  # fmt: skip
    (tmp_path / "said").write_text("".join(m.model_dump_json() + "\n" for m in said), encoding="utf-8")
    program = (
        f"import os, sys; sys.stdout.write(open({str(tmp_path / 'said')!r}, encoding='utf-8').read())\n"
        "sys.stdout.flush(); os._exit(5)"
    )
    rows = run_as(monkeypatch, bundle, program)
    assert rows[0] == row
    assert rows[1].provider == "P"
    assert "exit code 5" in str(rows[1].latency_ms.reason)


def test_garbage_on_stdout_is_not_taken_for_a_measurement(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    found = reasons(run_as(monkeypatch, bundle, 'print(\'{"kind": "row"}\')'))
    assert "wrote something else than measurements" in found[0]


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    monkeypatch.setattr(measurement, "ALLOWANCE_S", -0.5)
    found = reasons(run_as(monkeypatch, bundle, "import time; time.sleep(300)"))
    assert "silent for 0 s and was ended" in found[0] or "silent for 1 s and was ended" in found[0]


def test_a_refusal_is_told_live(monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path) -> None:
    line = Refusal(item=("steady", 1, 8), reason="too long").model_dump_json()
    (tmp_path / "said").write_text(line + "\n", encoding="utf-8")
    program = f"print(open({str(tmp_path / 'said')!r}, encoding='utf-8').read(), end='')"
    monkeypatch.setattr(process, "child_command", lambda: [sys.executable, "-c", program])
    progress = Recorder()
    measure_in_child(make_spec(bundle, shapes=((1, 8),)), progress)
    assert progress.messages == ["model at 1×8: not measured: too long"]


def test_an_interrupt_ends_the_child_too(bundle: Path) -> None:
    class Impatient(Silent):
        def advance(self, amount: int = 1, **fields: float) -> None:
            raise KeyboardInterrupt

    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt):
        measure_in_child(make_spec(bundle), Impatient())
    assert {child.pid for child in psutil.Process().children()} <= before


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
