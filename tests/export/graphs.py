"""Small foreign ONNX graphs."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

FLOAT, INT64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
Dims = list[int | str | None] | None


def value(name: str, kind: int, shape: Dims) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def weights(name: str, *shape: int, scale: float = 1.0) -> onnx.TensorProto:
    """Random numbers, the same for the same name."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return numpy_helper.from_array((scale * rng.normal(size=shape)).astype(np.float32), name)


def constant(name: str, array: np.ndarray) -> onnx.TensorProto:  # type: ignore[type-arg]
    return numpy_helper.from_array(array, name)


def nodes(text: str) -> list[onnx.NodeProto]:
    """Nodes in ONNX's own text form: ``y = MatMul(x, w)``."""
    return list(parser.parse_graph(f"graph () => () {{ {text} }}").node)


def model(
    nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto],
    stored: list[onnx.TensorProto] | None = None, opset: int = 17, domains: dict[str, int] | None = None,
) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(nodes, "graph", inputs, outputs, stored or [])
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(*pair) for pair in (domains or {}).items())]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def convolutions(batch: int | str | None = "batch") -> onnx.ModelProto:
    """[batch, 3, 16, 16] → four class probabilities."""
    layers = nodes("""
        c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, k1, b1)  r1 = Relu(c1)
        c2 = Conv <kernel_shape = [3, 3], group = 8, pads = [1, 1, 1, 1]> (r1, k2)  pooled = GlobalAveragePool(c2)
        flat = Flatten(pooled)  scores = Gemm <transB = 1> (flat, w, b)  probabilities = Softmax(scores)""")
    stored = [weights("k1", 8, 3, 3, 3, scale=0.3), weights("b1", 8), weights("k2", 8, 1, 3, 3, scale=0.3)]
    outputs = [value("probabilities", FLOAT, [batch, 4])]
    stored += [weights("w", 4, 8, scale=0.3), weights("b", 4)]
    return model(layers, [value("x", FLOAT, [batch, 3, 16, 16])], outputs, stored)


def recurrent(hidden: int = 8, width: int = 4) -> onnx.ModelProto:
    """An LSTM with its state as inputs and outputs, and a rate that it hardly looks at."""
    layers = nodes(f"""
        all, hn, cn = LSTM <hidden_size = {hidden}> (x, W, R, B, "", h, c)  y = Squeeze(all, one)
        wide = Cast <to = {FLOAT}> (rate)  none = Mul(wide, nothing)  answer = Add(y, none)""")
    stored = [weights("W", 1, 4 * hidden, width, scale=0.5), weights("R", 1, 4 * hidden, hidden, scale=0.5)]
    stored += [weights("B", 1, 8 * hidden, scale=0.1), constant("one", np.array([1]))]
    stored.append(constant("nothing", np.array(1e-3, np.float32)))
    state = [value(name, FLOAT, [1, "batch", hidden]) for name in ("h", "c")]
    inputs = [value("x", FLOAT, ["steps", "batch", width]), *state, value("rate", INT64, [])]
    new = [value(name, FLOAT, [1, "batch", hidden]) for name in ("hn", "cn")]
    return model(layers, inputs, [value("answer", FLOAT, ["steps", "batch", hidden]), *new], stored)


def branching() -> onnx.ModelProto:
    """An ``If`` whose branches hold the weights: a product, or a sum."""
    outputs = [[value(name, FLOAT, None)] for name in "te"]
    then = helper.make_graph(nodes("t = MatMul(x, w)"), "then", [], outputs[0], [weights("w", 6, 6)])
    other = helper.make_graph(nodes("e = Add(x, v)"), "else", [], outputs[1], [weights("v", 6)])
    choice = [helper.make_node("If", ["way"], ["y"], then_branch=then, else_branch=other)]
    inputs = [value("x", FLOAT, ["N", 6]), value("way", BOOL, [])]
    return model(choice, inputs, [value("y", FLOAT, ["N", 6])])


def looping(rounds: int = 3) -> onnx.ModelProto:
    """A ``Loop`` that multiplies by the same matrix, round after round."""
    inputs = [value("round", INT64, []), value("go", BOOL, []), value("state", FLOAT, ["N", 6])]
    outputs = [value("on", BOOL, []), value("next", FLOAT, ["N", 6])]
    body = helper.make_graph(nodes("next = MatMul(state, w)  on = Identity(go)"), "body", inputs, outputs)
    loop = [helper.make_node("Loop", ["rounds", "yes", "x"], ["y"], body=body)]
    stored = [constant("rounds", np.array(rounds)), constant("yes", np.array(True)), weights("w", 6, 6, scale=0.4)]
    return model(loop, [value("x", FLOAT, ["N", 6])], [value("y", FLOAT, ["N", 6])], stored)


def embedding(rows: int = 40, width: int = 8) -> onnx.ModelProto:
    """Token ids and their mask → vectors and their lengths; the table says which ids there are."""
    layers = nodes(f"""
        vectors = Gather(table, input_ids)  states = MatMul(vectors, w)  mask = Cast <to = {FLOAT}> (attention_mask)
        length = ReduceSum <keepdims = 0> (mask, last)  largest = ArgMax <axis = -1, keepdims = 0> (states)""")
    stored = [weights("table", rows, width), weights("w", width, width), constant("last", np.array([1]))]
    inputs = [value(name, INT64, ["batch_size", "seq_len"]) for name in ("input_ids", "attention_mask")]
    outputs = [value("states", FLOAT, ["batch_size", "seq_len", width]), value("length", FLOAT, ["batch_size"])]
    return model(layers, inputs, [*outputs, value("largest", INT64, ["batch_size", "seq_len"])], stored)


def norm(large: float = 400.0) -> onnx.ModelProto:
    """A product whose results are large, and a norm by hand that squares them: FP16 would overflow in it."""
    layers = nodes("""
        big = MatMul(x, w)  squares = Mul(big, big)  mean = ReduceMean <axes = [-1]> (squares)
        safe = Add(mean, epsilon)  root = Sqrt(safe)  normed = Div(big, root)  y = MatMul(normed, v)""")
    stored = [weights("w", 8, 32, scale=large), weights("v", 32, 8), constant("epsilon", np.array(1e-9, np.float32))]
    return model(layers, [value("x", FLOAT, ["batch", 8])], [value("y", FLOAT, ["batch", 8])], stored)


def save(folder: Path, graph: onnx.ModelProto, name: str = "net.onnx") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(graph, folder / name)
    return folder / name


def save_beside(folder: Path, graph: onnx.ModelProto, location: str = "net.weights", name: str = "net.onnx") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(graph, folder / name, save_as_external_data=True, location=location, size_threshold=100)
    return folder / name
