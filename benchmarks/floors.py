"""How far is each runtime from what the processor could do at best? The floor and the runtimes take turns in one run.

The floor of a call is the larger of two times: its matrix products at the rate of one large product in the same
precision, and its weights read once from memory (a quarter of FP32's bytes in INT8, half in bfloat16), also where loops
use them again. Both rates are measured in every round, because processors change their speed within minutes; of each
round the ratio is taken.

Usage:
    python -m benchmarks.floors BUNDLE… [--shapes 1x16,1x128,16x64,16x128] [--rounds 20] [--threads N] [--json FILE]

A bundle made with ``edgeformer export --int8`` has INT8 for both runtimes. bfloat16 is of processors that multiply in
it. Where OpenVINO is not installed, ONNX Runtime is measured alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper

from benchmarks.openvino_speed import opened
from edgeformer.backends import default_provider, library_versions
from edgeformer.backends.onnxruntime.session import OnnxSession
from edgeformer.backends.session import Session
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import EdgeformerError
from edgeformer.machine.host import cpu_name, default_threads
from edgeformer.stages.profiling.estimating.listing import ListSpec, run_listing
from edgeformer.stages.profiling.estimating.work import count_nodes, stored_weight_bytes, total
from edgeformer.stages.profiling.messages import CheckedArtifact, Item

_ROWS, _WIDTH = 2048, 1024
_OPERATIONS = 2 * _ROWS * _WIDTH * _WIDTH
_LARGE = 1 << 26
"""Numbers of four bytes that no cache holds."""
_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_BARS = {
    ("fp32", "1x16"): 3.0, ("fp32", "1x128"): 2.0, ("fp32", "16x64"): 1.4, ("fp32", "16x128"): 1.4,
    ("int8", "16x128"): 2.2,
}  # fmt: skip
"""What is wanted of the best runtime, as a multiple of the floor."""


class Needed(NamedTuple):
    """What one call cannot do without: operations of its products, and bytes of their weights, each of these once."""

    operations: float
    weight_bytes: float


def seconds_of(call: Callable[[], object], calls: int = 3) -> float:
    """The fastest of a few calls after one that warms up."""
    call()
    found = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def product(file: Path, operator: str, types: tuple[int, int], weights: npt.NDArray[Any]) -> Path:
    """A graph of one product with constant weights, which the runtime packs beforehand.

    Args:
        operator: MatMul or MatMulInteger.
        types: of what goes in and comes out, ONNX's numbers.
        weights: [width, width].
    """
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", types[0], (_ROWS, _WIDTH))],
        [helper.make_tensor_value_info("y", types[1], (_ROWS, _WIDTH))],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


class Machine:
    """What the processor does at best at this moment.

    Args:
        folder: for the graphs of its probes.
        threads: of every probe.
        stack: closes the sessions.
    """

    def __init__(self, folder: Path, threads: int, stack: ExitStack) -> None:
        torch.set_num_threads(threads)
        draw = np.random.default_rng(0)
        provider = default_provider("cpu")
        square = (_WIDTH, _WIDTH)
        floats, bytes_ = draw.normal(size=square).astype(np.float32), draw.integers(-127, 128, square).astype(np.int8)
        graphs = {
            "fp32": product(folder / "fp32.onnx", "MatMul", (TensorProto.FLOAT, TensorProto.FLOAT), floats),
            "int8": product(folder / "int8.onnx", "MatMulInteger", (TensorProto.UINT8, TensorProto.INT32), bytes_),
        }
        feeds: dict[str, npt.NDArray[Any]] = {
            "fp32": draw.normal(size=(_ROWS, _WIDTH)).astype(np.float32),
            "int8": draw.integers(0, 256, (_ROWS, _WIDTH)).astype(np.uint8),
        }
        self._products: dict[str, list[Callable[[], object]]] = {}
        for name, file in graphs.items():
            session = stack.enter_context(OnnxSession(file, provider, threads))
            self._products[name] = [partial(session.run, {"x": feeds[name]})]
        left, right = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
        self._products["fp32"].append(partial(torch.mm, left, right))
        self._products["bf16"] = [partial(torch.mm, left.bfloat16(), right.bfloat16())]
        self._source, self._target = torch.ones(_LARGE), torch.empty(_LARGE)

    def rates(self) -> dict[str, float]:
        """Operations per second in each precision, by the faster library; and bytes per second of a copy."""
        found = {
            name: max(_OPERATIONS / seconds_of(product) for product in products)
            for name, products in self._products.items()
        }
        found["bandwidth"] = 2 * 4 * _LARGE / seconds_of(partial(self._target.copy_, self._source))
        return found


def needed_by(bundle: Bundle, shape: tuple[int, int]) -> Needed:
    """What one call of the FP32 graph needs. Raises EdgeformerError where it does not run."""
    checked = CheckedArtifact.of(bundle, bundle.artifact("onnx-fp32"))
    item: Item = ("steady", *shape)
    listing = run_listing(ListSpec(checked=checked, items=(item,), threads=1))
    if item not in listing.items:
        raise EdgeformerError(f"{bundle.name} at {shape}: {listing.refused[item]}")
    nodes = listing.items[item].nodes
    works = count_nodes(nodes)
    products = total([work for work in works if work.is_product])
    return Needed(products.operations, stored_weight_bytes(nodes, works, checked.artifact))


def floor_s(work: Needed, rates: Mapping[str, float], precision: str) -> float:
    """The least time of a call."""
    read = work.weight_bytes * _BYTES[precision] / _BYTES["fp32"]
    return max(work.operations / rates[precision], read / rates["bandwidth"])


def precision_of(way: str) -> str:
    """In what a way multiplies, by its name: ``onnx-int8 CPUExecutionProvider``, ``onnx-fp32 openvino-cpu-bf16``."""
    return next((precision for precision in ("int8", "bf16") if precision in way), "fp32")


def rounds_of(
    sessions: Mapping[str, Session], call: Mapping[str, Any], work: Needed, machine: Machine, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Of every way and round: milliseconds, and their ratio to the floor of the same round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    for number in range(rounds):
        rates = machine.rates()
        for name in list(sessions)[:: -1 if number % 2 else 1]:
            took = seconds_of(partial(sessions[name].run, dict(call)))
            found[name].append((took * 1000, took / floor_s(work, rates, precision_of(name))))
    return found


def rows_of(found: Mapping[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Median milliseconds, and median and quartiles of the multiple of the floor."""
    rows = {}
    for name, values in found.items():
        ratios = [ratio for _, ratio in values]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        p50_ms = statistics.median(ms for ms, _ in values)
        rows[name] = {"p50_ms": p50_ms, "floors": middle, "floors_low": low, "floors_high": high}
    return rows


