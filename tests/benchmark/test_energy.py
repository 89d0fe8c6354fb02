from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgeformer.measurement import trackers as energy_module
from edgeformer.measurement.trackers import EnergyCounter, MeasureRules, energy_counter, measure_energy
from tests.fakes.nvml import JETSON, LAPTOP, UUID, WINDOWS, Driver

RULES = MeasureRules(idle_s=1.0, energy_s=2.0)


class FakeMachine:
    """Draws 3 W idle and 8 W while a call of 10 ms runs.

    ``windows_w``: what it draws at first, window by window of idling.
    """

    def __init__(self, busy_w: float = 8.0, windows_w: tuple[float, ...] = ()) -> None:
        self.now_s, self.used, self.busy_w, self.windows_w = 0.0, 0.0, busy_w, list(windows_w)
        self.counter = EnergyCounter("fake counter", lambda: [self.used], lambda start, now: now[0] - start[0])

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.used += (self.windows_w.pop(0) if self.windows_w else 3.0) * 1000 * seconds

    def call(self, index: int) -> None:
        self.now_s += 0.010
        self.used += self.busy_w * 1000 * 0.010


def test_idle_power_is_taken_off() -> None:
    machine = FakeMachine()
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert energy.status == "measured"
    assert energy.value == pytest.approx((8 - 3) * 10.0)
    assert "fake counter" in str(energy.reason)


def test_the_idle_power_is_taken_once_it_has_settled() -> None:
    """Right after its last kernel a card still draws much more than when it idles."""
    machine = FakeMachine(windows_w=(45.0, 30.0, 18.0, 9.0, 3.2))
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert energy.value == pytest.approx((8 - (3.2 + 3 + 3) / 3) * 10.0)
    assert machine.now_s == pytest.approx(7 * RULES.idle_s + RULES.energy_s, abs=0.02)


def test_an_idle_power_that_never_settles_is_unavailable_within_a_bounded_time() -> None:
    machine = FakeMachine(windows_w=(12.0, 45.0) * 50)
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert (energy.status, energy.value) == ("unavailable", None)
    assert energy.reason == (
        "fake counter: the idle power did not settle within 30 s (12.0 to 45.0 W in the last 3 windows of 1 s)"
    )
    assert machine.now_s == RULES.idle_s * RULES.idle_windows == 30.0


@pytest.mark.parametrize(("last_w", "status"), [(3.3, "measured"), (3.31, "unavailable")])
def test_windows_agree_within_a_tenth(last_w: float, status: str) -> None:
    machine, rules = FakeMachine(windows_w=(3.0, 3.0, last_w)), replace(RULES, idle_windows=3)
    assert measure_energy(machine.call, machine.counter, rules, machine.clock, machine.sleep).status == status


def test_published_energy_is_of_at_least_five_seconds() -> None:
    for rules in (MeasureRules(), MeasureRules.strict()):
        assert rules.energy_s >= 5 and rules.idle_s * rules.idle_windows >= 30
        assert rules.longest_s == rules.warmup_max_s + rules.max_s + rules.idle_s * rules.idle_windows + rules.energy_s


class NvmlMachine(FakeMachine):
    """The same, its counter being the card's, which steps in whole millijoules."""

    def __init__(self, nvml: Driver, **draws: Any) -> None:
        super().__init__(**draws)
        self.nvml = nvml
        self.tell()

    def tell(self) -> None:
        self.nvml.answer({**LAPTOP, "nvmlDeviceGetTotalEnergyConsumption": round(self.used)})

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.tell()

    def call(self, index: int) -> None:
        super().call(index)
        self.tell()


def test_a_laptops_card_that_calms_down_is_read_through_nvml(nvml: Driver) -> None:
    machine = NvmlMachine(nvml, busy_w=50.0, windows_w=(48.0, 20.0, 12.0))
    counter = energy_counter("CUDAExecutionProvider", UUID)
    energy = measure_energy(machine.call, counter, RULES, machine.clock, machine.sleep)
    assert energy.value == pytest.approx((50 - 3) * 10.0, rel=0.001)
    assert str(energy.reason).startswith("NVML (whole card), ")


@pytest.mark.parametrize("persona", [JETSON, {**WINDOWS, "nvmlDeviceGetTotalEnergyConsumption": None}])
def test_a_card_without_a_counter_says_so(persona: dict[str, Any], nvml: Driver) -> None:
    nvml.answer(persona)
    for uuid in (UUID, ""):
        assert energy_counter("CUDAExecutionProvider", uuid) == "this card has no energy counter that NVML can read"


def test_calls_below_idle_power_are_unavailable() -> None:
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
    energy = measure_energy(machine.call, machine.counter, replace(RULES, energy_s=1e-6), machine.clock, machine.sleep)
    assert (energy.status, machine.indices) == ("measured", [0])
    energy = measure_energy(machine.call, machine.counter, replace(RULES, energy_s=0.0), machine.clock, machine.sleep)
    assert (energy.status, energy.reason, machine.indices) == ("unavailable", "these rules measure no energy", [0])


@pytest.mark.parametrize(("busy_w", "status"), [(3.0, "unavailable"), (3.032, "measured")])
def test_energy_must_exceed_idle(busy_w: float, status: str) -> None:
    machine = SlowMachine(busy_w)
    energy = measure_energy(machine.call, machine.counter, RULES, machine.clock, machine.sleep)
    assert energy.status == status
    if status == "unavailable":
        assert energy.reason == "fake counter: the calls do not stand out from the idle machine"


def test_a_processor_whose_counter_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy_module, "rapl_domains", lambda: ([], "only root may read it"))
    assert energy_counter("CPUExecutionProvider", None) == "only root may read it"
