"""What two processes bring over one on the same cores, and how far their losses are apart.

    python benchmarks/several_processes.py [--rounds 3] [--steps 25] [--out benchmarks/results/several_processes.json]

The same recipe (crt_mini's model on generated text, without dropout) is trained for a few steps by one process with all
cores, by two with half of them each (copies, then shards), and so on again. Tokens per second are the median over the
steps behind the fifth. That is the cost of working together on one machine; cards and networks are not measured.

    python benchmarks/several_processes.py --model

prints the cost model of docs/guides/several-machines.md instead; nothing of that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from edgeformer.artifacts.files import write_json
from edgeformer.system.host import cpu_name, usable_cores

PARTS = (
    "data.parts={train: [{kind: synthetic-reviews, rows: 4000, seed: 1}], "
    "validation: [{kind: synthetic-reviews, rows: 60, seed: 2}], test: [{kind: synthetic-reviews, rows: 60, seed: 3}]}"
)
CHANGES = [
    PARTS,
    "data.first_n=null",
    "data.min_characters=20",
    "model.vocab_size=800",
    "model.dropout=0",
    "training.precision=fp32",
    "training.log_every=1",
]
WARM_UP = 5
MBIT = 1e6 / 8
PARAMETERS = 92_053_760  # recipes/crt_deep_rtx4050.yaml


def train(name: str, processes: int, steps: int, folder: Path, *more: str) -> list[dict[str, float]]:
    """The step records of a training by several processes that share the cores."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    sets = [part for change in CHANGES for part in ("--set", change)]
    command = ["-m", "edgeformer", "train", "crt_mini", "--name", name, "--artifacts", str(folder), *sets, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, usable_cores() // processes))}
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), *command, "--max-steps", str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def measure(rounds: int, steps: int) -> dict[str, object]:
    """Tokens per second of every way by round, and the largest difference of a step's loss from one process's."""
    ways = {"one process": (1, ()), "two, copies (DDP)": (2, ()), "two, shards (FSDP2)": (2, ("--shard",))}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    differences: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            losses: dict[str, list[float]] = {}
            for place, (way, (processes, more)) in enumerate(ways.items()):
                records = train(f"{number}-{place}", processes, steps, Path(folder), *more)
                rates[way].append(statistics.median(record["tokens_per_s"] for record in records[WARM_UP:]))
                losses[way] = [record["loss"] for record in records]
                pairs = zip(losses[way], losses["one process"], strict=True)
                differences[way] = max(differences.get(way, 0.0), max(abs(a - b) for a, b in pairs))
    baseline = rates["one process"]
    return {
        "machine": f"{cpu_name()}, {usable_cores()} cores, torch {torch.__version__}",
        "steps": steps,
        "tokens_per_s": rates,
        "ratio": {way: [a / b for a, b in zip(results, baseline, strict=True)] for way, results in rates.items()},
        "largest_loss_difference": differences,
    }


def show_measured(results: dict[str, object]) -> None:
    """A Markdown table."""
    print(results["machine"])
    print("\n| | tokens/s | against one process | largest difference of a step's loss |\n|---|--:|--:|--:|")
    for way, rates in results["tokens_per_s"].items():  # type: ignore[attr-defined]
        ratios = results["ratio"][way]  # type: ignore[index]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        difference = results["largest_loss_difference"][way]  # type: ignore[index]
        print(f"| {way} | {statistics.median(rates):,.0f} | {spread} | {difference:.1e} |")


def show_model() -> None:
    """Communication and memory of CRT-Deep, by formula."""
    print("| processes | memory of a copy | memory of a shard | sent per step | at 1 Gbit/s | 10 Gbit/s | 100 Gbit/s |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for count in (1, 2, 4, 8, 16):
        copy, shard = 16 * PARAMETERS, (8 + 16 / count) * PARAMETERS
        sent = 2 * (count - 1) / count * 4 * PARAMETERS
        seconds = [f"{sent / (speed * 1000 * MBIT):.2f} s" if sent else "–" for speed in (1, 10, 100)]
        displayed = f"{shard / 2**30:.2f} GiB" if count > 1 else "–"
        print(f"| {count} | {copy / 2**30:.2f} GiB | {displayed} | {sent / 1e6:,.0f} MB | {' | '.join(seconds)} |")


def main() -> None:
    """Read the arguments, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--model", action="store_true", help="print the cost model instead")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.model:
        show_model()
        return
    results = measure(arguments.rounds, arguments.steps)
    show_measured(results)
    if arguments.out:
        write_json(arguments.out, results)


if __name__ == "__main__":
    main()
