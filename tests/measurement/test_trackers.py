"""Rules of the measuring loop, what a sample of calls supports, memory that an artifact adds, energy above idle."""

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edgeformer.artifacts.report import Energy, MeasureRules, Memory
from edgeformer.measurement import trackers
from edgeformer.measurement.trackers import EnergyCounter, PeakMeter, energy_counter, measure, summarise, windows_agree
from edgeformer.system import nvidia
from tests.fakes.nvml import JETSON, UUID, WINDOWS, Driver

RULES, STRICT = MeasureRules(), MeasureRules.strict()
ENERGY_RULES = MeasureRules(idle_s=1.0, energy_s=2.0)
CALL_S = 1 / 64  # adds up without rounding
MIB = 2**20
Answers = Callable[..., None]


class FakeArtifact:
    """Advances a clock by what each call 'takes'; ``cost_ms`` maps the call's number to milliseconds."""

    def __init__(self, cost_ms: Callable[[int], float]) -> None:
        self.cost_ms = cost_ms
        self.now_ns = self.start_ns = 10**12  # a clock's zero means nothing
        self.indices: list[int] = []

    def __call__(self, index: int) -> None:
        self.indices.append(index)
        self.now_ns += int(self.cost_ms(index) * 1e6)

    def clock(self) -> int:
        return self.now_ns


@dataclass(frozen=True)
class Loop:
    """Milliseconds per call, and what the loop makes of them; ``warning``: how the only one starts."""

    cost_ms: float | Callable[[int], float]
    warmup_calls: int
    calls: int
    stable: bool = True
    warning: str | None = None
    reason: str | None = None
    rules: MeasureRules = RULES


