"""Is a version of edgeformer as fast as another? Start-up, export, profile, training and serving, interleaved A B A B.

OLD and NEW are checkouts that the same interpreter runs; RUN is a finished run of a classifier with a bundle. Every
figure is the median of the rounds; a ratio above 1 says that NEW is faster. Nothing else may use the processor.
"""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from json import dumps, loads
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.frame import run_script

TEXT = "a warm, funny and quietly moving film"
_CLIENTS, _REQUESTS = 8, 1600
_TRAINING_STEPS = 150


def edgeformer(checkout: Path, folder: Path, *words: str) -> tuple[float, str]:
    """Run a command of a checkout in ``folder``; return its seconds and its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "edgeformer", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 3):
        raise SystemExit(f"{checkout}: edgeformer {' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return seconds, done.stdout


def predict_start(folder: Path, checkout: Path) -> float:
    """Return the seconds of one `predict`."""
    return edgeformer(checkout, folder, "predict", "--run", "run", TEXT, "--json")[0]


def export_fp16(folder: Path, checkout: Path) -> float:
    """Return the seconds of an export from nothing."""
    return edgeformer(checkout, folder, "export", "run", "--fp16", "--replace", "--json")[0]


def profile_one(folder: Path, checkout: Path) -> float:
    """Return the seconds of measuring one artifact at one shape, most of which the measuring rules prescribe."""
    words = ("profile", "run", "--device", "host", "--batch", "1", "--seq", "16", "--artifact", "onnx-fp32", "--json")
    return edgeformer(checkout, folder, *words)[0]


def training_step(folder: Path, checkout: Path) -> float:
    """Return the seconds of a training step, without preparing the data."""
    name = f"training-{checkout.name}"
    words = ("train", "quickstart", "--max-steps", str(_TRAINING_STEPS), "--name", name, "--json")
    document = loads(edgeformer(checkout, folder, *words)[1])
    shutil.rmtree(folder / "artifacts" / name)
    return float(document["seconds"]) / int(document["steps"])


def served_request(folder: Path, checkout: Path) -> float:
    """Return the seconds of a request of eight clients."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "edgeformer", "serve", "run", "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        address = loads(server.stdout.readline())["url"].removeprefix("http://").rstrip("/")

        def client(requests: int) -> None:
            connection = http.client.HTTPConnection(address)
            for _ in range(requests):
                body = dumps({"text": TEXT})
                connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                response.read()
                assert response.status == 200, response.status
            connection.close()

        client(50)
        start = time.perf_counter()
        with ThreadPoolExecutor(_CLIENTS) as pool:
            list(pool.map(client, [_REQUESTS // _CLIENTS] * _CLIENTS))
        seconds = time.perf_counter() - start
        server.terminate()
    return seconds / _REQUESTS


CASES: dict[str, Callable[[Path, Path], float]] = {
    "predict, start to answer": predict_start,
    "export --fp16": export_fp16,
    "profile of one artifact": profile_one,
    "training step": training_step,
    "served request": served_request,
}


def main(
    old: Path, new: Path, run: Annotated[Path, typer.Option()], rounds: int = 7, cases: list[str] | None = None,
    json: Path | None = None,
) -> None:  # fmt: skip
    """Compare; ``cases`` are beginnings of the names of cases, all by default."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        checkouts = {"old": old.resolve(), "new": new.resolve()}
        for version in checkouts:  # the old version may not read a bundle of the new one
            shutil.copytree(run, Path(temporary, version, "artifacts", "run"))
        for name, case in CASES.items():
            if cases and not name.startswith(tuple(cases)):
                continue
            versions = {version: partial(case, Path(temporary, version), path) for version, path in checkouts.items()}
            samples: dict[str, list[float]] = {version: [] for version in versions}
            for measure in versions.values():
                measure()  # warms the file cache
            for number in range(rounds):
                for version in versions if number % 2 == 0 else reversed(versions):
                    samples[version].append(versions[version]())
            old_s, new_s = median(samples["old"]), median(samples["new"])
            ratios = sorted(a / b for a, b in zip(samples["old"], samples["new"], strict=True))
            rows.append({"case": name, "old_s": old_s, "new_s": new_s, "ratio": old_s / new_s, "ratios": ratios})
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{name:26} old {old_s:8.4f} s, new {new_s:8.4f} s: {old_s / new_s:.3f} ({spread})", flush=True)
    if json is not None:
        json.write_text(dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
