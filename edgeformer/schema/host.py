"""What a manifest records about the machine and the software it was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from edgeformer import __version__

_RECORDED = (
    "edgeformer", "torch", "accelerate", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu", "tokenizers",
    "datasets", "numpy", "safetensors", "tensorrt-rtx", "tensorrt", "torch-tensorrt", "flash-attn",
)  # fmt: skip


def now() -> str:
    """The present moment, UTC, ISO 8601 to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that decide what a run or artifact is."""
    versions = {"python": platform.python_version()}
    for name in _RECORDED:
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


def cpu_name() -> str:
    """The processor as the operating system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


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
