from __future__ import annotations

from dataclasses import replace

import pytest

from edgeformer.stages.profiling.energy import EnergyCounter, energy_counter, measure_energy
from edgeformer.stages.profiling.measure import MeasureRules

RULES = MeasureRules(idle_s=1.0, energy_s=2.0)


class FakeMachine:
    """Draws 3 W idle and 8 W while a call of 10 ms runs."""

    def __init__(self, busy_w: float = 8.0) -> None:
        self.now_s, self.used, self.busy_w = 0.0, 0.0, busy_w
        self.counter = EnergyCounter("fake counter", lambda: [self.used], lambda before, now: now[0] - before[0])

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.used += 3000 * seconds

    def call(self, index: int) -> None:
        self.now_s += 0.010
        self.used += self.busy_w * 1000 * 0.010


def test_idle_power_is_taken_off() -> None:
    machine = FakeMachine()
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert energy.status == "measured"
    assert energy.value == pytest.approx((8 - 3) * 10.0)
    assert "fake counter" in str(energy.reason)


def test_calls_that_do_not_stand_out_are_unavailable_not_negative() -> None:
    machine = FakeMachine(busy_w=2.0)
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert (energy.status, energy.value) == ("unavailable", None)


def test_a_counter_that_goes_away_is_unavailable() -> None:
    machine = FakeMachine()

    def broken() -> list[float]:
        raise OSError("gone")

    counter = replace(machine.counter, read=broken)
    energy = measure_energy(machine.call, counter, RULES, machine.clock, machine.sleep)
    assert energy.status == "unavailable" and "gone" in str(energy.reason)


def test_no_counter_says_why() -> None:
    energy = measure_energy(lambda _: None, "virtual machine", RULES)
    assert (energy.status, energy.reason) == ("unavailable", "virtual machine")


def test_a_gpu_without_nvml_has_no_counter() -> None:
    assert energy_counter("CUDAExecutionProvider", None) == "no card was found through NVML"
