"""What NVML says, asked through a stand-in: cards of several platforms, each of which leaves something out."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeformer.machine import nvidia


class NvmlError(Exception):
    """As pynvml's."""


class FakeNvml:
    """One card. A function that the platform lacks raises, as pynvml's do."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, **answers: Any) -> None:
        self.answers = {"nvmlDeviceGetCount": 1, **answers}
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def ask(*arguments: object) -> Any:
            if name.startswith("nvmlDeviceGetHandle"):
                return "handle"
            if name not in self.answers:
                raise NvmlError(name)
            return self.answers[name]

        return ask


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**answers: Any) -> FakeNvml:
        fake = FakeNvml(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


def process(pid: int, used: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_one_moment_of_a_card(nvml: Any) -> None:
    fake = nvml(
        nvmlDeviceGetEnforcedPowerLimit=55_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x25,
        nvmlDeviceGetComputeRunningProcesses=[process(7), process(3)],
        nvmlDeviceGetGraphicsRunningProcesses=[process(7), process(5)],
        nvmlDeviceGetClockInfo=1500,
    )
    state = nvidia.state("GPU-1")
    assert state is not None
    assert (state.power_limit_w, state.sm_clock_mhz, state.temperature_c, state.energy_mj) == (55.0, 1500, None, None)
    assert state.process_ids == (3, 5, 7), "who draws uses the card, too"
    assert state.slowed_by == ("power limit", "heat (software)"), "idling is no slowdown"
    assert fake.open == 0


def test_a_card_that_says_nothing(nvml: Any) -> None:
    nvml()
    state = nvidia.state("GPU-1")
    assert state is not None and state.slowed_by == () and state.process_ids == ()
    assert nvidia.card_used_bytes("GPU-1") is None
    assert nvidia.process_memory_bytes(1) is None
    assert not nvidia.hides_process_memory("GPU-1")


def test_memory_of_a_process_and_of_the_card(nvml: Any) -> None:
    nvml(
        nvmlDeviceGetComputeRunningProcesses=[process(7, 500), process(8, 900)],
        nvmlDeviceGetMemoryInfo=SimpleNamespace(total=6000, used=1600),
    )
    assert nvidia.process_memory_bytes(7) == 500
    assert nvidia.process_memory_bytes(9) is None
    assert nvidia.card_used_bytes("GPU-1") == 1600


def test_wddm_hides_the_memory_of_processes(nvml: Any) -> None:
    nvml(nvmlDeviceGetCurrentDriverModel=0, nvmlDeviceGetComputeRunningProcesses=[process(7, None)])
    assert nvidia.hides_process_memory("GPU-1")
    assert nvidia.process_memory_bytes(7) is None
    nvml(nvmlDeviceGetCurrentDriverModel=1)
    assert not nvidia.hides_process_memory("GPU-1"), "TCC and MCDM tell"


def test_a_jetson_is_known_by_its_device_tree(tmp_path: Path) -> None:
    assert not nvidia.shares_system_memory(tmp_path)
    (tmp_path / "compatible").write_bytes(b"nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0")
    assert nvidia.shares_system_memory(tmp_path)
    (tmp_path / "compatible").write_bytes(b"raspberrypi,5-model-b\0brcm,bcm2712\0")
    assert not nvidia.shares_system_memory(tmp_path)
