"""Two ways of training the light recurrent model on a CPU, in alternating processes; prints the ratio of medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

STEP_TIMES = Path(__file__).with_name("_training_steps.py")


def step_times_ms(environment: dict[str, str], *arguments: str) -> list[float]:
    """Milliseconds per training step of one child process."""
    command = [sys.executable, str(STEP_TIMES), *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


Variant = tuple[str, dict[str, str], list[str]]
"""Name, environment, arguments of the child."""


def compare(name: str, a: Variant, b: Variant, rounds: int) -> None:
    """Run A B A B …, each variant ``rounds`` times, and print medians and their ratio per round."""
    medians: dict[str, list[float]] = {a[0]: [], b[0]: []}
    for number in range(rounds):
        for label, environment, arguments in (a, b):
            medians[label].append(statistics.median(step_times_ms(environment, *arguments)))
        ratio = medians[a[0]][-1] / medians[b[0]][-1]
        print(f"round {number + 1}: {a[0]} {medians[a[0]][-1]:.0f} ms, {b[0]} {medians[b[0]][-1]:.0f} ms, {ratio:.2f}×")
    ratios = sorted(x / y for x, y in zip(medians[a[0]], medians[b[0]], strict=True))
    print(f"{name}: {statistics.median(ratios):.2f}× (from {ratios[0]:.2f} to {ratios[-1]:.2f})")
