"""Which figure of GPU memory becomes the row's, and what it is called, on each platform."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from edgeformer.formats.report import Memory
from edgeformer.machine import nvidia
from edgeformer.stages.profiling import gpu_memory as gpu_memory_module
from edgeformer.stages.profiling.gpu_memory import before_opening, gpu_memory, gpu_memory_by_name

CUDA = "CUDAExecutionProvider"
Machine = Callable[..., None]


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
        monkeypatch.setattr(nvidia, "hides_process_memory", lambda uuid: wddm)
        memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=10_000, available=10_000 - next(systems)))
        monkeypatch.setattr(gpu_memory_module, "psutil", memory if system is not None else psutil)

    return pretend


def measured(uuid: str | None = "GPU-1") -> tuple[Memory, dict[str, int]]:
    before = before_opening(uuid)
    found = gpu_memory_by_name(before)
    memory = gpu_memory(CUDA, before, found)
    assert memory is not None
    return memory, found


def test_a_processor_has_none(machine: Machine) -> None:
    machine(process=5)
    assert gpu_memory("CPUExecutionProvider", before_opening(None), {}) is None


def test_the_process_itself_is_the_best_figure_and_the_cards_is_kept_beside_it(machine: Machine) -> None:
    machine(process=700, card=(1000, 1750))
    memory, found = measured()
    assert (memory.status, memory.peak, memory.baseline) == ("measured", 700, 0)
    assert "GPU memory of the process (NVML)" in str(memory.method)
    assert found == {"process (NVML)": 700, "card (NVML)": 750}


def test_windows_says_that_wddm_hides_it_and_takes_the_cards(machine: Machine) -> None:
    machine(card=(1000, 1750), wddm=True)
    memory, _ = measured()
    assert (memory.peak, memory.baseline) == (750, 1000)
    assert "whole card (NVML)" in str(memory.method) and "WDDM" in str(memory.method)
    assert "other programs" in str(memory.method)
    machine(wddm=True)
    memory, _ = measured()
    assert memory.status == "unavailable" and "WDDM" in str(memory.reason)


def test_a_jetson_shares_the_systems_memory_and_says_so(machine: Machine) -> None:
    machine(system=(3000, 4200))
    memory, found = measured(uuid=None)
    assert (memory.peak, memory.baseline) == (1200, 3000)
    assert "GPU and processor share it, and NVML has no figure" in str(memory.method)
    assert list(found) == ["system"]


def test_without_any_figure_there_is_a_reason_and_no_number(machine: Machine) -> None:
    machine()
    memory, found = measured()
    assert (memory.status, memory.peak, found) == ("unavailable", None, {})
    assert "container" in str(memory.reason)
