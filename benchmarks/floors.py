"""How far is each runtime from what the processor could do at best? The floor and the runtimes take turns in one run.

The floor of a call is the larger of two times: its matrix products at the rate of one large product in the same
precision, and its weights read once from memory (a quarter of FP32's bytes in INT8, half in bfloat16), also where loops
use them again. Both rates are measured in every round, before the runtimes and after them, because processors change
their speed within minutes; the higher one counts, and of each round the ratio is taken. Products are those of ONNX
Runtime, OpenVINO and torch, whichever is the fastest, but INT8's, which are ONNX Runtime's alone; torch's are computed
in a process of its own, with pinned threads.

A bundle made with ``edgeformer export --int8`` has INT8 for both runtimes. bfloat16 is of processors that multiply in
it. Where OpenVINO is not installed, ONNX Runtime is measured alone; then a bar that it misses is not judged, and the
exit code is 3.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from benchmarks.frame import run_script
from benchmarks.judging import MET, Bar, Limit, Watch, judged, report_bars, unless
from benchmarks.ways import Way, environment, serve
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import write_json
from edgeformer.bundle import Bundle
from edgeformer.estimate.listing import ListJob, run_listing
from edgeformer.estimate.operators import count_nodes, stored_weight_bytes, total
from edgeformer.measurement.artifact import Item, check_artifact, golden_calls
from edgeformer.runtimes import OpenOptions, default_provider, library_versions, requested_providers
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.openvino.session import OPENVINO
from edgeformer.runtimes.session import Session
from edgeformer.system.host import cpu_name, default_threads

_ROWS, _WIDTH = 2048, 1024
_OPERATIONS = 2 * _ROWS * _WIDTH * _WIDTH
_LARGE = 1 << 13
"""Rows and columns of a matrix that no cache holds: 256 MiB."""
_PROBES = 12
"""Calls of a product: of three, all may be slow in INT8, and a rate a third too low puts runtimes below their floor."""
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
    samples = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return min(samples)


def product(file: Path, operator: str, types: tuple[int, int], weights: npt.NDArray[Any]) -> Path:
    """A graph of one product with constant weights [width, width], which the runtime packs beforehand."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", types[0], (_ROWS, _WIDTH))],
        [helper.make_tensor_value_info("y", types[1], (_ROWS, _WIDTH))],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


def serve_torch(threads: int) -> None:
    """Child process: what torch reaches at this moment, with pinned threads.

    A request is answered by operations per second of one large product in ``fp32`` and ``bf16``, and by ``bandwidth``:
    bytes per second of a copy, or of reading a matrix once for a product with a vector, whichever is more.
    """

    def make() -> Callable[[object], dict[str, float]]:
        import torch

        torch.set_num_threads(threads)
        floats = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
        half = floats[0].bfloat16(), floats[1].bfloat16()
        source, target, vector = torch.ones(_LARGE, _LARGE), torch.empty(_LARGE, _LARGE), torch.ones(_LARGE)

        def answer(_: object) -> dict[str, float]:
            moved = 2 * source.nbytes / seconds_of(partial(target.copy_, source))
            read = source.nbytes / seconds_of(partial(torch.mv, source, vector))
            products = {"fp32": floats, "bf16": half}
            rates = {name: _OPERATIONS / seconds_of(partial(torch.mm, *pair)) for name, pair in products.items()}
            return {**rates, "bandwidth": max(moved, read)}

        return answer

    serve("torch", make)


class Machine:
    """What the processor does at best at this moment, with so many threads for every probe."""

    def __init__(self, folder: Path, threads: int, stack: ExitStack) -> None:
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
        self._products: list[tuple[str, Callable[[], object]]] = []
        for name, file in graphs.items():
            session = stack.enter_context(OnnxSession(file, provider, threads))
            self._products.append((name, partial(session.run, {"x": feeds[name]})))
        if OPENVINO.missing() is None:
            import openvino

            for name, hint in (("fp32", "f32"), ("bf16", "bf16")):
                options = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
                compiled = openvino.Core().compile_model(graphs["fp32"], "CPU", options)
                self._products.append((name, partial(compiled.create_infer_request().infer, {"x": feeds["fp32"]})))
        command = [sys.executable, "-c", f"from benchmarks.floors import serve_torch; serve_torch({threads})"]
        self._torch = Way("torch", command, environment(threads, torch_alone=True), stack)
        if self._torch.reason:
            raise SystemExit(f"the rates of torch: {self._torch.reason}")

    def rates(self) -> dict[str, float]:
        """Operations per second in each precision, by the faster library; and bytes per second, of a copy or read."""
        samples: dict[str, float] = self._torch.ask("rates")
        for name, product in self._products:
            samples[name] = max(_OPERATIONS / seconds_of(product, _PROBES), samples.get(name, 0.0))
        return samples


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


