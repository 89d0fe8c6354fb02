"""OpenVINO against ONNX Runtime on one bundle: FP32, bfloat16 and INT8, taking turns in one process, A B A B.

Every way is opened with the same number of threads and called on the golden inputs, cut or repeated to each shape. A
round calls every way in turn; of each round the ratio to ONNX Runtime's FP32 is taken, because processors change their
speed within minutes. INT8 is ONNX Runtime's dynamic one, and NNCF's in OpenVINO: export --int8 makes both.

Usage:
    python benchmarks/openvino_speed.py BUNDLE [--shapes 1x16,16x128] [--rounds 40] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.bundle import Bundle
from edgeformer.measurement.artifact import check_artifact, golden_calls
from edgeformer.runtimes import OpenOptions, library_versions, requested_providers
from edgeformer.runtimes.session import Session
from edgeformer.system.host import cpu_name, default_threads

_CALLS, _WARM_UP = 3, 3
_BASE = "onnx-fp32 CPUExecutionProvider"


def opened(bundle: Bundle, threads: int, stack: ExitStack) -> Iterator[tuple[str, Session]]:
    """Every way to compute the full graphs that works here; what does not is said."""
    for artifact in bundle.built("full"):
        if artifact.trimmed or artifact.precision not in ("fp32", "int8"):
            continue
        for provider in requested_providers(artifact, "all"):
            # ONNX Runtime's INT8 is slow in OpenVINO, which has no kernel for its pattern; NNCF's takes its place.
            if artifact.precision == "int8" and artifact.is_graph and provider.startswith("openvino"):
                continue
            name = f"{artifact.id} {provider}"
            try:
                yield name, stack.enter_context(bundle.session(artifact, OpenOptions(provider, threads)))
            except EdgeformerError as error:
                print(f"{name}: unavailable: {error}")


def times_ms(sessions: dict[str, Session], call: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Of each way the median of a few calls in every round; all ways in each round, every other round backwards."""
    results: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        for _ in range(_WARM_UP):
            session.run(call)
    for number in range(rounds):
        for name in list(sessions)[:: -1 if number % 2 else 1]:
            session, calls = sessions[name], []
            session.run(call)  # what the one before left in the caches
            for _ in range(_CALLS):
                began = time.perf_counter()
                session.run(call)
                calls.append((time.perf_counter() - began) * 1000)
            results[name].append(statistics.median(calls))
    return results


def summary(results: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median milliseconds, and the median and quartiles of the ratio to ONNX Runtime's FP32 in the same round."""
    rows = {}
    for name, values in results.items():
        ratios = [value / base for value, base in zip(values, results[_BASE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[name] = {"p50_ms": statistics.median(values), "ratio": middle, "ratio_low": low, "ratio_high": high}
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--shapes", default="1x16,1x128,16x64,16x128")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bundle = Bundle.open(arguments.bundle)
    checked = check_artifact(bundle, bundle.artifact("onnx-fp32"))
    header: dict[str, Any] = {
        "host": cpu_name(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "run": bundle.name,
    }
    header |= {"versions": library_versions(), "shapes": {}}
    with ExitStack() as stack:
        sessions = dict(opened(bundle, arguments.threads, stack))
        for shape in arguments.shapes.split(","):
            batch, seq = map(int, shape.split("x"))
            rows = summary(times_ms(sessions, golden_calls(checked, (batch, seq), 1)[0], arguments.rounds))
            header["shapes"][shape] = rows
            for name, row in rows.items():
                spread = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
                print(f"{shape:7} {name:36} {row['p50_ms']:9.2f} ms  {row['ratio']:.2f}× ({spread})", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
