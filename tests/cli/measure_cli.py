"""Running the real command in a process of its own, and what it cost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS, MOST_BYTES = 5.0, 2**30
"""What a hostile file may cost before it is refused."""


@dataclass(frozen=True)
class Cost:
    """What a command said and took: seconds of CPU (others may use the machine), and the peak of resident memory."""

    code: int
    err: str
    seconds: float
    bytes: int


def measured(*arguments: str, cwd: Path, stop_after_s: float = 60.0) -> Cost:
    """Run ``python -m edgeformer ARGUMENTS`` in ``cwd``."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    with (cwd / "stderr.txt").open("w+", encoding="utf-8") as err:
        command = [sys.executable, "-m", "edgeformer", *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": err}
        process = subprocess.Popen(command, cwd=cwd, env=environment, **streams)  # type: ignore[call-overload]
        deadline = time.monotonic() + stop_after_s
        while True:
            found, status, usage = os.wait4(process.pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        err.seek(0)
        seconds, kibibytes = usage.ru_utime + usage.ru_stime, usage.ru_maxrss
        return Cost(process.returncode, err.read(), seconds, kibibytes * 1024)


def refused(cost: Cost, *said: str, beyond_s: float = 0.0) -> None:
    """Assert that the command refused its input with a clear message, in bounded time and memory.

    Args:
        cost: of the command.
        said: parts of its message.
        beyond_s: what the command takes to start, importing torch for instance.
    """
    assert cost.code == 2, cost
    assert "Traceback" not in cost.err and "defect" not in cost.err, cost
    assert all(part in cost.err.replace("\n", "") for part in said), cost
    assert cost.seconds - beyond_s < MOST_SECONDS and cost.bytes < MOST_BYTES, cost
    assert len(cost.err) < 4000, cost
