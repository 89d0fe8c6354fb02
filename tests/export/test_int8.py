"""INT8 graphs: close to FP32, every weight in 7 or 8 bits and stored once, and nothing left out in silence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.export.audit import audit_sharing, stored_twice
from edgeformer.export.graphs import weights_file, write_graph
from edgeformer.export.quantize import quantize_int8, quantized_nodes
from edgeformer.models.adapter import count_parameters
from edgeformer.models.tracing import export_graph, extract_outputs, text_spec
from edgeformer.runtimes.onnxruntime.session import OnnxSession

ROWS, POSITIONS, SIZE = 3000, 40, 32
IDS = np.random.default_rng(0).integers(0, ROWS, (3, 11))


class Everything(nn.Module):
    """Tables by rows and by slice, one block used twice, a head that is a Gemm and used twice, and a rotary table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(ROWS, SIZE), nn.Embedding(POSITIONS, SIZE)
        self.types = nn.Embedding(2, SIZE)
        self.block, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 5)
        self.norm = nn.LayerNorm(SIZE)
        self.register_buffer("cos", torch.randn(POSITIONS, SIZE))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        length = input_ids.shape[1]
        h = self.tokens(input_ids) + self.positions.weight[:length] + self.types(input_ids % 2)
        answers = []
        for _ in range(2):
            h = self.norm(h + torch.tanh(self.block(h)) * self.cos[:length])
            answers.append(self.head(h[:, 0]))
        return answers[0], answers[1]


def initializers(model: onnx_ir.Model) -> dict[str, np.ndarray]:
    return {str(name): value.const_value.numpy() for name, value in model.graph.initializers.items()}


