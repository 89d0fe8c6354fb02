"""The folder for files that a runtime compiled on this machine and can compile again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
