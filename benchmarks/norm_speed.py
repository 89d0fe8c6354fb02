"""How much less time RMSNorm takes than LayerNorm: in ONNX Runtime and in torch, in turns, one thread.

python benchmarks/norm_speed.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

from edgeformer.system.host import cpu_name

ROWS = 16 * 128
"""A batch of 16 texts of 128 tokens."""
WIDTHS = (256, 384)
CALLS = 200
OPSET = 17
Call = Callable[[], Any]
FUSED = {"layer": "LayerNormalization", "rms": "SimplifiedLayerNormalization"}
"""Norm → the one node that is left of it in an optimised graph."""


def nodes_of(norm: str) -> list[onnx.NodeProto]:
    """``layer``: the standard's own operator. ``rms``: what an exporter writes, and the runtime makes one kernel of."""
    if norm == "layer":
        return [helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["y"], axis=-1, epsilon=1e-6)]
    return [
        helper.make_node("Pow", ["x", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["mean"], axes=[-1], keepdims=1),
        helper.make_node("Add", ["mean", "epsilon"], ["positive"]),
        helper.make_node("Sqrt", ["positive"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["normal"]),
        helper.make_node("Mul", ["normal", "scale"], ["y"]),
    ]


def session_of(norm: str, width: int, folder: Path) -> onnxruntime.InferenceSession:
    """One norm and nothing else. Raises RuntimeError where the runtime does not compute it in one kernel."""
    constants = {"layer": ("scale", "shift"), "rms": ("scale", "two", "epsilon")}[norm]
    values = {"scale": np.ones(width), "shift": np.zeros(width), "two": np.array(2.0), "epsilon": np.array(1e-6)}
    kept = [numpy_helper.from_array(values[name].astype(np.float32), name) for name in constants]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes_of(norm), norm, ends[:1], ends[1:], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # that an optimised graph fits this machine alone is meant
    options.optimized_model_filepath = str(folder / f"{norm}.onnx")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]
    if operators != [FUSED[norm]]:
        raise RuntimeError(f"{norm}: the runtime made {operators} of it, not one {FUSED[norm]}")
    return session


def in_onnxruntime(width: int, inputs: np.ndarray[Any, Any]) -> list[Call]:
    """LayerNorm and RMSNorm, each one fused kernel."""
    with TemporaryDirectory() as folder:
        sessions = [session_of(norm, width, Path(folder)) for norm in FUSED]
    return [partial(session.run, None, {"x": inputs}) for session in sessions]


def in_torch(width: int, inputs: np.ndarray[Any, Any]) -> list[Call]:
    """The same, not compiled: LayerNorm is one fused kernel, RMSNorm several."""
    x, scale, shift = torch.from_numpy(inputs), torch.ones(width), torch.zeros(width)
    return [
        partial(functional.layer_norm, x, (width,), scale, shift, 1e-6),
        partial(functional.rms_norm, x, (width,), scale, 1e-6),
    ]


BY: dict[str, Callable[[int, np.ndarray[Any, Any]], list[Call]]] = {"ONNX Runtime": in_onnxruntime, "torch": in_torch}


def timed_ms(call: Call) -> float:
    """Milliseconds of a call, the median of some."""
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def compared(by: str, width: int, rounds: int) -> dict[str, Any]:
    """LayerNorm, RMSNorm, LayerNorm, …: the share of time that RMSNorm saves, per round."""
    inputs = np.random.default_rng(0).standard_normal((ROWS, width), dtype=np.float32)
    with torch.inference_mode():
        layer, rms = BY[by](width, inputs)
        for call in (layer, rms):
            timed_ms(call)
        times = [(timed_ms(layer), timed_ms(rms)) for _ in range(rounds)]
    saved = sorted(1 - rms_ms / layer_ms for layer_ms, rms_ms in times)
    return {
        "by": by,
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
    results = [compared(by, width, arguments.rounds) for by in BY for width in WIDTHS]
    for row in results:
        saved = row["less_time"]
        span = f"{saved['median']:+.0%} ({saved['low']:+.0%} to {saved['high']:+.0%})"
        print(f"{row['by']}, {row['hidden_size']}: {span} less time")
    if arguments.json is not None:
        host = {"rows": ROWS, "cpu": cpu_name(), "python": platform.python_version()}
        versions = {"onnxruntime": onnxruntime.__version__, "torch": str(torch.__version__)}
        document = [{**row, **host, **versions} for row in results]
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
