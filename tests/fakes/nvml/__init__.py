"""NVIDIA's management library in C, with the answers of a laptop, of Windows, or of a Jetson."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pynvml
import pytest

MIB = 2**20
SOURCE, LIBRARY, PERSONA = Path(__file__).with_name("nvml.c"), "libnvidia-ml.so.1", "NVML_PERSONA"
UUID = "GPU-7d2b2c1e-4050-4a7e-9d0a-0123456789ab"
NOT_AVAILABLE = 2**64 - 1
FUNCTION_NOT_FOUND = "!13"

LAPTOP = {
    "nvmlSystemGetDriverVersion": "580.95.05", "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 4050 Laptop GPU", "nvmlDeviceGetUUID": UUID,
    "nvmlDeviceGetMemoryInfo": f"{6141 * MIB},{412 * MIB}", "nvmlDeviceGetCudaComputeCapability": "8,9",
    "nvmlDeviceGetClockInfo(SM)": 1500, "nvmlDeviceGetClockInfo(MEM)": 8001, "nvmlDeviceGetTemperature": 67,
    "nvmlDeviceGetEnforcedPowerLimit": 55_000, "nvmlDeviceGetCurrentClocksThrottleReasons": "0x25",
    "nvmlDeviceGetTotalEnergyConsumption": 1_000_000, "nvmlDeviceGetComputeRunningProcesses": "7:500,3:900",
    "nvmlDeviceGetGraphicsRunningProcesses": "7:500,5:100",
}  # fmt: skip
WINDOWS = {
    **LAPTOP,
    "nvmlDeviceGetDriverModel_v2": 0,  # NVML_DRIVER_WDDM
    "nvmlDeviceGetComputeRunningProcesses": f"7:{NOT_AVAILABLE}",
    "nvmlDeviceGetGraphicsRunningProcesses": f"5:{NOT_AVAILABLE}",
}
JETSON = {
    "nvmlSystemGetDriverVersion": "540.4.0",
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetName": "Orin (nvgpu)",
    "nvmlDeviceGetCudaComputeCapability": "8,7",
}
"""What a Jetson's NVML answers: no UUID, and the memory is the system's."""


def build(folder: Path) -> Path:
    """Compile the library into ``folder``; skip the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if os.name != "posix" or compiler is None:
        pytest.skip("needs Linux and a C compiler, to build a stand-in for NVIDIA's management library")
    path = folder / LIBRARY
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", path, SOURCE], check=True)
    return path


class Driver:
    """The library as this process and its children load it; before :meth:`answer`, there is no driver."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._library = patch, ctypes.CDLL(str(path))
        patch.delenv(PERSONA, raising=False)
        patch.setenv("LD_LIBRARY_PATH", str(path.parent))  # for child processes, where pynvml looks for it by its name
        patch.setattr(pynvml, "nvmlLib", self._library)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def answer(self, persona: dict[str, Any]) -> None:
        """Answer as ``persona`` from now on; a value None: the function is not supported."""
        lines = [f"{function}={value}" for function, value in persona.items() if value is not None]
        self._patch.setenv(PERSONA, "\n".join(lines))

    @property
    def opened(self) -> int:
        """How often NVML was initialised and not shut down."""
        return int(self._library.fake_opened())
