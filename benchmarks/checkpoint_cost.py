"""What checkpoints cost, beside the training that they save; and how much work a kill at the worst moment loses.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_cost.py [--folder DIR] [--saves 6] [--kills 6] [--out FILE.json]

Two states are saved by the real training loop on random tokens, step, save, step, save: that of `crt_mini`, and that of
the 92M `crt_deep_rtx4050` (weights and AdamW's moments; its steps are cut to 64 tokens, which changes no state). Then
small trainings are killed while they write a checkpoint, right before its rename: what was computed since the one
before is lost. The disk decides: --folder says where.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

from plan_accuracy import loop_on_random_rows

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.units import format_bytes
from edgeformer.system.host import cpu_name, usable_cores

STATES = {
    "crt_mini": [],
    "crt_deep_rtx4050": ["training.batch_size=1", "training.accumulation=1", "data.sequence_length=64"],
}
MINUTES = (1, 5, 10, 30)
WINDOW_S = 6.0
"""Seconds between the checkpoints of the trainings that are killed, whose epochs take longer than that."""
SMALL = (
    "data.parts.train.0.rows=20000",
    "training.batch_size=1",
    "training.epochs=4000",
    f"training.checkpoint_minutes={WINDOW_S / 60}",
)


def timed_saves(name: str, saves: int, folder: Path) -> dict[str, Any]:
    """A row: seconds of each step and of each save after it, and the bytes of a state."""
    import torch

    from edgeformer.artifacts.progress import SILENT
    from edgeformer.models import load_recipe
    from edgeformer.training.loop.checkpoint import Checkpoints
    from edgeformer.training.loop.loop import MetricsLog

    steps_s, saves_s = list[float](), list[float]()

    class Timed(Checkpoints):
        def save(self, *positional: Any, **keywords: Any) -> None:
            steps_s.append(loop.position.training_seconds - sum(steps_s))
            started = time.perf_counter()
            super().save(*positional, **keywords)
            saves_s.append(time.perf_counter() - started)

    recipe = load_recipe(name, [*STATES[name], "training.checkpoint_minutes=1e-9", "training.precision=fp32"])
    torch.manual_seed(0)
    loop = loop_on_random_rows(recipe, saves, folder)
    loop.checkpoints = Timed(folder)
    with closing(MetricsLog(folder, loop.position)) as log:
        loop.run(Event(), log, SILENT, saves)
    newest = max((folder / "checkpoints").iterdir())
    # The first step makes the optimizer's state and warms up; the last save, after the epoch, follows no step.
    save_s = statistics.median(saves_s[1:])
    return {
        "recipe": name,
        "parameters": sum(parameter.numel() for parameter in loop.plain_model.parameters()),
        "state_bytes": sum({f.stat().st_ino: f.stat().st_size for f in newest.iterdir()}.values()),
        "step_s": statistics.median(steps_s[1:saves]),
        "save_s": save_s,
        "least_s": min(saves_s[1:]),
        "most_s": max(saves_s[1:]),
        "n": len(saves_s) - 1,
        "share_by_minutes": {str(minutes): save_s / (60 * minutes + save_s) for minutes in MINUTES},
    }


def killed_while_saving(folder: Path) -> dict[str, float]:
    """Train, kill right before the third checkpoint gets its name; what is lost, by the clock and in training time."""
    sets = [part for override in SMALL for part in ("--set", override)]
    command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--name", "run", "--artifacts", str(folder)]
    states = folder / "run" / "checkpoints"
    with subprocess.Popen([*command, *sets], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not list(states.glob(".000003-step-*.tmp/sha256.json")):  # written last of all
            if process.poll() is not None:
                raise SystemExit("a training that is not killed must continue")
            time.sleep(0.001)
        process.kill()
        ended = time.time()
    newest = max(states.glob("[0-9]*-step-*"))
    saved = json.loads((newest / "state.json").read_text(encoding="utf-8"))["step"]
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "lost_s": ended - (newest / "sha256.json").stat().st_mtime,
        "resumes_at_step": saved,
        "last_logged_step": max(record["step"] for record in records),
    }


def main() -> None:
    """Measure and print; write the JSON where ``--out`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--saves", type=int, default=6, help="0: kills only")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows, kills = [], []
    for name in STATES if options.saves else ():
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = timed_saves(name, options.saves, Path(folder))
        rows.append(row)
        shares = ", ".join(f"{minutes} min {share:.2%}" for minutes, share in row["share_by_minutes"].items())
        size = format_bytes(row["state_bytes"])
        spread = f"{row['least_s']:.2f}–{row['most_s']:.2f}, n = {row['n']}"
        print(f"{name}: {row['parameters']:,} parameters, {size}: {row['save_s']:.2f} s a save ({spread})")
        print(f"  beside steps of {row['step_s']:.2f} s; share of the time with one every {shares}", flush=True)
    for _ in range(options.kills):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            kills.append(killed_while_saving(Path(folder)))
        print(f"killed: {kills[-1]['lost_s']:.2f} s lost of {WINDOW_S:.0f} s between checkpoints", flush=True)
    document: dict[str, object] = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "rows": rows,
        "window_s": WINDOW_S,
        "kills": kills,
    }
    if options.out:
        write_json(options.out, document)


if __name__ == "__main__":
    main()
