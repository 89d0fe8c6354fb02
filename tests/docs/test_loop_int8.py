"""One scale for all loops of a weight takes in what every loop's own one does, and other weights keep theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.loop_int8 import merged_over_loops, table


def quantised(name: str, low: float, high: float) -> list[np.ndarray]:
    scale = (high - low) / 255
    return [np.array(scale, np.float32), np.array(round(-low / scale), np.uint8)]


def test_loops_of_one_weight_get_one_scale(tmp_path: Path) -> None:
    ranges = {"first": (-1.0, 2.0), "second": (-4.0, 1.0), "alone": (-0.5, 0.5)}
    weights = {"first": "shared", "second": "shared", "alone": "other"}
    stored = {name: np.ones((4, 4), np.int8) for name in ("shared", "other")}
    stored |= {"weight_scale": np.array(0.1, np.float32), "weight_zero": np.array(0, np.int8)}
    nodes = [
        helper.make_node("DequantizeLinear", [name, "weight_scale", "weight_zero"], [f"{name}_wide"])
        for name in ("shared", "other")
    ]
    start = "x"
    for name, bounds in ranges.items():
        pair = [f"{name}_scale", f"{name}_zero"]
        stored |= dict(zip(pair, quantised(name, *bounds), strict=True))
        nodes += [
            helper.make_node("QuantizeLinear", [start, *pair], [f"{name}_codes"]),
            helper.make_node("DequantizeLinear", [f"{name}_codes", *pair], [f"{name}_in"]),
            helper.make_node("MatMul", [f"{name}_in", f"{weights[name]}_wide"], [name]),
        ]
        start = name
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "alone"))
    tensors = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    model = helper.make_model(helper.make_graph(nodes, "loops", [x], [y], tensors))
    onnx.save(model, str(tmp_path / "own.onnx"))
    merged_over_loops(tmp_path / "own.onnx", tmp_path / "merged.onnx")
    merged = onnx.load(str(tmp_path / "merged.onnx"))
    onnx.checker.check_model(merged)
    results = {tensor.name: float(numpy_helper.to_array(tensor).max()) for tensor in merged.graph.initializer}
    assert (results["first_scale"], results["first_zero"]) == (results["second_scale"], results["second_zero"])
    low = -results["first_zero"] * results["first_scale"]
    high = (255 - results["first_zero"]) * results["first_scale"]
    assert low <= -4 + results["first_scale"] and high >= 2 - results["first_scale"]
    assert np.isclose(results["alone_scale"], 1 / 255)


def test_the_table_has_means_and_ranges_of_the_seeds() -> None:
    def run(perplexity: float) -> dict[str, object]:
        row = {"bytes": 3.5e6, "perplexity": {"2": 1.0, "8": perplexity}, "drift": {"1": 0.01}, "over_fp32": 0.5}
        return {"ways": {"fp32": row}}

    results = table({"runs": [run(20.0), run(22.0), run(24.0)]})
    assert "22.00 (20.00–24.00)" in results
    assert "0.0100 (0.0100–0.0100)" in results
