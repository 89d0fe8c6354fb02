"""The same MiniLM by edgeformer and by common alternatives, and the light recurrent model.

Every way is a process of its own that stays open and waits; of each round all are asked in turn, every other round
backwards, at every shape. Ratios are of the medians of a round. Token ids are the same for all, without padding. Some
peers want older libraries than edgeformer: they may live in an environment of their own (``--peers-python``):

    python3 -m venv peers
    peers/bin/pip install torch sentence-transformers "optimum-onnx[onnxruntime]" "optimum-intel[openvino]"

Usage: python -m benchmarks.peers --model DIR --bundle BUNDLE --light BUNDLE [--peers-python FILE] [--threads N]
                                  [--shapes 1x16,1x128,16x64,16x128] [--rounds 10] [--minutes 9] [--json FILE]

--model: MiniLM's folder. --bundle: the same, by ``edgeformer import hf`` and ``export``. --light: the light recurrent
model. The bars, at every shape: no peer is faster than our quickest way, and the light model takes half of its time at
most. A way whose library is missing is reported; without one of the peers its target is not judged, and the
exit code is 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.floors import needed_by
from benchmarks.judging import Bar, Limit, Watch, judged, report_bars, unless
from benchmarks.ways import Way, environment
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.bundle import Bundle
from edgeformer.runtimes import library_versions
from edgeformer.system.host import cpu_name, default_threads

_PROVIDERS = ("CPUExecutionProvider", "openvino-cpu")
_PEERS = (
    "torch:eager", "torch:compile", "sentence-transformers:onnx", "sentence-transformers:openvino",
    "optimum-onnxruntime:O2", "optimum-openvino:",
)  # fmt: skip
_LIGHT = "light, "
_CALLS_S = 0.2


def opened(arguments: argparse.Namespace, stack: ExitStack) -> tuple[list[Way], dict[str, str]]:
    """Every way that works here, and why the others do not."""
    target = [(f"edgeformer:{provider}", sys.executable, arguments.bundle) for provider in _PROVIDERS]
    target += [(f"edgeformer:{provider}", sys.executable, arguments.light) for provider in _PROVIDERS]
    target += [(name, arguments.peers_python, arguments.model) for name in _PEERS]
    ways, absent = [], {}
    for name, python, model in target:
        called = f"{_LIGHT}{name}" if model == arguments.light else name
        ours = environment(arguments.threads, torch_alone=name.startswith("torch:"))
        way = Way(called, [python, "-m", "benchmarks._peer", name, str(model), str(arguments.threads)], ours, stack)
        if way.reason:
            absent[called] = way.reason
            print(f"{called}: unavailable: {way.reason}", flush=True)
        else:
            ways.append(way)
    return ways, absent


def measured(ways: Sequence[Way], shape: tuple[int, int], rounds: int, limit: Limit) -> dict[str, list[float]]:
    """Way → the median milliseconds of each round."""
    results: dict[str, list[float]] = {way.name: [] for way in ways}
    calls = {way.name: max(3, round(_CALLS_S * 1000 / statistics.median(way.ask((*shape, 3))))) for way in ways}
    for number in limit.rounds(rounds):
        for way in ways[:: -1 if number % 2 else 1]:
            results[way.name].append(statistics.median(way.ask((*shape, calls[way.name]))))
    return results


def fastest(results: Mapping[str, Sequence[float]]) -> str | None:
    """The quickest of our ways with the peers' weights."""
    ours = [name for name in results if name.startswith("edgeformer")]
    return min(ours, key=lambda name: statistics.median(results[name]), default=None)


def bars_of(shape: str, results: Mapping[str, Sequence[float]]) -> list[Bar]:
    """At a shape: each peer's time over our quickest way's, 1 at least; and the light model's over it, 0.5 at most."""
    base, bars = fastest(results), list[Bar]()
    for name in _PEERS:
        ratios = [peer / ours for peer, ours in zip(results.get(name, ()), results[base] if base else (), strict=False)]
        absent = [
            f"{label} is unavailable" for label, present in ((name, name in results), ("our own", base)) if not present
        ]
        bars.append(judged(f"{shape} {name} over ours", ratios, 1.0, at_least=True, missing=absent))
    light = min((results[name] for name in results if name.startswith(_LIGHT)), key=statistics.median, default=())
    ratios = [ours / baseline for ours, baseline in zip(light, results[base] if base else (), strict=False)]
    absent = [
        f"{label} is unavailable" for label, present in (("the light model", light), ("our own", base)) if not present
    ]
    bars.append(judged(f"{shape} light over MiniLM, both ours", ratios, 0.5, at_least=False, missing=absent))
    return bars


def operations_ratios(light: Path, baseline: Path, shapes: Sequence[str]) -> tuple[dict[str, float], dict[str, str]]:
    """Operations of the light model's products over those of MiniLM's, counted in what ONNX Runtime runs.

    Returns:
        Shape → ratio; and why there is none.
    """
    try:
        models = [Bundle.open(folder) for folder in (light, baseline)]
        pairs = {shape: [needed_by(model, batch_and_seq(shape)).operations for model in models] for shape in shapes}
    except EdgeformerError as error:
        return {}, {"operations": str(error)}
    return {shape: counted / base for shape, (counted, base) in pairs.items()}, {}


def batch_and_seq(shape: str) -> tuple[int, int]:
    """16x64 → (16, 64)."""
    batch, seq = map(int, shape.split("x"))
    return batch, seq


def rows_of(results: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Median milliseconds of every way; and its time over that of our quickest, with the quartiles over rounds."""
    base = fastest(results)
    rows = {}
    for name, values in results.items():
        ratios = [value / ours for value, ours in zip(values, results[base or name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[name] = {"p50_ms": statistics.median(values), "ratio": middle, "ratio_low": low, "ratio_high": high}
    return rows


def main() -> int:
    """Command line; 3 where a bar was not judged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--light", type=Path, required=True)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--shapes", default="1x16,1x128,16x64,16x128")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of everything; rounds that would end later are left out"
    )
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes, watch = arguments.shapes.split(","), Watch()
    limit = Limit(arguments.minutes, len(shapes))
    limit.tell(2 + len(shapes) * (0.5 + arguments.rounds * 0.11))  # opening; torch.compile at each shape
    report: dict[str, Any] = {"host": cpu_name(), "threads": arguments.threads, "rounds": arguments.rounds}
    report |= {"versions": library_versions(), "shapes": {}}
    times: dict[str, dict[str, list[float]]] = {}
    counted, uncounted = operations_ratios(arguments.light, arguments.bundle, shapes)
    with ExitStack() as stack:
        ways, report["unavailable"] = opened(arguments, stack)
        report["unavailable"] |= uncounted
        report["ways"], report["operations"] = [way.name for way in ways], counted
        for shape in shapes:
            times[shape] = measured(ways, batch_and_seq(shape), arguments.rounds, limit)
            rows = rows_of(times[shape])
            report["shapes"][shape] = rows
            for name, row in rows.items():
                spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
                print(f"{shape:7} {name:42} {row['p50_ms']:9.2f} ms  {row['ratio']:.2f}× ours ({spread})", flush=True)
        report["conditions"] = watch.conditions(arguments.threads)
    bars = [bar for shape in shapes for bar in bars_of(shape, times[shape])]
    report["bars"] = unless(report["conditions"]["disturbed"], bars)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report_bars(report["bars"])


if __name__ == "__main__":
    sys.exit(main())
