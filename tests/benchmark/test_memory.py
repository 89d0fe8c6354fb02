"""What an artifact adds to a process, and which figure of GPU memory becomes the row's on each platform."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgeformer.artifacts.report import Memory
from edgeformer.measurement import trackers as memory_module
from edgeformer.measurement.trackers import (
    PolledPeak,
    SystemPeak,
    gpu_memory,
    gpu_memory_by_name,
    gpu_memory_in_use,
    memory_above,
    peak_meter,
    release_unused,
    resident_bytes,
)
from edgeformer.system import nvidia

MIB = 2**20
Machine = Callable[..., None]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own peak is Linux's")
def test_the_kernels_peak_sees_an_allocation_and_can_be_reset() -> None:
    meter = peak_meter()
    assert isinstance(meter, SystemPeak)
    block = bytearray(64 * MIB)
    del block
    now = resident_bytes()
    assert meter.peak_bytes() > now + 32 * MIB
    if meter.reset():
        assert meter.peak_bytes() < now + 16 * MIB


def test_polling_sees_an_allocation() -> None:
    meter = PolledPeak()
    try:
        initial = resident_bytes()
        block = bytearray(64 * MIB)
        time.sleep(0.1)
        del block
        assert meter.peak_bytes() > initial + 32 * MIB
        assert meter.reset()
        assert meter.peak_bytes() < initial + 32 * MIB
    finally:
        meter.close()


def test_a_kernel_without_a_peak_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name: x\n", encoding="ascii")
    with pytest.raises(OSError, match="no VmHWM"):
        SystemPeak(tmp_path).peak_bytes()
    assert SystemPeak(tmp_path / "absent").reset() is False


def test_the_kernel_counts_in_kilobytes_and_starts_over_when_a_five_is_written(tmp_path: Path) -> None:
    """Documentation/filesystems/proc: 5 resets VmHWM, the other numbers reset something else; a kB is 1024 bytes."""
    (tmp_path / "status").write_bytes(b"Name:\t\xff\nVmPeak:\t   99999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1 kB\n")
    (tmp_path / "clear_refs").write_text("", encoding="ascii")
    meter = SystemPeak(tmp_path)
    assert meter.peak_bytes() == 2 * MIB
    assert meter.reset() and (tmp_path / "clear_refs").read_text(encoding="ascii") == "5"


def test_windows_keeps_the_peak_of_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=7 * MIB, peak_wset=9 * MIB))
    monkeypatch.setattr(memory_module, "psutil", SimpleNamespace(Process=lambda: process))
    assert SystemPeak(None).peak_bytes() == 9 * MIB
    assert SystemPeak(None).reset() is False


def test_polling_keeps_no_process_alive() -> None:
    initial = set(threading.enumerate())
    meter = PolledPeak()
    (thread,) = set(threading.enumerate()) - initial
    assert thread.daemon
    meter.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("fails", [OSError, AttributeError])
def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch, fails: type[Exception]) -> None:
    requested = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=lambda pad: requested.append(pad) or 1)
    )
    release_unused()
    assert requested == [0], "all of it"

    def absent(name: None) -> None:
        raise fails

    monkeypatch.setattr(ctypes, "CDLL", absent)
    release_unused()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("malloc_trim is Linux's"))
    release_unused()


def test_a_peak_below_the_baseline_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemPeak, "peak_bytes", lambda self: 100)
    assert memory_above(SystemPeak(None), baseline_bytes=200, since_reset=True) == Memory(
        status="measured", peak=0, baseline=200, method=SystemPeak(None).method
    )


def test_a_peak_that_could_not_be_reset_is_marked() -> None:
    class Fixed(SystemPeak):
        def peak_bytes(self) -> int:
            return 500

    memory = memory_above(Fixed(), baseline_bytes=200, since_reset=False)
    assert (memory.status, memory.peak, memory.baseline) == ("measured", 300, 200)
    assert "cannot reset" in str(memory.method)
    assert "cannot reset" not in str(memory_above(Fixed(), baseline_bytes=200, since_reset=True).method)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
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
        monkeypatch.setattr(memory_module, "psutil", memory if system is not None else psutil)

    return pretend


def measured(uuid: str | None = "GPU-1") -> tuple[Memory, dict[str, int]]:
    initial = gpu_memory_in_use(uuid)
    by_name = gpu_memory_by_name(uuid, initial)
    return gpu_memory(uuid, initial, by_name), by_name


def test_process_memory_goes_before_card_memory(machine: Machine) -> None:
    machine(process=700, card=(1000, 1750))
    memory, by_name = measured()
    assert (memory.status, memory.peak, memory.baseline) == ("measured", 700, 0)
    assert "GPU memory of the process (NVML)" in str(memory.method)
    assert by_name == {"process (NVML)": 700, "card (NVML)": 750}


def test_windows_wddm_falls_back_to_card_memory(machine: Machine) -> None:
    machine(card=(1000, 1750), wddm=True)
    memory, _ = measured()
    assert (memory.peak, memory.baseline) == (750, 1000)
    assert "whole card (NVML)" in str(memory.method) and "WDDM" in str(memory.method)
    assert "other programs" in str(memory.method)
    machine(wddm=True)
    memory, _ = measured()
    assert memory.status == "unavailable" and "WDDM" in str(memory.reason)


def test_a_jetson_uses_system_memory(machine: Machine) -> None:
    machine(system=(3000, 4200))
    memory, by_name = measured(uuid=None)
    assert (memory.peak, memory.baseline) == (1200, 3000)
    assert "GPU and processor share it, and NVML has no figure" in str(memory.method)
    assert list(by_name) == ["system"]


def test_without_any_figure_there_is_a_reason_and_no_number(machine: Machine) -> None:
    machine()
    memory, by_name = measured()
    assert (memory.status, memory.peak, by_name) == ("unavailable", None, {})
    assert "container" in str(memory.reason)


def test_the_card_is_read_by_its_uuid_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(card=(1000, 1000))
    assert gpu_memory_in_use(None) == {}
    monkeypatch.setattr(nvidia, "card_used_bytes", {"GPU-1": 1000, "GPU-2": 2000}.get)
    monkeypatch.setattr(nvidia, "uses_wddm", {"GPU-1": False, "GPU-2": True}.get)
    assert gpu_memory_in_use("GPU-2") == {"card (NVML)": 2000}
    for uuid, hidden in (("GPU-1", False), ("GPU-2", True)):
        memory = gpu_memory(uuid, {"card (NVML)": 1000}, {"card (NVML)": 7})
        assert ("WDDM" in str(memory.method)) is hidden


def test_a_card_that_holds_no_more_than_before_has_no_figure(machine: Machine) -> None:
    machine(card=(1000, 900))
    memory, by_name = measured()
    assert (memory.status, by_name) == ("unavailable", {})
