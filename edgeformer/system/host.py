"""This machine: its processor, how many threads suit it, what powers it, and what a manifest records about it all."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from edgeformer import __version__
from edgeformer.artifacts.units import parse_bytes

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_POWERCAP = Path("/sys/class/powercap")


def now() -> str:
    """The present moment, UTC, ISO 8601 to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def code_version() -> str:
    """Package version, with the git commit when edgeformer runs from a checkout (``+dirty`` if it was changed)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    commit = _answer_of("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return f"{__version__}+{commit}" if commit else __version__


def cpu_name(root: Path = Path("/"), system: str = sys.platform) -> str:
    """The processor as the operating system names it; on boards without such a name, the board.

    Args:
        root: where the system's files lie.
        system: ``sys.platform`` of the system that lies there.
    """
    if system == "win32":
        found = _windows_cpu()
    elif system == "darwin":
        found = _answer_of(str(root / "usr/sbin/sysctl"), "-n", "machdep.cpu.brand_string")
    else:
        found = _linux_cpu(root)
    return found or platform.processor() or platform.machine()


def board_names(root: Path = Path("/")) -> tuple[str, ...]:
    """What the device tree says about a board (Jetson, Raspberry Pi): its model, then the names it is compatible with.

    Empty on computers without a device tree, and in containers that hide it.
    """
    tree = root / "proc/device-tree"
    return tuple(name for file in ("model", "compatible") for name in _texts(tree / file).split("\0") if name)


def _texts(file: Path) -> str:
    """The content of a system file; empty where it does not exist or cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _linux_cpu(root: Path) -> str:
    """x86 processors have a name in /proc/cpuinfo; ARM kernels have none there, or only "ARMv8 Processor"."""
    fields: dict[str, str] = {}
    for line in _texts(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", "")
    if name and not name.startswith("ARMv"):
        return name
    board = board_names(root)[:1] or (fields.get("Model"),)  # the second is the Raspberry Pi's, in containers too
    if board[0]:
        return board[0]
    # Servers without a device tree: the identification register still tells two processors apart.
    if "CPU part" in fields:
        return f"{platform.machine()} (implementer {fields.get('CPU implementer', '?')}, part {fields['CPU part']})"
    return name


def _windows_cpu() -> str:
    """``platform.processor()`` says "Intel64 Family 6 Model 190" there; the registry has the name on the box."""
    if sys.platform != "win32":
        return ""
    import winreg

    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        return ""


def _answer_of(*command: str) -> str:
    """What a program prints; empty where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def describe_host() -> dict[str, Any]:
    """Operating system, processor, cores that this process may use, memory in bytes."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def stated_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """The first core's largest cache, as Linux describes it; None: not known. Virtual machines state the whole
    processor's.

    Args:
        root: the folder that describes it.
    """
    found: list[int] = []
    for file in root.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            found.append(parse_bytes(file.read_text(encoding="ascii").strip() + "iB"))  # it writes 512K
    return max(found, default=None)


@cache
def usable_cores() -> int:
    """Processors that this process may run on (affinity respected where the system has it).

    Asked once: a thread library that pins the main thread later must not turn two cores into one.
    """
    try:
        return len(psutil.Process().cpu_affinity() or [])
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1


def default_threads() -> int:
    """Physical cores, but no more than affinity and the container's quota allow; at least 1.

    Hyper-threads share one set of arithmetic units, so a second thread per core slows matrix products down.
    """
    cores = usable_cores()
    return max(1, min(psutil.cpu_count(logical=False) or cores, cores, math.floor(container_quota() or cores)))


def container_quota(file: Path = _CGROUP_QUOTA) -> float | None:
    """Cores that the container's cgroup (version 2) grants, or None where there is no quota."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True)
class RaplDomain:
    """One processor package's energy counter (Linux, Intel and AMD). It wraps round at ``range_uj``."""

    name: str
    file: Path
    range_uj: int

    def read_uj(self) -> int:
        """Microjoules since the counter's last wrap. Raises OSError."""
        return int(self.file.read_text(encoding="ascii"))

    def used_uj(self, before: int, after: int) -> int:
        """Microjoules between two readings, at most one wrap apart."""
        return after - before if after >= before else after - before + self.range_uj


def rapl_domains(root: Path = _POWERCAP) -> tuple[list[RaplDomain], str | None]:
    """Package energy counters that this process may read, and why there are none.

    Beside the packages, client processors have a zone ``psys``: the whole platform, with the packages in it.
    """
    zones = sorted(folder for folder in root.glob("intel-rapl:*") if folder.name.count(":") == 1)
    packages = {folder: name for folder in zones if (name := _texts(folder / "name").strip()).startswith("package")}
    if not packages:
        return [], "this system has no RAPL energy counters (Linux on Intel or AMD, not in most virtual machines)"
    domains: list[RaplDomain] = []
    for folder, name in packages.items():
        file = folder / "energy_uj"
        try:
            domain = RaplDomain(name, file, int((folder / "max_energy_range_uj").read_text(encoding="ascii")))
            domain.read_uj()
        except PermissionError:
            return [], f"{file} may be read by root only; allow it with: sudo chmod a+r {file}"
        except (OSError, ValueError):
            continue
        domains.append(domain)
    return domains, None if domains else "the RAPL energy counters cannot be read"


def power_source() -> str:
    """``battery 83 %``, ``mains``, or ``mains (no battery)``."""
    sensor = getattr(psutil, "sensors_battery", None)  # not on every platform
    try:
        battery = sensor() if sensor is not None else None
    except (OSError, RuntimeError):
        battery = None
    if battery is None:
        return "mains (no battery reported)"
    if battery.power_plugged is None:
        return f"unknown (battery at {battery.percent:.0f} %)"
    return "mains" if battery.power_plugged else f"battery {battery.percent:.0f} %"
