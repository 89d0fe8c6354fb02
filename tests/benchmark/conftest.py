from __future__ import annotations

import sys
from pathlib import Path

# The tiny bundle is shared with the runtime's tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "runtimes"))
