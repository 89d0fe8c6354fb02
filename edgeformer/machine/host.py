"""What a manifest records about the machine and the software it was made with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from edgeformer import __version__

# Beside the runtimes, whose names the backends know.
_RECORDED = ("edgeformer", "onnx", "onnxscript", "tokenizers", "datasets", "numpy")


def now() -> str:
    """The present moment, UTC, ISO 8601 to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def library_versions(also: Sequence[str] = ()) -> dict[str, str]:
    """Versions of the installed libraries that decide what a run or artifact is.

    Args:
        also: distributions of runtimes; :func:`edgeformer.backends.library_versions` knows them.
    """
    versions = {"python": platform.python_version()}
    for name in (*_RECORDED, *also):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_version() -> str:
    """Package version, with the git commit when edgeformer runs from a checkout (``+dirty`` if it was changed)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return __version__
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+{done.stdout.strip()}"


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


@cache
def usable_cores() -> int:
    """Processors that this process may run on (affinity respected where the system has it).

    Asked once: a thread library that pins the main thread later must not turn two cores into one.
    """
    try:
        return len(psutil.Process().cpu_affinity() or [])
    except AttributeError:  # macOS has no affinity
        return os.cpu_count() or 1
