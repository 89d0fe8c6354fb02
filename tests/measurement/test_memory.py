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
from typing import Any

import psutil
import pytest

from edgeformer.artifacts.report import Memory
from edgeformer.measurement import trackers
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


@pytest.mark.parametrize("kind", [SystemPeak, PolledPeak])
def test_an_allocation_is_seen_and_a_reset_starts_over(kind: type[SystemPeak | PolledPeak]) -> None:
    if kind is SystemPeak and not isinstance(peak_meter(), SystemPeak):
        pytest.skip("this system keeps no peak")
    earlier = set(threading.enumerate())
    meter = kind()
    threads = set(threading.enumerate()) - earlier
    try:
        initial = resident_bytes()
        block = bytearray(64 * MIB)
        time.sleep(0.1)
        del block
        assert meter.peak_bytes() > initial + 32 * MIB
        if meter.reset():
            assert meter.peak_bytes() < initial + 32 * MIB
        else:
            assert kind is SystemPeak
    finally:
        meter.close()
    assert not any(thread.is_alive() or not thread.daemon for thread in threads), "polling keeps no process alive"


def test_the_kernels_peak_is_in_kilobytes_and_starts_over_when_a_five_is_written(tmp_path: Path) -> None:
    """Documentation/filesystems/proc: 5 resets VmHWM, the other numbers reset something else; a kB is 1024 bytes."""
    (tmp_path / "status").write_bytes(b"Name:\t\xff\nVmPeak:\t   99999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1 kB\n")
    (tmp_path / "clear_refs").write_text("", encoding="ascii")
    meter = SystemPeak(tmp_path)
    assert meter.peak_bytes() == 2 * MIB
    assert meter.reset() and (tmp_path / "clear_refs").read_text(encoding="ascii") == "5"
    (tmp_path / "status").write_text("Name: x\n", encoding="ascii")
    with pytest.raises(OSError, match="no VmHWM"):
        meter.peak_bytes()
    assert SystemPeak(tmp_path / "absent").reset() is False


def test_windows_keeps_the_peak_of_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=7 * MIB, peak_wset=9 * MIB))
    monkeypatch.setattr(trackers, "psutil", SimpleNamespace(Process=lambda: process))
    assert SystemPeak(None).peak_bytes() == 9 * MIB
    assert SystemPeak(None).reset() is False


@pytest.mark.parametrize("fails", [OSError, AttributeError])
def test_freed_memory_is_returned_to_the_system(monkeypatch: pytest.MonkeyPatch, fails: type[Exception]) -> None:
    trimmed = []
    monkeypatch.setattr(sys, "platform", "linux")
    library = SimpleNamespace(malloc_trim=lambda pad: trimmed.append(pad) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    release_unused()
    assert trimmed == [0], "all of it"

    def absent(name: None) -> None:
        raise fails

    monkeypatch.setattr(ctypes, "CDLL", absent)
    release_unused()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("malloc_trim is Linux's"))
    release_unused()


@pytest.mark.parametrize(("peak", "added"), [(100, 0), (500, 300)])
def test_memory_is_above_the_baseline(monkeypatch: pytest.MonkeyPatch, peak: int, added: int) -> None:
    monkeypatch.setattr(SystemPeak, "peak_bytes", lambda self: peak)
    meter = SystemPeak(None)
    memory = memory_above(meter, baseline_bytes=200, since_reset=True)
    assert memory == Memory(status="measured", peak=added, baseline=200, method=meter.method)
    assert "cannot reset" in str(memory_above(meter, baseline_bytes=200, since_reset=False).method)


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
        monkeypatch.setattr(trackers, "psutil", memory if system is not None else psutil)

    return pretend


def measured(uuid: str | None = "GPU-1") -> tuple[Memory, dict[str, int]]:
    initial = gpu_memory_in_use(uuid)
    by_name = gpu_memory_by_name(uuid, initial)
    return gpu_memory(uuid, initial, by_name), by_name


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
    machine: Machine, answers: dict[str, Any], peak: int, baseline: int, method: str, by_name: dict[str, int]
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
    machine: Machine, answers: dict[str, Any], reason: str
) -> None:
    machine(**answers)
    memory, by_name = measured()
    assert (memory.status, memory.peak, by_name) == ("unavailable", None, {}) and reason in str(memory.reason)


def test_the_card_is_read_by_its_uuid_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(card=(1000, 1000))
    assert gpu_memory_in_use(None) == {}
    monkeypatch.setattr(nvidia, "card_used_bytes", {"GPU-1": 1000, "GPU-2": 2000}.get)
    monkeypatch.setattr(nvidia, "uses_wddm", {"GPU-1": False, "GPU-2": True}.get)
    assert gpu_memory_in_use("GPU-2") == {"card (NVML)": 2000}
    for uuid, hidden in (("GPU-1", False), ("GPU-2", True)):
        memory = gpu_memory(uuid, {"card (NVML)": 1000}, {"card (NVML)": 7})
        assert ("WDDM" in str(memory.method)) is hidden
