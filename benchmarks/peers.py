"""The same MiniLM by edgeformer and by what people would pick instead, and the light recurrent model beside it.

Every way is a process of its own that stays open and waits; of each round all are asked in turn, every other round
backwards, at every shape. Ratios are of the medians of a round. Token ids are the same for all, without padding. Some
peers want older libraries than edgeformer: they may live in an environment of their own (``--peers-python``):

    python3 -m venv peers
    peers/bin/pip install torch sentence-transformers "optimum-onnx[onnxruntime]" "optimum-intel[openvino]"

Usage: python benchmarks/peers.py --model DIR --bundle BUNDLE --light BUNDLE [--peers-python FILE] [--threads N]
                                  [--shapes 1x16,1x128,16x64,16x128] [--rounds 20] [--json FILE]

--model: MiniLM's folder. --bundle: the same, by ``edgeformer import hf`` and ``export``. --light: the light recurrent
model. A way whose library is missing is said to be unavailable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgeformer.backends import library_versions
from edgeformer.machine.host import cpu_name, default_threads

_PEER = Path(__file__).with_name("_peer.py")
_PROVIDERS = ("CPUExecutionProvider", "openvino-cpu")
_PEERS = (
    "torch:eager", "torch:compile", "sentence-transformers:onnx", "sentence-transformers:openvino",
    "optimum-onnxruntime:O2", "optimum-openvino:",
)  # fmt: skip
_CALLS_S = 0.3


class Way:
    """A child process that times one way on request.

    Args:
        name: of the way, as _peer.py knows it.
        command: that starts it.
        environment: of the process.
        stack: ends it.

    Attributes:
        reason: why it cannot be measured; empty: it can.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], stack: ExitStack) -> None:
        self.name = name
        self._process = stack.enter_context(
            subprocess.Popen(
                [*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={**os.environ, **environment},
            )
        )  # fmt: skip
        stack.callback(self._process.terminate)
        answer = self._answer()
        self.reason = "it ended without an answer" if answer is None else answer.get("unavailable", "")

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def ms(self, batch: int, seq: int, calls: int) -> list[float]:
        """Milliseconds of so many calls. Raises SystemExit where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {seq} {calls}\n")
        self._process.stdin.flush()
        found = self._answer()
        if found is None:
            raise SystemExit(f"{self.name} ended at {batch}x{seq}")
        return [float(value) for value in found]


def opened(asked: argparse.Namespace, stack: ExitStack) -> list[Way]:
    """Every way that works here; the others are said."""
    environment = {"OMP_NUM_THREADS": str(asked.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    wanted = [(f"edgeformer:{provider}", sys.executable, asked.bundle) for provider in _PROVIDERS]
    wanted += [(f"edgeformer:{provider}", sys.executable, asked.light) for provider in _PROVIDERS]
    wanted += [(name, asked.peers_python, asked.model) for name in _PEERS]
    ways = []
    for name, python, model in wanted:
        told = f"light, {name}" if model == asked.light else name
        way = Way(told, [python, str(_PEER), name, str(model), str(asked.threads)], environment, stack)
        if way.reason:
            print(f"{told}: unavailable: {way.reason}", flush=True)
        else:
            ways.append(way)
    return ways


def measured(ways: Sequence[Way], shape: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    """Way → the median milliseconds of each round."""
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    calls = {way.name: max(3, round(_CALLS_S * 1000 / statistics.median(way.ms(*shape, 3)))) for way in ways}
    for number in range(rounds):
        for way in ways[:: -1 if number % 2 else 1]:
            found[way.name].append(statistics.median(way.ms(*shape, calls[way.name])))
    return found


def fastest(found: Mapping[str, Sequence[float]], of: str) -> str | None:
    """The quickest of our ways with that prefix."""
    own = [name for name in found if name.startswith(of)]
    return min(own, key=lambda name: statistics.median(found[name]), default=None)


def rows_of(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Median milliseconds of every way; and its time over that of our quickest, with the quartiles over rounds."""
    base = fastest(found, "edgeformer")
    rows = {}
    for name, values in found.items():
        ratios = [value / own for value, own in zip(values, found[base or name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[name] = {"p50_ms": statistics.median(values), "ratio": middle, "ratio_low": low, "ratio_high": high}
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--light", type=Path, required=True)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--shapes", default="1x16,1x128,16x64,16x128")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told: dict[str, Any] = {"host": cpu_name(), "threads": asked.threads, "rounds": asked.rounds}
    told |= {"versions": library_versions(), "shapes": {}}
    with ExitStack() as stack:
        ways = opened(asked, stack)
        told["ways"] = [way.name for way in ways]
        for shape in asked.shapes.split(","):
            batch, seq = map(int, shape.split("x"))
            rows = rows_of(measured(ways, (batch, seq), asked.rounds))
            told["shapes"][shape] = rows
            for name, row in rows.items():
                spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
                print(f"{shape:7} {name:42} {row['p50_ms']:9.2f} ms  {row['ratio']:.2f}× ours ({spread})", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
