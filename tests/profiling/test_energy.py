from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from edgeformer.machine import nvidia
from edgeformer.stages.profiling import energy as energy_module
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


class SlowMachine(FakeMachine):
    """Begins at another time than 0; a call takes 1/64 s, which adds up without rounding."""

    def __init__(self, busy_w: float) -> None:
        super().__init__(busy_w)
        self.now_s, self.used, self.indices = 100.0, 5000.0, []

    def call(self, index: int) -> None:
        self.indices.append(index)
        self.now_s += 1 / 64
        self.used += self.busy_w * 1000 / 64


@pytest.mark.parametrize("idle_s", [0.5, 4.0])
def test_calls_of_a_stated_time_are_counted_and_idle_power_is_per_second(idle_s: float) -> None:
    machine = SlowMachine(8.0)
    energy = measure_energy(machine.call, machine.counter, replace(RULES, idle_s=idle_s), machine.clock, machine.sleep)
    assert energy.value == pytest.approx((8 - 3) * 1000 / 64)
    assert energy.reason == "fake counter, 128 calls, idle subtracted"
    assert machine.indices == list(range(128)), "to rotate inputs"


def test_a_call_is_made_however_short_the_time() -> None:
    machine = SlowMachine(8.0)
    energy = measure_energy(machine.call, machine.counter, replace(RULES, energy_s=0.0), machine.clock, machine.sleep)
    assert (energy.status, machine.indices) == ("measured", [0])


@pytest.mark.parametrize(("busy_w", "status"), [(3.0, "unavailable"), (3.032, "measured")])
def test_half_a_millijoule_stands_out_and_nothing_does_not(busy_w: float, status: str) -> None:
    machine = SlowMachine(busy_w)
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert energy.status == status
    if status == "unavailable":
        assert energy.reason == "fake counter: the calls do not stand out from the idle machine"


def test_a_card_counts_millijoules_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([1000, 1000, 2500])
    cards = {
        "GPU-1": lambda: SimpleNamespace(energy_mj=next(readings)),
        "GPU-2": lambda: SimpleNamespace(energy_mj=None),
    }
    monkeypatch.setattr(nvidia, "state", lambda uuid: cards[uuid]() if uuid in cards else None)
    counter = energy_counter("CUDAExecutionProvider", "GPU-1")
    assert isinstance(counter, EnergyCounter) and "whole card" in counter.name
    before = counter.read()
    assert counter.used_mj(before, counter.read()) == 1500
    for uuid in ("GPU-2", "GPU-3"):
        assert energy_counter("CUDAExecutionProvider", uuid) == "this card has no energy counter that NVML can read"


def test_a_processor_whose_counter_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_module, "rapl_domains", lambda: ([], "only root may read it"))
    assert energy_counter("CPUExecutionProvider", None) == "only root may read it"
