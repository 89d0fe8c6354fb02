"""Rows of measuring workers: phases and conditions, crashes that cost one row, and confirmation by a second process."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.report import Conditions, MeasureRules, Row
from edgeformer.bundle import Bundle
from edgeformer.measurement import artifact as artifact_module
from edgeformer.measurement.artifact import Item, MeasureJob, Start, check_artifact, measure_artifact, row_of
from edgeformer.measurement.trackers import summarise
from edgeformer.system.worker import End
from tests.measurement.measuring_child import RULES, Interrupting, Recorder, make_spec, reasons, run_as, states
from tests.runtimes.tiny_bundle import write_bundle
from tests.web.browser import LANGUAGE

POSITIONS = 64
THREE_ITEMS: tuple[Item, ...] = (("steady", 1, 8), ("steady", 2, 8), ("steady", 3, 8))
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
# The real worker, whose runtime ends the process at some batch sizes, in a way that no Python code can prevent.
DIES = """
import ctypes
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.system import worker
real = OnnxSession.run
def run(session, inputs):
    if len(inputs.get("input_ids", ())) in {batches}:
        ctypes.string_at(0)
    return real(session, inputs)
OnnxSession.run = run
worker.run_worker()
"""
ONE_LOST = [("cold", 1, "measured"), ("steady", 1, "measured"), ("steady", 2, "unavailable"), ("steady", 3, "measured")]
# Calls take 10 ms in the first process and 50 ms in the second, whatever else the machine does.
SLOWER_THE_SECOND_TIME = """
import os, time
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.measurement import conditions
from edgeformer.system import worker
seconds = 0.05 if os.path.exists({log!r}) else 0.010
open({log!r}, "a").write("x")
real = OnnxSession.run
def run(session, inputs):
    until = time.perf_counter() + seconds
    outputs = real(session, inputs)
    time.sleep(max(0.0, until - time.perf_counter()))
    return outputs
OnnxSession.run = run
conditions.CpuUse.disturbed = lambda *_: False
worker.run_worker()
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("measurement") / "bundle")


def measure_language(artifact_id: str, *shapes: tuple[int, int]) -> list[Row]:
    bundle = Bundle.open(LANGUAGE)
    artifact = bundle.artifact(artifact_id)
    files, items = check_artifact(bundle, artifact), artifact_module.items_of(artifact, bundle.task, shapes)
    spec = MeasureJob(files=files, provider="CPUExecutionProvider", threads=1, items=items, rules=RULES)
    return measure_artifact(spec, Progress())


def test_a_worker_measures_every_shape(bundle: Path) -> None:
    progress = Recorder()
    rows = measure_artifact(make_spec(bundle), progress)
    assert states(rows) == [("cold", 1, "measured"), ("steady", 1, "measured"), ("steady", 2, "measured")]
    for row in rows:
        assert (row.latency_ms.p50 or 0) > 0 and row.memory_bytes.status == "measured"
        assert (row.memory_bytes.peak or 0) > 0 and (row.memory_bytes.baseline or 0) > 2**20
        assert row.memory_bytes.method and row.where == "host" and row.provider == "CPUExecutionProvider"
        assert row.threads == row.conditions.threads == 1 and row.device_ms is None
        assert "nodes_by_provider" not in row.conditions.model_dump()
        assert not any("nodes ran on" in warning for warning in row.latency_ms.warnings)
    cold, steady, _ = rows
    assert (cold.load_ms or 0) > 0 and cold.latency_ms.n == 1
    assert steady.latency_ms.n >= 100 and steady.throughput_per_s is not None
    assert len(steady.latency_ms.quantiles_ms) == 41
    assert steady.latency_ms.quantiles_ms[20] == pytest.approx(steady.latency_ms.p50, abs=1e-6)
    assert not progress.open and progress.messages == []
    assert 2 <= progress.advanced <= 4, "and once more for each stable row"


