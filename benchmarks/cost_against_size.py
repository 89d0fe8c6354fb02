"""What do time and memory cost by sequence length, batch, loops, width and data? With the exponent of each.

One size at a time is changed of the light recurrent encoder (3 layers × 2 iterations, 256 wide) with random weights,
which take the same time as trained ones, in ONNX Runtime, FP32. All sizes of an axis take turns in every round, and of
each round the ratio to the axis's first size is taken: a machine that changes its speed changes both. Memory is the
peak that opening the graph and one call add to a process of their own. Data: one epoch of training on so many
generated reviews, from the command to its end; its memory is not asked for.

An exponent is the slope of a straight line through the logarithms: 1 means twice the size costs twice as much, 2 four
times. "At the end" is that of the two largest sizes. Operations are counted in the graph, products alone.

Usage:
    python -m benchmarks.cost_against_size run FILE [--work DIR] [--rounds 7] [--threads N]   # about 6 minutes
    python -m benchmarks.cost_against_size table FILE
    python -m benchmarks.cost_against_size figure PNG FILE
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

_RECIPE, _LONGEST = "recurrent_sst2_fast", 512
_REVIEWS = "data.parts={{train: [{{kind: synthetic-reviews, rows: {}, seed: 1}}]}}"


class Axis(NamedTuple):
    """What is changed, and to what.

    Attributes:
        sizes: from the smallest, which ratios are of.
        overrides: of the recipe, for a size.
        shape: batch and tokens of a call, for a size.
    """

    name: str
    sizes: tuple[int, ...]

    def overrides(self, size: int) -> tuple[str, ...]:
        if self.name == "loops":
            return (f"model.iterations={size}",)
        if self.name == "width":
            return (f"model.hidden_size={size}", f"model.ffn_size={4 * size}", f"model.heads={size // 64}")
        return ()

    def shape(self, size: int) -> tuple[int, int]:
        return {"tokens": (1, size), "batch": (size, 64)}.get(self.name, (1, 128))


AXES = (
    Axis("tokens", (16, 32, 64, 128, 256, 512)),
    Axis("batch", (1, 2, 4, 8, 16, 32)),
    Axis("loops", (1, 2, 4, 8)),
    Axis("width", (128, 256, 512, 768)),
)
_DATA = Axis("data", (500, 1000, 2000, 4000))
_HEADINGS = {
    "tokens": "tokens of one text", "batch": "texts of 64 tokens", "loops": "iterations of 3 layers", "width": "width",
    "data": "training texts",
}  # fmt: skip


def exponents(sizes: Sequence[float], costs: Sequence[float]) -> dict[str, float]:
    """Slopes of the logarithms: over all sizes, and of the two largest."""
    x, y = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    slope = statistics.linear_regression(x, y).slope
    return {"all": round(slope, 2), "end": round((y[-1] - y[-2]) / (x[-1] - x[-2]), 2)}


def bundle_of(axis: Axis, size: int, work: Path) -> Path:
    """The model of a size, made where it is not there."""
    from benchmarks.estimates.models import trained_one_step

    words = axis.overrides(size)
    folder = work / "-".join([_RECIPE, *(word.split("=")[1] for word in words)])
    if not (folder / "bundle" / "bundle.json").is_file():
        reviews = _REVIEWS.format(300), "data.split=random-split", "training.batch_size=4"
        trained_one_step(_RECIPE, (*reviews, f"data.max_length={_LONGEST}", *words), folder)
    return folder / "bundle"


def timed(axis: Axis, bundles: Sequence[Path], rounds: int, threads: int) -> list[dict[str, float]]:
    """Of every size: median milliseconds, and median and quartiles of the ratio to the first in the same round."""
    from benchmarks.floors import seconds_of
    from edgeformer.bundle import Bundle
    from edgeformer.measurement.artifact import check_artifact, golden_calls
    from edgeformer.runtimes import OpenOptions

    calls = []
    with ExitStack() as stack:
        for size, path in zip(axis.sizes, bundles, strict=True):
            bundle = Bundle.open(path)
            artifact = next(
                fp32_artifact for fp32_artifact in bundle.built("full") if fp32_artifact.precision == "fp32"
            )
            session = stack.enter_context(bundle.session(artifact, OpenOptions(threads=threads)))
            calls.append(partial(session.run, golden_calls(check_artifact(bundle, artifact), axis.shape(size), 1)[0]))
        took = [[seconds_of(call, 5) for call in calls] for _ in range(rounds)]
    rows = []
    for place in range(len(axis.sizes)):
        ratios = [seconds[place] / seconds[0] for seconds in took]
        low, middle, high = statistics.quantiles(ratios, n=4)
        p50_ms = 1000 * statistics.median(seconds[place] for seconds in took)
        rows.append({"p50_ms": p50_ms, "ratio": middle, "ratio_low": low, "ratio_high": high})
    return rows


def peak_bytes(bundle: Path, shape: tuple[int, int], threads: int) -> int:
    """What opening the graph and one call add to the memory of a process of their own."""
    command = [sys.executable, "-m", "benchmarks.cost_against_size", "peak", str(bundle), *map(str, (*shape, threads))]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()[-1])


def tell_peak(path: Path, shape: tuple[int, int], threads: int) -> None:
    """The child of :func:`peak_bytes`."""
    from edgeformer.bundle import Bundle
    from edgeformer.measurement.artifact import check_artifact, golden_calls
    from edgeformer.measurement.trackers import PeakMeter, resident_bytes
    from edgeformer.runtimes import OpenOptions
    from edgeformer.system.memory import release_heap

    bundle = Bundle.open(path)
    artifact = next(fp32_artifact for fp32_artifact in bundle.built("full") if fp32_artifact.precision == "fp32")
    call = golden_calls(check_artifact(bundle, artifact), shape, 1)[0]
    bundle.session(artifact, OpenOptions(threads=threads)).close()  # the library is loaded
    gc.collect()
    release_heap()
    start, meter = resident_bytes(), PeakMeter()
    meter.reset()
    with bundle.session(artifact, OpenOptions(threads=threads)) as session:
        session.run(call)
        print(meter.peak_bytes() - start)


def trained(rows: int, work: Path) -> float:
    """Seconds of one epoch on so many texts, from the command to its end."""
    tokenizer = next(work.glob("*-tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        changes = [
            _REVIEWS.format(rows), "data.split=random-split", "training.epochs=1",
            f"tokenizer={{kind: file, path: {tokenizer.resolve()}}}",
        ]  # fmt: skip
        command = [sys.executable, "-m", "edgeformer", "train", _RECIPE, "--name", "one", "--artifacts", folder]
        began = time.perf_counter()
        words = [word for change in changes for word in ("--set", change)]
        subprocess.run([*command, *words], check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return time.perf_counter() - began


def measured(axis: Axis, work: Path, rounds: int, threads: int) -> dict[str, Any]:
    """One axis: its sizes with what they cost, and the exponents."""
    from benchmarks.floors import needed_by
    from edgeformer.bundle import Bundle

    if axis is _DATA:
        took = [[trained(size, work) for size in axis.sizes] for _ in range(3)]
        rows = []
        for place in range(len(axis.sizes)):
            ratios = [seconds[place] / seconds[0] for seconds in took]
            fp32_artifact: dict[str, Any] = {"p50_ms": 1000 * statistics.median(seconds[place] for seconds in took)}
            rows.append(
                {
                    **fp32_artifact,
                    "ratio": statistics.median(ratios),
                    "ratio_low": min(ratios),
                    "ratio_high": max(ratios),
                }
            )
    else:
        bundles = [bundle_of(axis, size, work) for size in axis.sizes]
        rows = timed(axis, bundles, rounds, threads)
        for row, bundle, size in zip(rows, bundles, axis.sizes, strict=True):
            shape = axis.shape(size)
            row["memory_bytes"] = statistics.median(peak_bytes(bundle, shape, threads) for _ in range(3))
            row["operations"] = needed_by(Bundle.open(bundle), shape).operations
    results: dict[str, Any] = {"sizes": [{"size": size, **row} for size, row in zip(axis.sizes, rows, strict=True)]}
    results["exponents"] = {
        name: exponents(axis.sizes, [row[key] for row in rows])
        for name, key in (("time", "ratio"), ("memory", "memory_bytes"), ("operations", "operations"))
        if key in rows[0]
    }
    words = ", ".join(
        f"{name} {fp32_artifact['all']:.2f} ({fp32_artifact['end']:.2f} at the end)"
        for name, fp32_artifact in results["exponents"].items()
    )
    print(f"{axis.name}: {words}", flush=True)
    return results


def run(file: Path, work: Path, rounds: int, threads: int) -> None:
    """Measure everything, and write it."""
    from benchmarks.judging import Watch
    from edgeformer.artifacts.files import write_json
    from edgeformer.runtimes import library_versions
    from edgeformer.system.host import code_version, cpu_name, now

    print("about 6 minutes on two quiet cores", flush=True)
    work.mkdir(parents=True, exist_ok=True)
    for axis in AXES:  # models are made before anything is timed
        for size in axis.sizes:
            bundle_of(axis, size, work)
    watch = Watch()
    report = {"host": cpu_name(), "threads": threads, "rounds": rounds, "measured": now()}
    report |= {"code_version": code_version(), "versions": library_versions(), "recipe": _RECIPE}
    axes = {axis.name: measured(axis, work, rounds, threads) for axis in (*AXES, _DATA)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {**report, "axes": axes, "conditions": watch.conditions(threads)})


def table(results: dict[str, Any]) -> str:
    """Sizes and costs, then the exponents, in Markdown."""
    from benchmarks.results_page.tables import markdown

    rows, slopes = [], []
    for name, axis in results["axes"].items():
        first = axis["sizes"][0]
        for row in axis["sizes"]:
            operations = f"{row['operations'] / first['operations']:.1f}×" if "operations" in row else "–"
            took = f"{row['p50_ms']:,.2f} ms" if name != "data" else f"{row['p50_ms'] / 1000:,.1f} s"
            ratio = f"{row['ratio']:.2f}× ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
            memory = f"{row['memory_bytes'] / 2**20:,.0f} MiB" if "memory_bytes" in row else "–"
            rows.append([_HEADINGS[name], f"{row['size']:,}", took, ratio, operations, memory])
        by_name = axis["exponents"]
        words = [by_name.get(which) for which in ("time", "operations", "memory")]
        slopes.append(
            [
                _HEADINGS[name],
                *(
                    f"{fp32_artifact['all']:.2f} ({fp32_artifact['end']:.2f})" if fp32_artifact else "–"
                    for fp32_artifact in words
                ),
            ]
        )
    return "\n\n".join((
        markdown(["", "size", "time", "of the smallest", "operations", "memory"], rows),
        markdown(["exponent, at the end", "time", "operations", "memory"], slopes),
    ))  # fmt: skip


def figure(file: Path, results: dict[str, Any]) -> None:
    """Time and memory against size, each over that of the smallest, both axes logarithmic."""
    from edgeformer.report.canvas import GREY, PALETTE, drawing

    with drawing(file, "Cost against size, light recurrent encoder", 2, (12.0, 4.6)) as axes:
        for place, (axis, key, quantity) in enumerate(
            zip(axes, ("ratio", "memory_bytes"), ("time", "memory"), strict=True)
        ):
            maximum = 1.0
            for colour, (name, fp32_artifact) in zip(PALETTE, results["axes"].items(), strict=False):
                if quantity not in fp32_artifact["exponents"]:
                    continue
                first = fp32_artifact["sizes"][0]
                x = [row["size"] / first["size"] for row in fp32_artifact["sizes"]]
                slope = fp32_artifact["exponents"][quantity]["all"]
                label = f"{_HEADINGS[name]}, from {first['size']:,}: {slope:.2f}"
                axis.plot(x, [row[key] / first[key] for row in fp32_artifact["sizes"]], "o-", color=colour, label=label)
                maximum = max(maximum, x[-1])
            axis.plot([1, maximum], [1, maximum], "--", color=GREY, linewidth=1, label="as much as the size: 1.00")
            axis.set(xscale="log", yscale="log", xlabel="times the smallest size", ylabel=f"times its {quantity}")
            axis.legend(frameon=False, fontsize=8, title="exponent" if place == 0 else None, title_fontsize=8)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("--work", type=Path, default=Path("artifacts/cost-against-size"))
    running.add_argument("--rounds", type=int, default=7)
    running.add_argument("--threads", type=int)
    commands.add_parser("table").add_argument("file", type=Path)
    drawn = commands.add_parser("figure")
    drawn.add_argument("picture", type=Path)
    drawn.add_argument("file", type=Path)
    child = commands.add_parser("peak")
    child.add_argument("bundle", type=Path)
    child.add_argument("numbers", type=int, nargs=3)
    arguments = parser.parse_args()
    if arguments.command == "run":
        from edgeformer.system.host import default_threads

        run(arguments.file, arguments.work.resolve(), arguments.rounds, arguments.threads or default_threads())
    elif arguments.command == "table":
        print(table(json.loads(arguments.file.read_text(encoding="utf-8"))))
    elif arguments.command == "figure":
        figure(arguments.picture, json.loads(arguments.file.read_text(encoding="utf-8")))
    else:
        batch, seq, threads = arguments.numbers
        tell_peak(arguments.bundle, (batch, seq), threads)


if __name__ == "__main__":
    main()
