"""Facts of this machine: processor, threads, caches, power, energy counters, and the host record of manifests."""

import contextlib
import math
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from edgeformer._version import __version__
from edgeformer.artifacts.units import parse_bytes

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_POWERCAP = Path("/sys/class/powercap")


def now() -> str:
    """Return the current time, UTC, ISO 8601 to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def code_version() -> str:
    """Return the package version, with the git commit for a checkout (``-dirty`` if it was changed)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    commit = _run_program("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return f"{__version__}+{commit}" if commit else __version__


def cpu_name(root: Path = Path("/"), system: str = sys.platform) -> str:
    """Return the name of the processor, or of the board, of a ``system`` with its files in ``root``."""
    name = ""
    if system == "darwin":
        name = _run_program(str(root / "usr/sbin/sysctl"), "-n", "machdep.cpu.brand_string")
    elif system == "win32":
        # From the registry: platform.processor() gives only family and model numbers.
        with contextlib.suppress(OSError, ImportError):
            import winreg

            registry: Any = winreg
            place = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
            with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, place) as key:
                name = str(registry.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    else:
        fields: dict[str, str] = {}
        for line in _read_text(root / "proc/cpuinfo").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
        name = fields.get("model name", "")
        if not name or name.startswith("ARMv"):  # ARM kernels give no useful name
            board = next(iter(board_names(root)), fields.get("Model"))  # the latter on a Raspberry Pi, in containers
            part = f"{platform.machine()} (implementer {fields.get('CPU implementer', '?')}, part {{}})"
            # Servers without a device tree: the part number still distinguishes processors.
            name = board or (part.format(fields["CPU part"]) if "CPU part" in fields else name)
    return name or platform.processor() or platform.machine()


def board_names(root: Path = Path("/")) -> tuple[str, ...]:
    """Return a board's model and compatible names from the device tree (Jetson, Raspberry Pi); empty without one."""
    tree = root / "proc/device-tree"
    return tuple(name for file in ("model", "compatible") for name in _read_text(tree / file).split("\0") if name)


def _read_text(file: Path) -> str:
    """Return the content of a system file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _run_program(*command: str) -> str:
    """Return a program's output; empty if it is missing or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return ""


def describe_host() -> dict[str, Any]:
    """Return operating system, processor, cores that this process may use, and memory in bytes."""
    return {
        "system": platform.system(), "release": platform.release(), "machine": platform.machine(),
        "cpu": cpu_name(), "cores": usable_cores(), "memory_bytes": psutil.virtual_memory().total,
    }  # fmt: skip


def stated_cache_bytes() -> int | None:
    """Return the first core's largest cache in bytes, as Linux reports it (virtual machines: the whole processor's)."""
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    texts = [_read_text(file).strip() for file in files]  # "512K"
    return max((parse_bytes(f"{text}iB") for text in texts if re.fullmatch(r"[0-9]+[KMG]", text)), default=None)


@cache
def usable_cores() -> int:
    """Return the number of processors that this process may run on.

    Cached, because a thread library may pin the main thread to one core later.
    """
    process = psutil.Process()
    return len(process.cpu_affinity() or []) if hasattr(process, "cpu_affinity") else os.cpu_count() or 1


def default_threads() -> int:
    """Return the number of physical cores, limited by affinity and container quota; at least 1.

    Hyper-threads share one set of arithmetic units, so a second thread per core slows matrix products down.
    """
    cores = usable_cores()
    return max(1, min(psutil.cpu_count(logical=False) or cores, cores, math.floor(container_quota() or cores)))


def container_quota(file: Path = _CGROUP_QUOTA) -> float | None:
    """Return the cores that the container's cgroup (v2) grants, or None without a quota."""
    match = re.match(r"([0-9]+) ([1-9][0-9]*)$", _read_text(file))  # "max 100000" without a quota
    return int(match[1]) / int(match[2]) if match is not None else None


@dataclass(frozen=True)
class RaplDomain:
    """Energy counter of one processor package (Linux, Intel and AMD), which wraps at ``range_uj`` microjoules."""

    name: str
    file: Path
    range_uj: int

    def read_uj(self) -> int:
        """Microjoules since the counter's last wrap. Raises OSError."""
        return int(self.file.read_text(encoding="ascii"))

    def used_uj(self, start: int, end: int) -> int:
        """Microjoules between two readings, at most one wrap apart."""
        return end - start if end >= start else end - start + self.range_uj


def rapl_domains(root: Path = _POWERCAP) -> tuple[list[RaplDomain], str | None]:
    """Return the package energy counters that this process may read, and the reason if there are none.

    The zone ``psys`` of client processors (the whole platform) is excluded.
    """
    zones = sorted(folder for folder in root.glob("intel-rapl:*") if folder.name.count(":") == 1)
    packages = {folder: name for folder in zones if (name := _read_text(folder / "name").strip()).startswith("package")}
    if not packages:
        where = "they exist on Linux with Intel or AMD, rarely in virtual machines"
        return [], f"this system has no RAPL energy counters ({where})"
    domains: list[RaplDomain] = []
    for folder, name in packages.items():
        file = folder / "energy_uj"
        try:
            domain = RaplDomain(name, file, int((folder / "max_energy_range_uj").read_text(encoding="ascii")))
            domain.read_uj()
        except PermissionError:
            return [], f"only root can read {file}; to change this, run: sudo chmod a+r {file}"
        except (OSError, ValueError):
            continue
        domains.append(domain)
    return domains, None if domains else "the RAPL energy counters cannot be read"


_PI_FLAGS = {
    1: "the supply voltage is too low", 2: "the board limits the clock", 4: "the board throttles",
    8: "the temperature limit is reached",
}  # fmt: skip
"""Present states in vcgencmd's bit field; those since the boot are 16 bits higher."""


def slowdowns(root: Path = Path("/")) -> list[str]:
    """Return what slows the processor at present: heat, or the power supply of a Raspberry Pi. Empty: nothing known."""
    reasons = []
    for device in sorted(root.glob("sys/class/thermal/cooling_device*")):
        kind, state = _read_text(device / "type").strip(), _read_text(device / "cur_state").strip()
        if "cpufreq" in kind or kind == "Processor":
            highest = _read_text(device / "max_state").strip()
            if state.isdecimal() and int(state) > 0:
                reasons.append(f"{kind} is at step {state} of {highest}, because of heat")
    match = re.fullmatch(r"throttled=0x([0-9a-fA-F]+)", _run_program("vcgencmd", "get_throttled"))
    if match is not None:
        reasons += [text for bit, text in _PI_FLAGS.items() if int(match[1], 16) & bit]
    elif any(
        _read_text(folder / "name").strip() == "rpi_volt" and _read_text(folder / "in0_lcrit_alarm").strip() == "1"
        for folder in root.glob("sys/class/hwmon/hwmon*")
    ):
        reasons.append(_PI_FLAGS[1])
    return list(dict.fromkeys(reasons))


def core_kinds(root: Path = Path("/")) -> dict[str, int]:
    """Return highest clock → number of cores, the fastest first (big.LITTLE processors have several kinds)."""
    files = root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/cpuinfo_max_freq")
    clocks = Counter(int(text) for file in files if (text := _read_text(file).strip()).isdecimal())
    return {f"{clock // 1000} MHz": count for clock, count in sorted(clocks.items(), reverse=True)}


def power_source() -> str:
    """Return ``battery 83%``, ``mains``, or ``mains (no battery reported)``."""
    battery = None
    with contextlib.suppress(AttributeError, OSError, RuntimeError):  # AttributeError: not on every platform
        battery = psutil.sensors_battery()
    if battery is None:
        is_android = hasattr(sys, "getandroidapilevel")
        return "unknown (Android does not show the battery)" if is_android else "mains (no battery reported)"
    if battery.power_plugged is None:
        return f"unknown (battery at {battery.percent:.0f}%)"
    return "mains" if battery.power_plugged else f"battery {battery.percent:.0f}%"