def test_a_decode_graph_has_rows_of_a_prompt_and_of_a_token_at_every_context_and_batch() -> None:
    rows = measure_language("onnx-fp32-decode", (1, 1), (3, POSITIONS))
    assert [(row.phase, row.batch, row.seq) for row in rows] == [
        ("cold", 1, 1), ("prefill", 1, 1), ("decode", 1, 1), ("prefill", 3, POSITIONS), ("decode", 3, POSITIONS),
    ]  # fmt: skip
    prompt = rows[3]
    assert prompt.conditions.context_tokens == 0
    assert prompt.throughput_per_s == pytest.approx(1000 * 3 * POSITIONS / (prompt.latency_ms.mean or 0))
    rows = [row for row in rows if row.phase == "decode"]
    for row in rows:
        assert (row.latency_ms.p50 or 0) > 0 and row.memory_bytes.status == "measured"
        assert row.conditions.context_tokens == row.seq - 1, "the timed token is the text's last one"
        assert (row.conditions.loops or 0) >= 1
        assert row.throughput_per_s == pytest.approx(1000 * row.batch / (row.latency_ms.mean or 0))
    # The context is read in one call before; the timed token is much less work.
    assert (rows[1].latency_ms.p50 or 0) < (rows[1].conditions.read_context_ms or 0)


def test_a_text_that_is_too_long_is_refused_in_both_phases_of_a_step_bundle() -> None:
    rows = measure_language("onnx-fp32-step", (1, 8), (1, POSITIONS + 1))
    expected = [(phase, 8, "measured") for phase in ("cold", "steady", "decode")]
    expected += [(phase, POSITIONS + 1, "unavailable") for phase in ("steady", "decode")]
    assert Counter((row.phase, row.seq, row.latency_ms.status) for row in rows) == Counter(expected)
    assert all(f"takes at most {POSITIONS}" in str(row.latency_ms.reason) for row in rows[-2:])


def test_shapes_that_are_refused_and_artifacts_that_do_not_open(bundle: Path, tmp_path: Path) -> None:
    files = make_spec(bundle).files
    checked = replace(files, max_positions=99)
    rows = measure_artifact(make_spec(bundle, items=(("steady", 1, 8), ("steady", 1, 30)), files=checked), Progress())
    assert [(row.seq, row.latency_ms.status) for row in rows[1:]] == [(8, "measured"), (30, "unavailable")]
    assert "the graph does not accept input_ids int64[1, 30]" in str(rows[-1].latency_ms.reason)
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    rows = measure_artifact(make_spec(bundle, files=replace(files, file=tmp_path / "bad.onnx")), Progress())
    assert all("truncated, damaged, or not an ONNX file" in reason for reason in reasons(rows))
    rows = measure_artifact(make_spec(bundle, provider="NoSuchProvider"), Progress())
    assert "'NoSuchProvider' is not available" in reasons(rows)[0] and rows[0].provider == "NoSuchProvider"


def test_a_worker_that_ends_early(monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path) -> None:
    program = "import sys; sys.stderr.write('first\\nlibgpu: out of luck\\n'); raise SystemExit(7)"
    reason = "the measuring process ended early: exit code 7; last line on stderr: libgpu: out of luck"
    assert reasons(run_as(monkeypatch, bundle, program)) == [reason] * 2
    spec = make_spec(bundle)
    first, second = ("steady", 1, 8), ("steady", 2, 8)
    finished = row_of(spec.files.artifact, first, "CPUExecutionProvider", "host", "like a measured one")
    messages = [Start(item=first, provider="P"), finished, Start(item=second, provider="P")]
    path = tmp_path / "messages"
    lines = [f"{type(message).__name__} {message.model_dump_json()}\n" for message in messages]
    path.write_text("".join(lines), encoding="utf-8")
    program = f"import os; os.write(1, open({str(path)!r}, 'rb').read()); os._exit(5)"
    rows = run_as(monkeypatch, bundle, program)
    assert rows[0] == finished and rows[1].provider == "P" and "exit code 5" in str(rows[1].latency_ms.reason)
    refusal = artifact_module.Refusal(item=first, reason="too long")
    path.write_text(f"Refusal {refusal.model_dump_json()}\n", encoding="utf-8")
    progress = Recorder()
    measure_artifact(make_spec(bundle, items=(("steady", 1, 8),)), progress)
    assert progress.messages == ["model at 1×8 was not measured: too long"]


