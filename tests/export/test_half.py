"""FP16 of a foreign graph: what is delicate stays FP32, weights are stored once, and nothing overflows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.export.fp16 import SAFE_ACTIVATION, convert_to_fp16, max_abs_values
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.session import Array, Session
from tests.export import graphs
from tests.export.graphs import FLOAT, save, value


def halved(graph: onnx.ModelProto, workplace: Path, feed: dict[str, Array] | None = None) -> onnx.ModelProto:
    """The graph in FP16; with inputs, after a look at what its values reach."""
    model = onnx_ir.from_proto(graph)

    def run(session: Session) -> list[dict[str, Array]]:
        return [session.run(feed or {})]

    made = onnx_ir.to_proto(convert_to_fp16(model, max_abs_values(model, run, workplace) if feed else {}))
    onnx.checker.check_model(made, full_check=True)
    return made


def answers(graph: onnx.ModelProto, feed: dict[str, Array], folder: Path) -> dict[str, Array]:
    with OnnxSession(save(folder, graph, "answers.onnx")) as session:
        return session.run(feed)


def normal(*shape: int) -> Array:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


CASES = {
    "convolutions": (graphs.convolutions(), {"x": normal(2, 3, 16, 16)}),
    "recurrent": (
        graphs.recurrent(),
        {"x": normal(5, 2, 4), "h": normal(1, 2, 8), "c": normal(1, 2, 8), "rate": np.array(16000)},
    ),
    "If": (graphs.branching(), {"x": normal(4, 6), "way": np.array(True)}),
    "Loop": (graphs.looping(), {"x": normal(4, 6)}),
    "embedding": (graphs.embedding(), {name: np.ones((2, 7), np.int64) for name in ("input_ids", "attention_mask")}),
}


@pytest.mark.parametrize("name", CASES)
def test_half_the_weights_nearly_the_same_answers(tmp_path: Path, name: str) -> None:
    graph, feed = CASES[name]
    made = halved(graph, tmp_path, feed)
    kinds = Counter(tensor.data_type for tensor in made.graph.initializer if np.prod(tensor.dims) > 16)
    assert kinds[onnx.TensorProto.FLOAT16] and not kinds[FLOAT], "every weight once, in FP16"
    assert [port.type for port in made.graph.input] == [port.type for port in graph.graph.input]
    result, expected = answers(made, feed, tmp_path), answers(graph, feed, tmp_path)
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
    made = halved(graph, tmp_path, feed)
    assert np.abs(ReferenceEvaluator(made).run(None, feed)[0] - expected).max() < 0.02
    products = [node for node in made.graph.node if node.op_type == "MatMul"]
    assert len(products) == 2 and all("half" in name for node in products for name in node.output)


def test_stored_inputs_of_old_files_are_none(tmp_path: Path) -> None:
    graph, feed = graphs.convolutions(), {"x": normal(2, 3, 16, 16)}
    graph.graph.input.append(value("w", FLOAT, [4, 8]))
    made = halved(graph, tmp_path, feed)
    assert [port.name for port in made.graph.input] == ["x"]
    assert (
        np.abs(answers(made, feed, tmp_path)["probabilities"] - answers(graph, feed, tmp_path)["probabilities"]).max()
        < 0.01
    )


def test_what_comes_near_the_limit_stays_fp32(tmp_path: Path) -> None:
    graph = graphs.model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [value("x", FLOAT, ["N", 8])],
        [value("y", FLOAT, ["N", 8])],
        [graphs.weights("w", 8, 8)],
    )
    halved(graph, tmp_path, {"x": normal(2, 8)})
    with pytest.raises(EdgeformerError, match="nothing in it can compute in FP16"):
        halved(graph, tmp_path, {"x": normal(2, 8) * SAFE_ACTIVATION})


def test_masks_of_minus_infinity_reach_the_softmax_in_fp32(tmp_path: Path) -> None:
    """−10³⁸ is no FP16 number: whatever it is added to stays FP32, up to the softmax that makes nothing of it."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("Sub", ["one", "mask"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "huge"], ["wall"]),
        helper.make_node("Add", ["scores", "wall"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["shares"]),
        helper.make_node("MatMul", ["shares", "v"], ["y"]),
    ]
    stored = [
        graphs.weights("w", 8, 8), graphs.weights("v", 8, 8), graphs.constant("one", np.array(1, np.float32)),
        graphs.constant("huge", np.array(-3e38, np.float32)),
    ]  # fmt: skip
    inputs = [value("x", FLOAT, ["N", 8]), value("mask", FLOAT, ["N", 8])]
    graph = graphs.model(nodes, inputs, [value("y", FLOAT, ["N", 8])], stored)
    made = halved(graph, tmp_path, {"x": normal(2, 8), "mask": np.ones((2, 8), np.float32)})
    outputs = {node.op_type: node.output[0] for node in made.graph.node if node.op_type != "MatMul"}
    assert outputs["Add"] == "masked" and outputs["Mul"] == "wall", "their results are FP32 under their own names"
    masked = {"x": normal(2, 8), "mask": np.array([[1, 0] * 4] * 2, np.float32)}
    result = ReferenceEvaluator(made).run(None, masked)[0]
    assert np.abs(result - answers(graph, masked, tmp_path)["y"]).max() < 0.02
