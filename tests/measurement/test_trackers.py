"""What an artifact adds to a process and to a card, and the energy of a call above idle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from edgeformer.artifacts.report import Energy, MeasureRules, Memory
from edgeformer.measurement import trackers
from edgeformer.measurement.trackers import (
    EnergyCounter,
    PeakMeter,
    energy_counter,
    gpu_memory,
    gpu_memory_in_use,
    measure_energy,
    memory_above,
    resident_bytes,
)
from edgeformer.system import nvidia
from tests.fakes.nvml import JETSON, UUID, WINDOWS, Driver

MIB = 2**20
Answers = Callable[..., None]


@pytest.mark.parametrize("is_polled", [False, True])
def test_an_allocation_is_seen_and_a_reset_starts_over(is_polled: bool, tmp_path: Path) -> None:
    earlier = set(threading.enumerate())
    meter = PeakMeter(tmp_path) if is_polled else PeakMeter()
    threads = set(threading.enumerate()) - earlier
    try:
        assert meter.is_polled >= is_polled
        initial = resident_bytes()
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
    memory = memory_above(meter, baseline_bytes=MIB, since_reset=True)
    assert memory == Memory(status="measured", peak=MIB, baseline=MIB, method=meter.method)
    (tmp_path / "clear_refs").unlink()
    (tmp_path / "clear_refs").mkdir()
    assert meter.reset() is False
    below = memory_above(meter, baseline_bytes=3 * MIB, since_reset=False)
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
    return gpu_memory(uuid, gpu_memory_in_use(uuid))


@pytest.mark.parametrize(
    ("answers", "peak", "baseline", "method", "by_name"),
    [
        (
            {"process": 700, "card": (1000, 1750)}, 700, 0, "GPU memory of the process (NVML)",
            {"process (NVML)": 700, "card (NVML)": 750},
        ),
        ({"card": (1000, 1750), "wddm": True}, 750, 1000, "whole card (NVML)", {"card (NVML)": 750}),
        ({"system": (3000, 4200)}, 1200, 3000, "GPU and processor share it, and NVML has no", {"system": 1200}),
    ],
)  # fmt: skip
def test_the_most_exact_figure_is_the_rows(
    machine: Answers, answers: dict[str, Any], peak: int, baseline: int, method: str, by_name: dict[str, int]
) -> None:
    """Of a process; on Windows of the card; on a Jetson of the system."""
    machine(**answers)
    memory, figures = measured()
    assert (memory.status, memory.peak, memory.baseline, figures) == ("measured", peak, baseline, by_name)
    assert method in str(memory.method) and ("WDDM" in str(memory.method)) == ("wddm" in answers)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [({}, "container"), ({"wddm": True}, "WDDM"), ({"card": (1000, 900)}, "neither NVML nor the system")],
)
def test_without_any_figure_there_is_a_reason_and_no_number(
    machine: Answers, answers: dict[str, Any], reason: str
) -> None:
    machine(**answers)
    memory, by_name = measured()
    assert (memory.status, memory.peak, by_name) == ("unavailable", None, {}) and reason in str(memory.reason)


RULES = MeasureRules(idle_s=1.0, energy_s=2.0)
CALL_S = 1 / 64  # adds up without rounding


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

    def measure(self, rules: MeasureRules = RULES, counter: EnergyCounter | str | None = None) -> Energy:
        return measure_energy(self.call, counter or self.counter, rules, self.clock, self.sleep)


@pytest.mark.parametrize("idle_s", [0.5, 1.0, 4.0])
def test_idle_power_is_taken_off(idle_s: float) -> None:
    machine = FakeMachine()
    energy = machine.measure(replace(RULES, idle_s=idle_s))
    assert energy.value == pytest.approx((8 - 3) * 1000 * CALL_S)
    assert energy.reason == "fake counter, 128 calls, idle energy subtracted"
    assert machine.indices == list(range(128)), "to rotate inputs"


def test_the_idle_power_is_taken_once_it_has_settled() -> None:
    """Right after its last kernel a card still draws much more than when it idles."""
    machine = FakeMachine(windows_w=(45.0, 30.0, 18.0, 9.0, 3.2))
    assert machine.measure().value == pytest.approx((8 - (3.2 + 3 + 3) / 3) * 1000 * CALL_S)
    assert machine.now_s == 100.0 + 7 * RULES.idle_s + RULES.energy_s
    unsettled = FakeMachine(windows_w=(12.0, 45.0) * 50)
    energy = unsettled.measure()
    assert (energy.status, energy.value) == ("unavailable", None)
    assert energy.reason == (
        "fake counter: the idle power did not settle within 30 s (12.0 to 45.0 W in the last 3 windows of 1 s)"
    )
    assert unsettled.now_s == 100.0 + RULES.idle_s * RULES.idle_windows


@pytest.mark.parametrize(
    ("busy_w", "status"), [(2.0, "unavailable"), (3.0, "unavailable"), (3.032, "measured"), (8.0, "measured")]
)
def test_energy_must_exceed_idle(busy_w: float, status: str) -> None:
    energy = FakeMachine(busy_w).measure()
    assert (energy.status, energy.value is None) == (status, status == "unavailable")
    if status == "unavailable":
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
