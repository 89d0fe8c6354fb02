"""How long one waits for what is no measuring: `--help`, `export --fp16`, and `profile` beyond its measuring.

Each command is a fresh process, all take turns, the file cache is warm. Measuring is what `profile`'s processes spend
on calling the artifact: the first call, warming up, and the calls that count, in the process that confirms them too.
What is left is starting processes, checking files, opening, and the report. The export is made anew each time, of a
copy of the run. A command that fails ends the script; of ``profile`` alone 3 is no failure: it measured, and a budget
of the device was not met.

RUN is the folder of an exported run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from json import loads
from pathlib import Path
from typing import Any

from benchmarks.frame import run_script
from benchmarks.judging import Limit, Watch, judged, report_bars, unless
from edgeformer.artifacts.files import write_json
from edgeformer.runtimes import library_versions
from edgeformer.system.host import cpu_name, default_threads

_BARS_S = {"--help": 0.3, "export --fp16": 20.0, "profile beyond measuring": 5.0}


def seconds(*arguments: str, allowed: Collection[int] = (0,)) -> tuple[float, str]:
    """How long a command takes, and what it prints. Raises SystemExit where it ends with another code than allowed."""
    environment = {**os.environ, "COLUMNS": "120"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "edgeformer", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    took = time.perf_counter() - began
    if done.returncode not in allowed:
        raise SystemExit(f"edgeformer {' '.join(arguments)}: exit code {done.returncode}: {done.stderr}")
    return took, done.stdout


def beyond(run: Path, artifact: str) -> float:
    """Seconds of a profile of one artifact for this host, less those that its processes spent on calling it."""
    took, output = seconds("profile", str(run), "--artifact", artifact, "--device", "host", "--json", allowed=(0, 3))
    rows = [row["conditions"] for row in loads(output)["rows"] if row["where"] == "host"]
    return took - sum(row.get(name) or 0.0 for row in rows for name in ("measuring_s", "repeated_measuring_s"))


def main(
    run: Path, rounds: int = 5, minutes: float = 9.0, artifact: str = "onnx-fp32", json: Path | None = None
) -> int:
    """Measure; rounds that would end after ``minutes`` are left out. Return 3 where a bar was not judged."""
    results: dict[str, list[float]] = {name: [] for name in _BARS_S}
    watch, limit = Watch(), Limit(minutes)
    limit.tell(rounds * 0.8)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / run.name
        shutil.copytree(run, copy)
        measured: dict[str, Callable[[], float]] = {
            "--help": lambda: seconds("--help")[0],
            "export --fp16": lambda: seconds("export", str(copy), "--fp16", "--replace")[0],
            "profile beyond measuring": lambda: beyond(copy, artifact),
        }
        seconds("--help")
        for _ in limit.rounds(rounds):
            for name, measure in measured.items():
                results[name].append(measure())
    report: dict[str, Any] = {"host": cpu_name(), "threads": default_threads(), "run": run.name}
    report |= {"versions": library_versions(), "conditions": watch.conditions(default_threads()), "seconds": {}}
    for name, values in results.items():
        row = {"median": statistics.median(values), "least": min(values), "most": max(values), "bar": _BARS_S[name]}
        report["seconds"][name] = row
    bars = [judged(f"{name}, s", values, _BARS_S[name], at_least=False) for name, values in results.items()]
    report["bars"] = unless(report["conditions"]["disturbed"], bars)
    if json is not None:
        write_json(json, report)
    return report_bars(report["bars"])


if __name__ == "__main__":
    run_script(main)
