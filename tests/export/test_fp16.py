"""FP16: converted graphs, the largest activations, and the drift of states."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from edgeformer.export.fp16 import convert_to_fp16, max_abs_activation, max_abs_values
from edgeformer.export.judging import DRIFT_TOLERANCE, measure_drift
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array
from tests.export import graphs
from tests.export.graphs import FLOAT, save, value


def convert(graph: onnx.ModelProto, folder: Path, feed: dict[str, Array] | None = None) -> onnx.ModelProto:
    """The graph in FP16; with inputs, after a look at what its values reach."""
    model = onnx_ir.from_proto(graph)

    def run(session_run: Any, _: None) -> None:
        session_run(feed or {})

    converted = onnx_ir.to_proto(convert_to_fp16(model, max_abs_values(model, run, folder) if feed else {}))
    onnx.checker.check_model(converted, full_check=True)
    return converted


def answers(graph: onnx.ModelProto, feed: dict[str, Array], folder: Path) -> dict[str, Array]:
    with OnnxSession(save(folder, graph, "answers.onnx")) as session:
        return session.run(feed)


def normal(*shape: int) -> Array:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


STATE = {"h": normal(1, 2, 8), "c": normal(1, 2, 8)}
CASES = {
    "convolutions": (graphs.convolutions(), {"x": normal(2, 3, 16, 16)}),
    "recurrent": (graphs.recurrent(), {"x": normal(5, 2, 4), "rate": np.array(16000), **STATE}),
    "If": (graphs.branching(), {"x": normal(4, 6), "way": np.array(True)}),
    "Loop": (graphs.looping(), {"x": normal(4, 6)}),
    "embedding": (graphs.embedding(), {name: np.ones((2, 7), np.int64) for name in ("input_ids", "attention_mask")}),
}


@pytest.mark.parametrize("name", CASES)
def test_fp16_halves_weights_and_keeps_outputs(tmp_path: Path, name: str) -> None:
    graph, feed = CASES[name]
    converted = convert(graph, tmp_path, feed)
    kinds = Counter(tensor.data_type for tensor in converted.graph.initializer if np.prod(tensor.dims) > 16)
    assert kinds[onnx.TensorProto.FLOAT16] and not kinds[FLOAT], "every weight once, in FP16"
    assert [port.type for port in converted.graph.input] == [port.type for port in graph.graph.input]
    result, expected = answers(converted, feed, tmp_path), answers(graph, feed, tmp_path)
    assert result.keys() == expected.keys()
    for output, array in expected.items():
        assert result[output].dtype == array.dtype
        assert np.abs(result[output].astype(float) - array).max() < 0.01 * max(1.0, array.std())


def test_squares_that_overflow_stay_fp32(tmp_path: Path) -> None:
    """A blanket conversion is infinite in the norm; the reference evaluator really computes in FP16."""
    graph, feed = graphs.norm(large=300), {"x": normal(3, 8)}
    expected = answers(graph, feed, tmp_path)["y"]
    blanket = onnx_ir.to_proto(convert_to_fp16(onnx_ir.from_proto(graph), {}))
    with np.errstate(over="ignore", invalid="ignore"):
        blanket_result = ReferenceEvaluator(blanket).run(None, feed)[0]
    assert not np.abs(blanket_result - expected).max() < 0.1, "who does not look at the numbers loses them"
    converted = convert(graph, tmp_path, feed)
    assert np.abs(ReferenceEvaluator(converted).run(None, feed)[0] - expected).max() < 0.02
    products = [node for node in converted.graph.node if node.op_type == "MatMul"]
    assert len(products) == 2 and all("half" in name for node in products for name in node.output)


def test_large_negative_masks_stay_fp32_up_to_the_softmax(tmp_path: Path) -> None:
    """−10³⁸ is no FP16 number: whatever it is added to stays FP32, up to the softmax that makes nothing of it."""
    nodes = graphs.nodes("""
        scores = MatMul(x, w)  hidden = Sub(one, mask)  wall = Mul(hidden, huge)
        masked = Add(scores, wall)  shares = Softmax(masked)  y = MatMul(shares, v)""")
    numbers = {"one": 1, "huge": -3e38}
    stored = [graphs.constant(name, np.array(number, np.float32)) for name, number in numbers.items()]
    stored += [graphs.weights("w", 8, 8), graphs.weights("v", 8, 8)]
    inputs = [value("x", FLOAT, ["N", 8]), value("mask", FLOAT, ["N", 8])]
    graph = graphs.model(nodes, inputs, [value("y", FLOAT, ["N", 8])], stored)
    converted = convert(graph, tmp_path, {"x": normal(2, 8), "mask": np.ones((2, 8), np.float32)})
    outputs = {node.op_type: node.output[0] for node in converted.graph.node if node.op_type != "MatMul"}
    assert outputs["Add"] == "masked" and outputs["Mul"] == "wall", "their results are FP32 under their own names"
    masked = {"x": normal(2, 8), "mask": np.array([[1, 0] * 4] * 2, np.float32)}
    result = ReferenceEvaluator(converted).run(None, masked)[0]
    assert np.abs(result - answers(graph, masked, tmp_path)["y"]).max() < 0.02


class Chain(nn.Sequential):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.float())


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize(
    ("factors", "largest"),
    [
        ((1.0,), 3.0),
        ((1e5, 1e-6), 3e5),  # only between the two
        ((-1e5, 1e-6), 3e5),
        ((0.01,), 3.0),  # what goes in
        ((math.nan, 0.0), math.inf),
        ((-math.inf, 1.0), math.inf),
    ],
)
def test_max_abs_covers_values_between_modules(factors: tuple[float, ...], largest: float) -> None:
    result = max_abs_activation(Chain(*map(Times, factors)), np.array([[1, -2], [0, 3]]))
    assert result == pytest.approx(largest)


class Attention(nn.Module):
    """Two heads of 4 numbers; every query is 6 and every key −7 in all of them, values are small."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = bias

    def forward(self, ids: Tensor) -> Tensor:
        q, k = torch.full((1, 2, 3, 4), 6.0), torch.full((1, 2, 5, 4), -7.0)
        v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 4)
        last = torch.full((3, 5), -torch.inf).index_fill(1, torch.tensor([4]), self.bias)
        self.given = F.scaled_dot_product_attention(q, k, v, attn_mask=last)
        return self.given


