"""What an artifact adds to a process, and which figure of GPU memory becomes the row's on each platform."""

from __future__ import annotations

import os
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
from edgeformer.measurement.trackers import PeakMeter, gpu_memory, gpu_memory_in_use, memory_above, resident_bytes
from edgeformer.system import nvidia

MIB = 2**20
Machine = Callable[..., None]


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
