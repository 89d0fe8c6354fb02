"""How many threads a runtime should use here: what this process may really have, not what the machine has."""

from __future__ import annotations

import math
from pathlib import Path

import psutil

from edgeformer.machine.host import usable_cores

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """Physical cores, but no more than affinity and the container's quota allow; at least 1.

    Hyper-threads share one set of arithmetic units, so a second thread per core slows matrix products down.
    """
    physical = psutil.cpu_count(logical=False) or usable_cores()
    limits = [physical, usable_cores()]
    quota = container_quota()
    if quota is not None:
        limits.append(max(1, math.floor(quota)))
    return max(1, min(limits))


def container_quota(file: Path = _CGROUP_QUOTA) -> float | None:
    """Cores that the container's cgroup (version 2) grants, or None where there is no quota."""
    try:
        quota, period = file.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
