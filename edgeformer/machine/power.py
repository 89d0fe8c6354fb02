"""Where this machine's power comes from and what its processor has used: battery, RAPL energy counters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_POWERCAP = Path("/sys/class/powercap")


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
    """Package energy counters that this process may read, and why there are none."""
    packages = sorted(folder for folder in root.glob("intel-rapl:*") if folder.name.count(":") == 1)
    if not packages:
        return (
            [],
            "this system has no RAPL energy counters (Linux on Intel or AMD, not in most virtual machines)",
        )
    domains: list[RaplDomain] = []
    for folder in packages:
        file = folder / "energy_uj"
        try:
            range_uj = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
            domain = RaplDomain((folder / "name").read_text(encoding="ascii").strip(), file, range_uj)
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