DRIFT = "drifted: median 10 ms at first, 1"
LOOPS = {
    "three windows and then three seconds": Loop(10.0, 75, 300),
    "fast: at least 200 ms": Loop(0.1, 2000, 30_000),
    "slow: at least 100 calls": Loop(100.0, 75, 100),
    # Windows of 25: calls 50–74 still hold ten slow ones, but their median is already that of the fast calls.
    "until the windows agree": Loop(lambda index: 20.0 if index < 60 else 10.0, 125, 300),
    "never settles": Loop(
        lambda index: 10.0 + 5.0 * ((index // 25) % 2), 2400, 240, False,
        "did not settle: after 30.0 s of warm-up (2400 calls)"),
    "three windows are enough to disagree": Loop(
        lambda index: (300.0, 500.0, 400.0, 400.0)[min(3, index // 25)], 75, 100, False,
        "did not settle: after 30.0 s of warm-up (75 calls), the medians of the last 3 windows of 25 calls"),
    "too slow": Loop(
        2000.0, 15, 30, False, "warm-up was too short to judge: only 15 calls in 30.0 s",
        "only 30 of 100 calls in the time limit of 60 s"),
    "slower than the ceiling": Loop(
        90_000.0, 1, 1, False, "warm-up was too short to judge: only 1 ",
        "only 1 of 100 calls in the time limit of 90 s"),
    "throttles": Loop(lambda index: 10.0 if index < 200 else 13.0, 75, 260, False, f"{DRIFT}3 ms at the end"),
    # Both halves have the same median; a part in the middle has not.
    "other work comes and goes": Loop(
        lambda index: 12.0 if 205 <= index < 245 else 10.0, 75, 292, False,
        f"{DRIFT}0 ms at the end, 10 to 12 ms over 10 parts"),
    "single slow calls are no drift": Loop(lambda index: 50.0 if index % 30 == 0 else 10.0, 75, 265),
    "strict: a minute": Loop(5.0, 75, 12_000, rules=STRICT),
    "strict: calls for a p99": Loop(200.0, 75, 662, rules=STRICT),
    "strict: the ceiling": Loop(
        5000.0, 12, 180, False, "warm-up was too short to judge: only 12 calls in 60.0 s",
        "only 180 of 662 calls in the time limit of 900 s", STRICT),
    "the fewest warm-up calls": Loop(
        1.0, 10, 3000, rules=MeasureRules(warmup_min_s=0.0, warmup_min_calls=10, window_calls=5, windows=2)),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_loop_stops_by_the_rules(loop: Loop) -> None:
    cost = loop.cost_ms
    artifact = FakeArtifact(cost if callable(cost) else lambda _: cost)
    sample = measure(artifact, loop.rules, artifact.clock)
    assert (sample.warmup_calls, sample.stable, sample.reason) == (loop.warmup_calls, loop.stable, loop.reason)
    assert len(sample.samples_ms) == pytest.approx(loop.calls, abs=2)
    assert sum(sample.samples_ms) / 1000 + sample.warmup_s == pytest.approx((artifact.now_ns - artifact.start_ns) / 1e9)
    assert artifact.indices == list(range(len(artifact.indices))), "buffers rotate on through warm-up and measuring"
    if loop.warning is None:
        assert sample.warnings == ()
    else:
        assert sample.warnings[0].startswith(loop.warning)


def test_a_second_process_takes_a_third_and_no_energy() -> None:
    assert RULES.repeated() == MeasureRules(warmup_max_s=10, min_s=1, min_calls=34, max_s=20, idle_s=0, energy_s=0)
    assert RULES.longest_s == 30.0 + 60.0 + 30 * 1.0 + 5.0


def test_windows_agree_within_ten_percent_of_the_smallest() -> None:
    assert not windows_agree([1.0] * 74, RULES)
    assert windows_agree([1.0] * 25 + [1.05] * 25 + [1.1] * 25, RULES)
    assert not windows_agree([1.0] * 25 + [1.05] * 25 + [1.11] * 25, RULES)
    assert windows_agree([9.0] * 25 + [1.0] * 75, RULES), "only the last three count"
    assert windows_agree([1.0] * 13 + [2.0] * 24 + [1.0] * 38, RULES), "what lies across two windows is none"


@pytest.mark.parametrize(
    ("samples_ms", "parts"),
    [
        ([1.0] * 9 + [2.0] * 9, None),  # too few
        ([1.0] * 10 + [2.0] * 10, 2),
        ([1.0] * 10 + [1.1] * 10, None),  # the tolerance itself
        ([1.0] * 10 + [2.0] * 10 + [1.0] * 10, None),  # few calls are cut in halves only
        ([1.0] * 60, None),
        ([1.0] * 30 + [2.0] * 30, 2),
    ],
)
def test_few_samples_cannot_drift(samples_ms: list[float], parts: int | None) -> None:
    warning = trackers.drifted(samples_ms, 0.1)
    if parts is None:
        assert warning is None
    else:
        ends = "median 1 ms at first, 2 ms at the end, 1 to 2 ms"
        assert warning == f"drifted: {ends} over {parts} parts of the sample"


def test_garbage_collection_is_off_while_measured_and_restored() -> None:
    was_enabled: list[bool] = []
    artifact = FakeArtifact(lambda _: 10.0)
    measure(lambda index: (artifact(index), was_enabled.append(gc.isenabled())), RULES, artifact.clock)
    assert not any(was_enabled) and gc.isenabled()

    def fails(index: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        measure(fails, RULES, artifact.clock)
    assert gc.isenabled()


@pytest.mark.parametrize("n", [1, 63, 64, 129, 130, 661, 662])
def test_a_percentile_needs_enough_samples(n: int) -> None:
    latency, needs = summarise([1 / 3] * n, stable=True), {"p90": 64, "p95": 130, "p99": 662}
    assert latency.p50 == 1 / 3
    supported = [name for name, needed in needs.items() if n >= needed]
    assert [name for name in needs if getattr(latency, name) is not None] == supported
    missing = ", ".join(f"{name} needs {needed}" for name, needed in needs.items() if name not in supported)
    assert latency.reason == (f"{n} {'call' if n == 1 else 'calls'}: {missing}" if missing else None)
    assert set(latency.quantiles_ms) == (set() if n == 1 else {0.333333}), "rounded to nanoseconds"


def test_figures_of_a_sample() -> None:
    latency = summarise([float(value) for value in range(1000, -1, -1)], stable=True)
    assert (latency.p50, latency.p90, latency.p95, latency.p99) == (500, 900, 950, 990)
    assert (latency.mean, latency.min, latency.n, latency.stable, latency.status) == (500, 0, 1001, True, "measured")
    assert latency.quantiles_ms == tuple(25.0 * step for step in range(41))
    short = summarise([1.0] * 70, stable=False, warnings=["drifted"], reason="stopped after 60 s")
    assert (short.stable, short.warnings) == (False, ("drifted",))
    assert short.reason == "stopped after 60 s; 70 calls: p95 needs 130, p99 needs 662"
    with pytest.raises(ValueError, match="at least one"):
        summarise([], stable=True)


@pytest.mark.parametrize(
    ("samples_ms", "cv", "warning"),
    [
        ([99.0, 101.0] * 50, 0.01, None),
        ([97.0, 103.0] * 50, 0.03, "noisy: the calls have a coefficient of variation of 3.0%, above 2.5%"),
        ([0.25, 0.75], 0.5**0.5, "noisy: the calls have a coefficient of variation of 70.7%, above 2.5%"),
        ([0.0, 0.0], None, None),
        ([12.5], None, None),
    ],
)
def test_the_spread_warns_above_two_and_a_half_percent(samples_ms, cv, warning):
    latency = summarise(samples_ms, stable=None)
    assert latency.cv == (None if cv is None else pytest.approx(cv, rel=0.02))
    assert [text.split(" (")[0] for text in latency.warnings] == ([] if warning is None else [warning])


@pytest.mark.parametrize("is_polled", [False, True])
def test_an_allocation_is_seen_and_a_reset_starts_over(is_polled: bool, tmp_path: Path) -> None:
    earlier = set(threading.enumerate())
    meter = PeakMeter(tmp_path) if is_polled else PeakMeter()
    threads = set(threading.enumerate()) - earlier
    try:
        assert meter.is_polled >= is_polled
        initial = trackers.resident_bytes()
        block = bytearray(64 * MIB)
        time.sleep(0.1)
        del block
        assert meter.peak_bytes() > initial + 32 * MIB
        if meter.reset():
            assert meter.peak_bytes() < initial + 32 * MIB
    finally:
        meter.close()
    assert all(thread.daemon for thread in threads), "polling keeps no process alive"


def test_the_kernels_peak_is_in_kilobytes_and_starts_over_when_a_five_is_written(tmp_path: Path) -> None:
    """Documentation/filesystems/proc: 5 resets VmHWM, the other numbers reset something else; a kB is 1024 bytes."""
    (tmp_path / "status").write_bytes(b"Name:\t\xff\nVmPeak:\t   99999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1 kB\n")
    (tmp_path / "clear_refs").write_text("", encoding="ascii")
    meter = PeakMeter(tmp_path)
    assert meter.peak_bytes() == 2 * MIB
    assert meter.reset() and (tmp_path / "clear_refs").read_text(encoding="ascii") == "5"
    memory = trackers.memory_above(meter, baseline_bytes=MIB, since_reset=True)
    assert memory == Memory(status="measured", peak=MIB, baseline=MIB, method=meter.method)
    (tmp_path / "clear_refs").unlink()
    (tmp_path / "clear_refs").mkdir()
    assert meter.reset() is False
    below = trackers.memory_above(meter, baseline_bytes=3 * MIB, since_reset=False)
    assert below.peak == 0 and "cannot reset" in str(below.method)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Answers of NVML and the system: one number, or the first and then the second one."""

    def pretend(
        process: int | None = None, card: tuple[int, int] | None = None, system: tuple[int, int] | None = None,
        wddm: bool = False,
    ) -> None:  # fmt: skip
        cards, systems = iter(card or ()), iter(system or ())
        monkeypatch.setattr(nvidia, "process_memory_bytes", lambda pid: process if pid == os.getpid() else None)
        monkeypatch.setattr(nvidia, "card_used_bytes", lambda uuid: next(cards, None))
        monkeypatch.setattr(nvidia, "shares_system_memory", lambda: system is not None)
        monkeypatch.setattr(nvidia, "uses_wddm", lambda uuid: wddm)
        memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=10_000, available=10_000 - next(systems)))
        monkeypatch.setattr(trackers, "psutil", memory if system is not None else psutil)

    return pretend


def measured(uuid: str | None = "GPU-1") -> tuple[Memory, dict[str, int]]:
    return trackers.gpu_memory(uuid, trackers.gpu_memory_in_use(uuid))


@pytest.mark.parametrize(
    ("answers", "peak", "baseline", "method", "by_name"),
    [
        ({"process": 700, "card": (1000, 1750)}, 700, 0, "GPU memory of the process (NVML)",
         {"process (NVML)": 700, "card (NVML)": 750}),
        ({"card": (1000, 1750), "wddm": True}, 750, 1000, "whole card (NVML)", {"card (NVML)": 750}),
        ({"system": (3000, 4200)}, 1200, 3000, "GPU and processor share it, and NVML has no", {"system": 1200}),
    ],
)  # fmt: skip
def test_the_most_exact_figure_is_the_rows(machine, answers, peak, baseline, method, by_name):
    """Of a process; on Windows of the card; on a Jetson of the system."""
    machine(**answers)
    memory, figures = measured()
    assert (memory.status, memory.peak, memory.baseline, figures) == ("measured", peak, baseline, by_name)
    assert method in str(memory.method) and ("WDDM" in str(memory.method)) == ("wddm" in answers)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [({}, "container"), ({"wddm": True}, "WDDM"), ({"card": (1000, 900)}, "neither NVML nor the system")],
)
def test_without_any_figure_there_is_a_reason_and_no_number(machine, answers, reason):
    machine(**answers)
    memory, by_name = measured()
    assert (memory.status, memory.peak, by_name) == ("unavailable", None, {}) and reason in str(memory.reason)


class FakeMachine:
    """Draws 3 W idle and ``busy_w`` while a call runs; ``windows_w``: what it draws in the first windows of idling."""

    def __init__(self, busy_w: float = 8.0, windows_w: tuple[float, ...] = ()) -> None:
        self.now_s, self.used, self.busy_w, self.windows_w = 100.0, 5000.0, busy_w, list(windows_w)
        self.indices: list[int] = []
        self.counter = EnergyCounter("fake counter", lambda: [self.used], lambda start, now: now[0] - start[0])

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.used += (self.windows_w.pop(0) if self.windows_w else 3.0) * 1000 * seconds

    def call(self, index: int) -> None:
        self.indices.append(index)
        self.now_s += CALL_S
        self.used += self.busy_w * 1000 * CALL_S

    def measure(self, rules: MeasureRules = ENERGY_RULES, counter: EnergyCounter | str | None = None) -> Energy:
        return trackers.measure_energy(self.call, counter or self.counter, rules, self.clock, self.sleep)


@pytest.mark.parametrize("idle_s", [0.5, 1.0, 4.0])
def test_idle_power_is_taken_off(idle_s: float) -> None:
    machine = FakeMachine()
    energy = machine.measure(replace(ENERGY_RULES, idle_s=idle_s))
    assert energy.value == pytest.approx((8 - 3) * 1000 * CALL_S)
    assert energy.reason == "fake counter, 128 calls, idle energy subtracted"
    assert machine.indices == list(range(128)), "to rotate inputs"


def test_the_idle_power_is_taken_once_it_has_settled() -> None:
    """Right after its last kernel a card still draws much more than when it idles."""
    machine = FakeMachine(windows_w=(45.0, 30.0, 18.0, 9.0, 3.2))
    assert machine.measure().value == pytest.approx((8 - (3.2 + 3 + 3) / 3) * 1000 * CALL_S)
    assert machine.now_s == 100.0 + 7 * ENERGY_RULES.idle_s + ENERGY_RULES.energy_s
    unsettled = FakeMachine(windows_w=(12.0, 45.0) * 50)
    energy = unsettled.measure()
    assert (energy.status, energy.value) == ("unavailable", None)
    assert energy.reason == (
        "fake counter: the idle power did not settle within 30 s (12.0 to 45.0 W in the last 3 windows of 1 s)"
    )
    assert unsettled.now_s == 100.0 + ENERGY_RULES.idle_s * ENERGY_RULES.idle_windows


@pytest.mark.parametrize(("busy_w", "is_measured"), [(2.0, False), (3.0, False), (3.032, True), (8.0, True)])
def test_energy_must_exceed_idle(busy_w: float, is_measured: bool) -> None:
    energy = FakeMachine(busy_w).measure()
    assert (energy.status, energy.value is None) == ("measured" if is_measured else "unavailable", not is_measured)
    if not is_measured:
        assert energy.reason == "fake counter: the calls use no more energy than the idle machine"


@pytest.mark.parametrize("persona", [JETSON, {**WINDOWS, "nvmlDeviceGetTotalEnergyConsumption": None}])
def test_a_card_without_a_counter_says_so(persona: dict[str, Any], nvml: Driver) -> None:
    nvml.answer(persona)
    for uuid in (UUID, ""):
        assert energy_counter("CUDAExecutionProvider", uuid) == "NVML reads no energy counter on this card"
    assert energy_counter("CUDAExecutionProvider", None) == "NVML reports no card"


def test_without_a_counter_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[int]:
        raise OSError("unplugged")

    machine = FakeMachine()
    absent: list[tuple[EnergyCounter | str, str]] = [
        ("virtual machine", "virtual machine"),
        (replace(machine.counter, read=broken), "fake counter could not be read: unplugged"),
    ]
    for counter, reason in absent:
        assert machine.measure(counter=counter) == Energy(status="unavailable", reason=reason)
    monkeypatch.setattr(trackers, "rapl_domains", lambda: ([], "only root may read it"))
    assert energy_counter("CPUExecutionProvider", None) == "only root may read it"