def run(model: onnx_ir.Model, path: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    write_graph(model, path)
    with OnnxSession(path) as session:
        return session.run(inputs)


@pytest.fixture(scope="module")
def module() -> Everything:
    torch.manual_seed(0)
    return Everything().eval()


@pytest.fixture(scope="module")
def traced(module: Everything) -> onnx_ir.Model:
    return export_graph(text_spec(module, ["input_ids"], POSITIONS, ("first", "second")))


@pytest.fixture(scope="module")
def quantized(traced: onnx_ir.Model) -> onnx_ir.Model:
    original = onnx_ir.to_proto(traced).SerializeToString()
    model = quantize_int8(traced)
    assert onnx_ir.to_proto(traced).SerializeToString() == original, "the input graph must not change"
    return model


def test_answers_are_close_to_fp32(
    module: Everything, traced: onnx_ir.Model, quantized: onnx_ir.Model, tmp_path: Path
) -> None:
    result = run(quantized, tmp_path / "int8.onnx", {"input_ids": IDS})
    with torch.inference_mode():
        expected = module(torch.from_numpy(IDS))
    for name, reference in zip(("first", "second"), expected, strict=True):
        error = np.abs(result[name] - reference.numpy())
        assert 0 < error.max() < 0.1 * float(reference.std())
        single = run(extract_outputs(quantized, {name: "logits"}), tmp_path / f"{name}.onnx", {"input_ids": IDS})
        assert (single["logits"] == result[name]).all()
    # At 32 columns the scale of a row is an eighth of it already.
    assert (tmp_path / "int8.onnx").stat().st_size < 0.36 * write_graph(traced, tmp_path / "fp32.onnx")


def test_weights_are_int8_and_the_rest_stays_fp32(quantized: onnx_ir.Model) -> None:
    stored = initializers(quantized)
    weights = {name: array for name, array in stored.items() if array.dtype == np.int8 and name.endswith("_quantized")}
    assert sorted(array.shape for array in weights.values()) == [(32, 5), (32, 32), (40, 32), (3000, 32)]
    float_names = {
        name for name, a in stored.items() if a.dtype == np.float32 and a.ndim > 1 and not name.endswith("_scale")
    }
    assert float_names == {"types.weight", "cos"}


def test_products_use_seven_bits(quantized: onnx_ir.Model) -> None:
    """Two products of an 8-bit activation and a weight must fit into 16 bits: 2 · 255 · 64 does, 2 · 255 · 127 not."""
    stored = initializers(quantized)
    products = [node for node in quantized.graph if node.op_type == "MatMulInteger"]
    assert len(products) == 4
    for node in products:
        weight = stored[str(node.inputs[1].name)]
        assert 60 <= np.abs(weight.astype(int)).max() <= 64
        # one scale per output channel: every channel uses the whole range
        assert (np.abs(weight.astype(int)).max(axis=0) >= 60).all()


def test_a_table_has_a_scale_per_row(module: Everything, quantized: onnx_ir.Model) -> None:
    stored = initializers(quantized)
    rows, scales = stored["tokens.weight_quantized"], stored["tokens.weight_scale"]
    assert scales.shape == (ROWS, 1)
    assert (np.abs(rows.astype(int)).max(axis=1) == 127).all()
    assert (np.abs(rows * scales - module.tokens.weight.detach().numpy()) <= scales / 2 * 1.001).all()


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    table = nn.Embedding(50, 8)
    with torch.no_grad():
        table.weight[3] = 0
    spec = text_spec(nn.Sequential(table, nn.Linear(8, 8, bias=False)).eval(), ["input_ids"], 20)
    result = run(quantize_int8(export_graph(spec)), tmp_path / "zero.onnx", {"input_ids": np.full((1, 4), 3)})
    assert (result["logits"] == 0).all()


def test_int8_uses_standard_operators_and_stores_every_tensor_once(
    module: Everything, quantized: onnx_ir.Model
) -> None:
    proto, parameters = onnx_ir.to_proto(quantized), count_parameters(module)
    assert {node.domain for node in quantized.graph} == {""} and dict(quantized.opset_imports) == {"": 20}
    assert not quantized.metadata_props
    assert quantized_nodes(proto) == {"Gather": 1, "MatMulInteger": 4, "Slice": 1}
    contents = [(t.data_type, tuple(t.dims), numpy_helper.to_array(t).tobytes()) for t in proto.graph.initializer]
    assert len(set(contents)) == len(contents)
    result = audit_sharing(proto, parameters)
    assert result.stored_parameters == parameters and stored_twice(result) is None
    copy = onnx.TensorProto()
    copy.CopyFrom(next(t for t in proto.graph.initializer if tuple(t.dims) == (SIZE, SIZE)))
    copy.name = "copied"
    proto.graph.initializer.append(copy)
    result = audit_sharing(proto, parameters)
    assert result.stored_parameters == parameters + SIZE * SIZE and stored_twice(result) is not None


def test_graphs_of_one_model_share_their_int8_weights(
    module: Everything, quantized: onnx_ir.Model, tmp_path: Path
) -> None:
    """Whether positions are sliced, as for a whole text, or gathered, as for one more token."""

    class Gathering(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return module.block(module.positions(input_ids))

    gathering = quantize_int8(export_graph(text_spec(Gathering().eval(), ["input_ids"], POSITIONS)))
    assert quantized_nodes(onnx_ir.to_proto(gathering)) == {"Gather": 1, "MatMulInteger": 1}
    for name, graphs in (("one", {"all": quantized}), ("both", {"all": quantized, "gathering": gathering})):
        with weights_file(tmp_path / name) as weights:
            for file, graph in graphs.items():
                write_graph(graph, tmp_path / f"{file}.onnx", weights)
    assert (tmp_path / "both").stat().st_size == (tmp_path / "one").stat().st_size
    with OnnxSession(tmp_path / "gathering.onnx") as session:
        places = IDS % POSITIONS
        with torch.inference_mode():
            reference = Gathering()(torch.from_numpy(places)).numpy()
        error = np.abs(session.run({"input_ids": places})["logits"] - reference)
    assert error.max() < 0.1 * float(reference.std())


def product(weight: list[onnx.NodeProto], operands: list[str], **attributes: float) -> onnx_ir.Model:
    """x [2, 4] times a 4 × 4 weight that ``weight`` makes of the stored w."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy")
    kind = "Gemm" if attributes else "MatMul"
    nodes = [*weight, helper.make_node(kind, operands, ["y"], name="the_product", **attributes)]
    stored = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "test", [x], [y], [stored])
    return onnx_ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def test_row_scales_keep_precision_beside_a_large_position(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0)).numpy()
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"], name="product")],
        "one product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 5])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = onnx_ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
    rows = np.random.default_rng(1).normal(size=(4, SIZE)).astype(np.float32)
    rows[0] *= 300  # as [SEP] of a BERT
    rows[1] = 0
    errors = {}
    for has_row_scales in (False, True):
        output = quantize_int8(model, has_row_scales=has_row_scales)
        result = run(output, tmp_path / f"{has_row_scales}.onnx", {"x": rows})["y"]
        assert quantized_nodes(onnx_ir.to_proto(output)) == {"MatMulInteger": 1}
        assert not result[1].any()
        errors[has_row_scales] = np.abs(result - rows @ weight)[2:].max()
    assert errors[True] < 0.2 < errors[False]


def test_a_product_that_would_stay_fp32_is_refused() -> None:
    transposed = [helper.make_node("Transpose", ["w"], ["v"])]
    for model, weight in (
        (product(transposed, ["x", "v"]), "v"),
        (product([], ["w", "x"]), "w"),
        (product([], ["x", "w"], alpha=0.5), "w"),
    ):
        with pytest.raises(EdgeformerError, match=f"would stay FP32: {weight} of the_product"):
            quantize_int8(model)


def test_a_graph_without_weights_passes_through(tmp_path: Path) -> None:
    doubled = {"x": np.eye(4, dtype=np.float32) * 2}
    result = run(quantize_int8(product([], ["x", "x"])), tmp_path / "plain.onnx", doubled)
    assert (result["y"] == np.eye(4) * 4).all()
