"""GPU memory of the measuring process: the same thing has several names, and each platform tells others of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from edgeformer.backends import on_gpu
from edgeformer.formats.report import Memory
from edgeformer.machine import nvidia

PROCESS, CARD, SYSTEM = "process (NVML)", "card (NVML)", "system"
_METHODS = {
    PROCESS: "GPU memory of the process (NVML), CUDA's context included, at the end",
    CARD: "memory of the whole card (NVML), at the end minus before; other programs' changes count too",
    SYSTEM: "memory of the whole system, at the end minus before: GPU and processor share it, and NVML has no figure; "
    "other programs' changes count too",
}


@dataclass(frozen=True)
class GpuMemoryBefore:
    """In use before anything was opened on the card; what this system does not tell is None."""

    uuid: str | None
    card_bytes: int | None
    system_bytes: int | None


def before_opening(uuid: str | None) -> GpuMemoryBefore:
    """Read it before the first artifact is opened. ``uuid``: of the card, where NVML knows one."""
    shared = nvidia.shares_system_memory()
    return GpuMemoryBefore(
        uuid,
        nvidia.card_used_bytes(uuid) if uuid is not None and not shared else None,
        _system_used() if shared else None,
    )


def gpu_memory_by_name(before: GpuMemoryBefore) -> dict[str, int]:
    """What has been added since ``before``, by the name of what tells it; the most exact one first."""
    used = nvidia.process_memory_bytes(os.getpid())
    card = nvidia.card_used_bytes(before.uuid) if before.uuid is not None and before.card_bytes is not None else None
    found = {
        PROCESS: used,
        CARD: max(0, card - before.card_bytes) if card is not None and before.card_bytes is not None else None,
        SYSTEM: max(0, _system_used() - before.system_bytes) if before.system_bytes is not None else None,
    }
    return {name: value for name, value in found.items() if value}


def gpu_memory(provider: str, before: GpuMemoryBefore, found: Mapping[str, int]) -> Memory | None:
    """The best of ``found`` as a measurement; None where the provider computes on no GPU."""
    if not on_gpu(provider):
        return None
    hidden = before.uuid is not None and PROCESS not in found and nvidia.hides_process_memory(before.uuid)
    started = {PROCESS: 0, CARD: before.card_bytes, SYSTEM: before.system_bytes}
    note = "Windows' WDDM driver model hides the memory of single processes"
    for name, method in _METHODS.items():
        if name in found:
            said = f"{method} ({note})" if hidden else method
            return Memory(status="measured", peak=found[name], baseline=started[name], method=said)
    why = f"{note}, and NVML has no figure for the card" if hidden else _NOBODY_SAYS
    return Memory(status="unavailable", reason=why)


_NOBODY_SAYS = (
    "neither NVML nor the system tells the memory on the GPU (without NVML nothing does, and inside a container the "
    "driver may know this process by another number)"
)


def _system_used() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)