def needed_by(bundle: Bundle, shape: tuple[int, int]) -> Needed:
    """What one call of the FP32 graph needs. Raises EdgeformerError where it does not run."""
    checked = check_artifact(bundle, bundle.artifact("onnx-fp32"))
    item: Item = ("steady", *shape)
    listed = run_listing(ListJob(files=checked, items=(item,), threads=1))[item]
    if isinstance(listed, str):
        raise EdgeformerError(f"{bundle.name} at {shape}: {listed}")
    nodes = listed.nodes
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
    sessions: Mapping[str, Session], call: Mapping[str, Any], work: Needed, machine: Machine, rounds: Iterable[int]
) -> dict[str, list[tuple[float, float]]]:
    """Of every way and round: milliseconds, and their ratio to the floor of the same round."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    for number in rounds:
        start, took = machine.rates(), dict[str, float]()
        for name in list(sessions)[:: -1 if number % 2 else 1]:
            took[name] = seconds_of(partial(sessions[name].run, dict(call)))
        # A processor that became faster in between must not put a runtime below its floor.
        rates = {precision: max(rate, start[precision]) for precision, rate in machine.rates().items()}
        for name, seconds in took.items():
            samples[name].append((seconds * 1000, seconds / floor_s(work, rates, precision_of(name))))
    return samples


def rows_of(samples: Mapping[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Median milliseconds, and median and quartiles of the multiple of the floor."""
    rows = {}
    for name, values in samples.items():
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
    group = {name: row for name, row in rows.items() if precision_of(name) == precision}
    name = min(group, key=lambda way: group[way]["p50_ms"], default=None)
    return (name, group[name]["floors"]) if name is not None else None


def bar_of(name: str, shape: str, precision: str, values: list[float], absent: Iterable[str]) -> Bar | None:
    """Return the verdict on the quickest way in a precision; None where there is no bar.

    ``values`` are that way's multiples of the floor by round; only where no way is ``absent`` does it miss for good.
    """
    target = _BARS.get((precision, shape))
    if target is None:
        return None
    label = f"{name} {shape} {precision} over its floor"
    if not values:
        return judged(label, values, target, at_least=False, missing=[f"the bundle has nothing in {precision}"])
    bar = judged(label, values, target, at_least=False)
    return bar if bar["verdict"] == MET else judged(label, values, target, at_least=False, missing=absent)


def measured(
    bundle: Bundle, shapes: list[str], rounds: int, threads: int, machine: Machine, limit: Limit
) -> tuple[dict[str, Any], list[Bar]]:
    """Measure every shape of one bundle with progress messages; return the results and their targets."""
    checked = check_artifact(bundle, bundle.artifact("onnx-fp32"))
    report: dict[str, Any] = {}
    bars: list[Bar] = []
    why = OPENVINO.missing()
    absent = [] if why is None else [f"OpenVINO is unavailable: {why}"]
    with ExitStack() as stack:
        sessions = dict(opened(bundle, threads, stack))
        for shape in shapes:
            batch, seq = map(int, shape.split("x"))
            work = needed_by(bundle, (batch, seq))
            call = golden_calls(checked, (batch, seq), 1)[0]
            samples = rounds_of(sessions, call, work, machine, limit.rounds(rounds))
            rows = rows_of(samples)
            report[shape] = {"operations": work.operations, "weight_bytes": work.weight_bytes, "ways": rows, "best": {}}
            for name, row in rows.items():
                print(f"{bundle.name} {shape:7} {name:36} {row['p50_ms']:8.2f} ms  {spread_of(row)}", flush=True)
            for precision in _BYTES:
                floors: list[float] = []
                if (fastest := best(rows, precision)) is not None:
                    target = _BARS.get((precision, shape))
                    report[shape]["best"][precision] = {"way": fastest[0], "floors": fastest[1], "bar": target}
                    floors = [ratio for _, ratio in samples[fastest[0]]]
                bars += filter(None, [bar_of(bundle.name, shape, precision, floors, absent)])
    return report, bars


def main(
    bundles: list[Path], shapes: str = "1x16,1x128,16x64,16x128", rounds: int = 8, minutes: float = 9.0,
    threads: int = default_threads(), json: Path | None = None,
) -> int:  # fmt: skip
    """Measure; rounds that would end after ``minutes`` are left out. Return 3 where a bar was not judged."""
    shape_list, watch = shapes.split(","), Watch()
    limit = Limit(minutes, len(shape_list) * len(bundles))
    limit.tell(0.5 + len(shape_list) * len(bundles) * rounds * 0.07)
    report: dict[str, Any] = {"host": cpu_name(), "threads": threads, "rounds": rounds}
    report |= {"versions": library_versions(), "bundles": {}}
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        machine = Machine(Path(folder), threads, stack)
        report["rates"] = machine.rates()
        for path in bundles:
            bundle = Bundle.open(path)
            samples, group = measured(bundle, shape_list, rounds, threads, machine, limit)
            report["bundles"][bundle.name] = samples
            bars += group
        report["conditions"] = watch.conditions(threads)
    report["bars"] = unless(report["conditions"]["disturbed"], bars)
    if json is not None:
        write_json(json, report)
    return report_bars(report["bars"])


if __name__ == "__main__":
    run_script(main)