def test_attention_scores_are_included() -> None:
    model = Attention()
    assert max_abs_activation(model, np.array([1])) == 4 * 6 * 7 / 4**0.5
    assert torch.equal(model.given, torch.full((1, 2, 3, 4), 4.0)), "and it answers as ever, mask and all"
    assert max_abs_activation(Attention(bias=-500.0), np.array([1])) == 4 * 6 * 7 / 4**0.5 + 500


def drifted(precision: Any = "fp16", **errors: float) -> Any:
    """Loops whose reference is 3 and 4 by turns (root mean square √12.5), off by an error in the second half."""
    reference = np.tile(np.array([3.0, 4.0], dtype=np.float32), (2, 2, 1))
    references = {int(name[4:]): reference for name in errors}
    states = {}
    for name, error in errors.items():
        states[int(name[4:])] = reference.copy()
        states[int(name[4:])][1] += np.float32(error)
    return measure_drift(states, references, precision)


def test_drift_is_relative_to_the_state_and_per_loop() -> None:
    result = drifted(loop10=0.5, loop2=0.0, loop3=-0.25)
    assert [row.loop for row in result.loops] == [2, 3, 10]
    size = math.sqrt(12.5)
    assert [row.rms_error for row in result.loops] == pytest.approx([0.0, 0.25 / 2**0.5 / size, 0.5 / 2**0.5 / size])
    assert [row.max_error for row in result.loops] == pytest.approx([0.0, 0.25 / size, 0.5 / size])
    assert (result.tolerance, result.first_beyond) == (DRIFT_TOLERANCE["fp16"], 3)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_infinite_states_exceed_the_tolerance(wrong: float) -> None:
    result = drifted(loop1=0.0, loop2=wrong)
    assert (result.loops[1].rms_error, result.loops[1].max_error, result.first_beyond) == (None, None, 2)
    zeros = {1: np.zeros((1, 2, 3), dtype=np.float32)}
    result = measure_drift({1: np.ones((1, 2, 3), dtype=np.float32)}, zeros, "fp32")
    assert (result.loops[0].rms_error, result.first_beyond) == (None, 1), "a reference of zeros has no scale"
