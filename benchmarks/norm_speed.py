"""How much less time RMSNorm takes than LayerNorm: torch's own functions, forward and backward, in turns, one thread.

python benchmarks/norm_speed.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from edgeformer.machine.host import cpu_name

ROWS = 16 * 128
"""A batch of 16 texts of 128 tokens."""
WIDTHS = (256, 384)
CALLS = 100


def timed_ms(norm: Callable[[], torch.Tensor], inputs: torch.Tensor) -> float:
    """Milliseconds of a call with its backward pass, the mean of some."""
    started = time.perf_counter()
    for _ in range(CALLS):
        inputs.grad = None
        norm().sum().backward()
    return 1000 * (time.perf_counter() - started) / CALLS


def compared(width: int, rounds: int) -> dict[str, Any]:
    """LayerNorm, RMSNorm, LayerNorm, …: the share of time that RMSNorm saves, per round."""
    inputs = torch.randn(ROWS, width, requires_grad=True)
    scale, shift = torch.ones(width, requires_grad=True), torch.zeros(width, requires_grad=True)
    layer = lambda: functional.layer_norm(inputs, (width,), scale, shift)  # noqa: E731
    rms = lambda: functional.rms_norm(inputs, (width,), scale, 1e-6)  # noqa: E731
    for norm in (layer, rms):
        timed_ms(norm, inputs)
    times = [(timed_ms(layer, inputs), timed_ms(rms, inputs)) for _ in range(rounds)]
    saved = sorted(1 - rms_ms / layer_ms for layer_ms, rms_ms in times)
    return {
        "hidden_size": width,
        "layer_ms": statistics.median(layer_ms for layer_ms, _ in times),
        "rms_ms": statistics.median(rms_ms for _, rms_ms in times),
        "less_time": {"median": statistics.median(saved), "low": saved[0], "high": saved[-1]},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [compared(width, arguments.rounds) for width in WIDTHS]
    for row in found:
        saved = row["less_time"]
        print(f"{row['hidden_size']}: {saved['median']:+.0%} ({saved['low']:+.0%} to {saved['high']:+.0%}) less time")
    if arguments.json is not None:
        host = {"rows": ROWS, "cpu": cpu_name(), "torch": str(torch.__version__), "python": platform.python_version()}
        document = [{**row, **host} for row in found]
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
