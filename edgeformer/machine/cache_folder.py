"""The folder for files that a runtime compiled on this machine and can compile again."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from edgeformer.machine.cuda_driver import Device

VARIABLE = "EDGEFORMER_CACHE"


def cache_folder() -> Path:
    """Return the user's cache folder of edgeformer, which may not exist yet; ``EDGEFORMER_CACHE`` names another one."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "edgeformer"


def compiled_name(sha256: str, gpu: Device, version: str) -> str:
    """Name what was compiled from the file with this sha256, for one GPU, by one version of a runtime."""
    card = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return f"{sha256}-{card}-{gpu.compute_capability}-{version}"
