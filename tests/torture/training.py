"""Kill trainings before every change that they make on the disk, or at random: each must go on, and end as ever.

    python -m tests.torture.training [--random 120] [--every 1] [--first 1] [--workers 1] [--json FILE]

Ends with 1 where a run was lost, ended with other weights than a run that was never killed, or left something behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from safetensors.torch import load_file

from edgeformer.run import read_run
from edgeformer.system.lock import LOCK_FILE
from tests.torture.children import OFTEN, ends, kill, start

SHORT = [*OFTEN, "training.batch_size=160", "training.log_every=1"]
"""Two steps in each of two epochs, a checkpoint after every step and every epoch."""
STARTING = threading.Lock()  # processes are started by one server


def begin(artifacts: Path, *, kill_at: int | None = None) -> Callable[[], int]:
    """Train, or go on; the answer waits for the end, and gives the exit status."""
    with STARTING:
        resume = (artifacts / "run").exists()
        child = start(artifacts, overrides=SHORT, resume=resume, kill_at=kill_at)
    return lambda: ends(child)


def problems(artifacts: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """Finish the run, and say what is wrong with it."""
    run = artifacts / "run"
    finished = (run / "run.json").exists() and read_run(run).status == "finished"
    if not finished and (code := begin(artifacts)()) != 0:
        error = artifacts / "error.txt"
        return [f"not resumed: exit {code}: {error.read_text(encoding='utf-8') if error.exists() else ''}"]
    results = load_file(run / "model" / "model.safetensors")
    wrong = [f"{name} differs" for name, tensor in expected.items() if not torch.equal(tensor, results[name])]
    remaining = [*run.rglob(".*"), *(path for path in artifacts.glob(".*") if path.name != ".cache")]
    # Killed when all was written: nobody will hold a finished run's lock again, and nobody asks for it.
    return wrong + [f"{path} was left" for path in remaining if path != run / LOCK_FILE]


def at_change(number: int, expected: dict[str, torch.Tensor]) -> tuple[str, int, list[str]]:
    """Kill before the change ``number``: what was done, how many kills there were, what was wrong then."""
    with tempfile.TemporaryDirectory() as folder:
        kills = int(begin(Path(folder), kill_at=number)() == -9)
        return f"change {number}", kills, problems(Path(folder), expected)


def at_random(number: int, seconds: float, expected: dict[str, torch.Tensor]) -> tuple[str, int, list[str]]:
    """Kill twice at a moment drawn from a whole training's time."""
    moments, kills = random.Random(number), 0
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder)
        for _ in range(2):
            run = artifacts / "run" / "run.json"
            if run.exists() and read_run(run.parent).status == "finished":
                break
            with STARTING:
                child = start(artifacts, overrides=SHORT, resume=run.exists())
            time.sleep(moments.uniform(0, seconds))
            kills += kill(child) == -9
        return f"random {number}", kills, problems(artifacts, expected)


def main() -> int:
    """Run all, print a summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=120, help="trials at random moments, up to two kills each")
    parser.add_argument("--every", type=int, default=1, help="1: every change on the disk")
    parser.add_argument("--first", type=int, default=1, help="change on the disk to begin with")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the children; more of them take longer for models this small
    with tempfile.TemporaryDirectory() as folder:
        straight = Path(folder)
        for _ in range(2):  # the first one waits for the libraries
            begun = time.perf_counter()
            straight = Path(tempfile.mkdtemp(dir=folder))
            if begin(straight)() != 0:
                raise SystemExit("a training that nobody kills must end well")
            seconds = time.perf_counter() - begun
        expected = load_file(straight / "run" / "model" / "model.safetensors")
        changes = int((straight / "changes.txt").read_text(encoding="utf-8"))
    with ThreadPoolExecutor(options.workers) as pool:
        tasks = [
            pool.submit(at_change, number, expected) for number in range(options.first, changes + 1, options.every)
        ]
        tasks += [pool.submit(at_random, number, seconds, expected) for number in range(options.random)]
        results = []
        for done, task in enumerate(as_completed(tasks), start=1):
            results.append(task.result())
            print(f"{done} of {len(tasks)}: {results[-1]}", file=sys.stderr, flush=True)
    wrong = {name: figures for name, _, figures in results if figures}
    kills = [sum(count for name, count, _ in results if name.startswith(kind)) for kind in ("change", "random")]
    summary = {
        "changes_on_disk": changes,
        "killed_at_changes": kills[0],
        "killed_at_random_moments": kills[1],
        "lost_or_different": len(wrong),
        "problems": wrong,
    }
    text = json.dumps(summary, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
