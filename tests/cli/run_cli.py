"""Running the real command in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


def edgeformer(*arguments: str, cwd: Path, stdin: str | None = None) -> Outcome:
    """Run ``edgeformer ARGUMENTS`` in ``cwd``; warnings are errors there too."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "edgeformer", *arguments],
        cwd=cwd,
        env=environment,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