@needs_signals
def test_a_crash_at_one_shape_costs_that_shape_only(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    rows = run_as(monkeypatch, bundle, DIES.format(batches=(2,)), items=THREE_ITEMS)
    assert states(rows) == ONE_LOST, "another worker measured the rest, and its first call is no second cold row"
    assert "ended early: killed by signal 11 (SIGSEGV)" in str(rows[2].latency_ms.reason) and rows[2].threads == 1


@needs_signals
def test_two_workers_without_a_row_are_the_last(monkeypatch: pytest.MonkeyPatch, bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "started"
    program = f"open({str(log)!r}, 'a').write('x')\n" + DIES.format(batches=(1, 2, 3))
    rows = run_as(monkeypatch, bundle, program, items=THREE_ITEMS)
    assert all("SIGSEGV" in reason for reason in reasons(rows)) and len(rows) == 3
    assert log.read_text(encoding="ascii") == "xx"


def test_an_interrupt_ends_the_worker(bundle: Path) -> None:
    earlier = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt):
        measure_artifact(make_spec(bundle), Interrupting())
    assert {child.pid for child in psutil.Process().children()} <= earlier


@pytest.mark.slow
def test_a_median_that_a_second_process_does_not_confirm_is_not_stable(monkeypatch, bundle, tmp_path):
    log = tmp_path / "workers"
    rules = replace(RULES, window_calls=5, min_calls=20, min_s=0.2, window_tolerance=9.0)
    program = SLOWER_THE_SECOND_TIME.format(log=str(log))
    _, steady = run_as(monkeypatch, bundle, program, items=(("steady", 1, 8),), rules=rules)
    assert log.read_text(encoding="ascii") == "xx"
    assert steady.latency_ms.stable is False and steady.latency_ms.n >= 20
    assert 10 <= (steady.latency_ms.p50 or 0) < 50 <= (steady.conditions.repeated_p50_ms or 0)
    assert any(warning.startswith("not confirmed: ") for warning in steady.latency_ms.warnings)


@pytest.mark.parametrize(
    ("second", "stable"), [(10.0, True), (10.49, True), (9.53, True), (10.51, False), (9.5, False), (None, False)]
)
def test_a_second_median_within_the_tolerance_confirms(bundle: Path, second: float | None, stable: bool) -> None:
    entry = make_spec(bundle).files.artifact
    absent = row_of(entry, ("steady", 2, 8), "P", "host", "the process ended early")
    latencies = [summarise([p50] * 130, True, ["noted"]) for p50 in (10.0, second or 1.0)]
    facts = [{"latency_ms": latency, "conditions": Conditions(threads=1)} for latency in latencies]
    first, again = (absent.model_copy(update=update) for update in facts)
    result = artifact_module.confirmed(first, absent if second is None else again, MeasureRules().repeat_tolerance)
    assert result.latency_ms.stable is stable
    assert result.conditions == Conditions(threads=1, repeated_p50_ms=second)
    assert (result.latency_ms.p50, result.latency_ms.n) == (10.0, 130)
    warning, warnings = "not confirmed: the median is 10 ms in one process and ", result.latency_ms.warnings
    if second is None:
        assert warnings == ("noted", f"{warning}no result (the process ended early) in a second process")
    elif not stable:
        assert warnings == ("noted", f"{warning}{second:.3g} ms in a second process", "second process: noted")
    interrupted = artifact_module.confirmed(first, None, 0.05).latency_ms
    assert interrupted.stable is False
    assert interrupted.warnings[-1:] == ("not confirmed: you stopped profile before a second process measured it",)


def test_rows_of_an_interrupted_confirmation_are_not_stable(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once one of two stable rows was measured again: the other one has no second median."""
    spec, jobs = make_spec(bundle), list[MeasureJob]()

    def run_job(job: MeasureJob, take: Callable[[Row], None], silence_s: float) -> End:
        jobs.append(job)
        for item in job.items:
            row = row_of(spec.files.artifact, item, "CPUExecutionProvider", "host", "")
            take(row.model_copy(update={"latency_ms": summarise([1.0] * 200, stable=True)}))
            if len(jobs) == 2:
                raise KeyboardInterrupt
        return End()

    monkeypatch.setattr(artifact_module, "run_job", run_job)
    with pytest.raises(artifact_module.MeasuringInterrupted) as stop:
        measure_artifact(spec, Progress())
    first, second = stop.value.rows
    assert first.latency_ms.stable and first.conditions.repeated_p50_ms == 1.0
    assert second.latency_ms.stable is False and second.conditions.repeated_p50_ms is None
