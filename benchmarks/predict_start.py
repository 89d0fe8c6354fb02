"""How long one waits for the first answer: `edgeformer predict` from process start, beside the runtime's own import.

    python benchmarks/predict_start.py artifacts/<run>/bundle [--rounds 15] [--out FILE.json]

A B A B: a fresh process each, the file cache warm. The figure to watch is what edgeformer adds to the import of ONNX
Runtime: both wait for the same disk and the same processor.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from edgeformer.artifacts.files import write_json
from edgeformer.bundle import Bundle
from edgeformer.system.capability import installed_version
from edgeformer.system.host import cpu_name, usable_cores

TEXT = "a warm, funny and quietly moving film"
LIBRARIES = ("onnxruntime", "tokenizers", "pydantic", "numpy", "typer")


def commands(bundle: Path) -> dict[str, list[str]]:
    """What is timed, by name."""
    one_line = f"import edgeformer; edgeformer.open({str(bundle)!r}).predict([{TEXT!r}])"
    return {
        "import onnxruntime": [sys.executable, "-c", "import onnxruntime"],
        "edgeformer predict --json": [sys.executable, "-m", "edgeformer", "predict", str(bundle), TEXT, "--json"],
        "edgeformer predict": [sys.executable, "-m", "edgeformer", "predict", str(bundle), TEXT],
        "edgeformer.open(…).predict(…)": [sys.executable, "-c", one_line],
    }


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds until the process has ended, and seconds of processor time that it took."""
    start, started = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds, end = time.perf_counter() - started, os.times()
    used = end.children_user - start.children_user + end.children_system - start.children_system
    return seconds, used


def main() -> None:
    """Measure and print; write the JSON where ``--out`` says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    command_lines = commands(options.bundle.resolve())
    for command in command_lines.values():
        timed(command)  # warms the file cache
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in command_lines}
    for _ in range(options.rounds):
        for name, command in command_lines.items():
            samples[name].append(timed(command))
    baseline = statistics.median(seconds for seconds, _ in samples["import onnxruntime"])
    rows = []
    for name, values_s in samples.items():
        seconds, used = ([pair[place] for pair in values_s] for place in (0, 1))
        median = statistics.median(seconds)
        rows.append({"command": name, "median_s": median, "least_s": min(seconds), "beyond_import_s": median - baseline,
                     "cpu_s": statistics.median(used), "n": len(values_s)})  # fmt: skip
        print(f"{name:32} median {median:.3f} s, least {min(seconds):.3f} s, processor {rows[-1]['cpu_s']:.3f} s")
    document: dict[str, object] = {
        "bundle_parameters": bundle.manifest.parameters,
        "artifact": bundle.built()[0].id,
        "artifact_bytes": bundle.built()[0].size_bytes,
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": {"python": platform.python_version(), **{name: installed_version(name) for name in LIBRARIES}},
        "rows": rows,
    }
    if options.out:
        write_json(options.out, json.loads(json.dumps(document)))


if __name__ == "__main__":
    main()