def spread_of(row: Mapping[str, float]) -> str:
    """The multiple of the floor with its quartiles, for the terminal."""
    return f"{row['floors']:.2f} floors ({row['floors_low']:.2f} to {row['floors_high']:.2f})"


def best(rows: Mapping[str, Mapping[str, float]], precision: str) -> tuple[str, float] | None:
    """The way that is fastest in a precision, and its multiple of the floor; None: there is no such way."""
    own = {name: row for name, row in rows.items() if precision_of(name) == precision}
    name = min(own, key=lambda way: own[way]["p50_ms"], default=None)
    return (name, own[name]["floors"]) if name is not None else None


def measured(bundle: Bundle, shapes: list[str], machine: Machine, rounds: int, threads: int) -> dict[str, Any]:
    """Every shape of one bundle, told as it goes."""
    checked = CheckedArtifact.of(bundle, bundle.artifact("onnx-fp32"))
    told: dict[str, Any] = {}
    with ExitStack() as stack:
        sessions = dict(opened(bundle, threads, stack))
        for shape in shapes:
            batch, seq = map(int, shape.split("x"))
            work = needed_by(bundle, (batch, seq))
            found = rounds_of(sessions, checked.calls((batch, seq), 1)[0], work, machine, rounds)
            rows = rows_of(found)
            told[shape] = {"operations": work.operations, "weight_bytes": work.weight_bytes, "ways": rows, "best": {}}
            for name, row in rows.items():
                print(f"{bundle.name} {shape:7} {name:36} {row['p50_ms']:8.2f} ms  {spread_of(row)}", flush=True)
            for precision in _BYTES:
                if (fastest := best(rows, precision)) is not None:
                    bar = _BARS.get((precision, shape))
                    told[shape]["best"][precision] = {"way": fastest[0], "floors": fastest[1], "bar": bar}
    return told


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--shapes", default="1x16,1x128,16x64,16x128")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told: dict[str, Any] = {"host": cpu_name(), "threads": asked.threads, "rounds": asked.rounds}
    told |= {"versions": library_versions(), "bundles": {}}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        machine = Machine(Path(folder), asked.threads, stack)
        told["rates"] = machine.rates()
        for path in asked.bundles:
            bundle = Bundle.open(path)
            shapes = asked.shapes.split(",")
            told["bundles"][bundle.name] = measured(bundle, shapes, machine, asked.rounds, asked.threads)
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
