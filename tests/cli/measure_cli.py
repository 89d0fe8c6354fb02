"""Running the real command in a process of its own, and what it cost."""

import json
import os
import subprocess
import sys
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


# A process counts as its own peak that of the one that started it, pytest's for instance: so a small one starts it.
_STARTER = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024]))
"""


def measured(*arguments: str, cwd: Path, stop_after_s: float = 60.0) -> Cost:
    done = subprocess.run(
        [sys.executable, "-S", "-c", _STARTER, sys.executable, "-m", "edgeformer", *arguments], cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}, capture_output=True, encoding="utf-8",
        timeout=stop_after_s, check=True,
    )  # fmt: skip
    code, seconds, peak = json.loads(done.stdout)
    return Cost(code, done.stderr, seconds, peak)


def refused(cost: Cost, *said: str, beyond_s: float = 0.0) -> None:
    """Assert that the command refused its input with these words, in bounded time beyond its start, and memory."""
    assert cost.code == 2, cost
    assert "Traceback" not in cost.err and "defect" not in cost.err, cost
    assert all(part in cost.err.replace("\n", "") for part in said), cost
    assert cost.seconds - beyond_s < MOST_SECONDS and cost.bytes < MOST_BYTES, cost
    assert len(cost.err) < 4000, cost
