"""How much memory this process may still take."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_free_bytes() -> tuple[int, str]:
    """Bytes, and of what: this host, or less, where the process's control group is limited."""
    free, what = int(psutil.virtual_memory().available), "available on this host now"
    limited = group_free_bytes(_GROUPS, _MEMBERSHIP)
    if limited is not None and limited < free:
        return limited, "left in this process's memory limit (cgroup) now"
    return free, what


def group_free_bytes(groups: Path, membership: Path) -> int | None:
    """What the limits of a process's control groups leave, version 1 or 2; None without a limit.

    Args:
        groups: where the kernel mounts the groups.
        membership: the process's ``/proc/…/cgroup``.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return None
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        # Every group on the way up may have a limit; inside a container the path may lead nowhere, its root does not.
        for folder in (group, *(parent for parent in group.parents if parent == root or root in parent.parents)):
            # No such group, or "max" for no limit.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names[:2])
                cached = 0  # files that the kernel counts as used, and gives up for a process that asks
                with contextlib.suppress(OSError):
                    counted = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
                    cached = int(dict(row.split() for row in counted).get(names[2], 0))
                left.append(limit - used + cached)
    return max(0, min(left)) if left else None
