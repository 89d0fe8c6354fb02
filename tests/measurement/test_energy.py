"""Energy per call above idle, from counters of the processor and of the card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgeformer.artifacts.report import Energy, MeasureRules
from edgeformer.measurement import trackers
from edgeformer.measurement.trackers import EnergyCounter, energy_counter, measure_energy
from tests.fakes.nvml import JETSON, UUID, WINDOWS, Driver

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
