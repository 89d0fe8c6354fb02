"""INT4 graphs: every weight in blocks of 4 bits, stored once; attention to cached tokens as one operator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.manifest import release
from edgeformer.artifacts.onnx_outline import read_outline
from edgeformer.export.audit import audit_portability, audit_sharing, stored_twice, weight_parts
from edgeformer.export.export import export
from edgeformer.export.graphs import write_graph
from edgeformer.export.quantize import (
    BLOCK,
    LONG_BLOCK,
    merge_attention,
    quantize_int4,
    quantized_graphs,
    quantized_nodes,
)
from edgeformer.export.variants import ExportOptions
from edgeformer.models.adapter import count_parameters
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.graphs import compose_decode, trace_pieces
from edgeformer.models.tracing import Graphs, deduplicate_weights, export_graph, text_spec
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.export.language_run import write_language_run
from tests.export.test_int8 import IDS, POSITIONS, Everything, run
from tests.models.crt_oracle import small_config


@pytest.fixture(scope="module")
def traced() -> onnx_ir.Model:
    torch.manual_seed(0)
    return export_graph(text_spec(Everything().eval(), ["input_ids"], POSITIONS, ("first", "second")))


class Odd(nn.Module):
    """Sizes that are no multiple of a block: 5 → 37 → 3."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.wide, self.head = nn.Embedding(50, 5), nn.Linear(5, 37), nn.Linear(37, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.wide(self.tokens(input_ids))))
        return result


def as_stored(weight: np.ndarray, block: int) -> np.ndarray:
    """The numbers that 4 bits leave of a weight [K, N], in blocks along K: written apart from the code under test."""
    result = np.empty_like(weight)
    for column in range(weight.shape[1]):
        for start in range(0, weight.shape[0], block):
            part = weight[start : start + block, column]
            low, high = min(part.min(), 0.0), max(part.max(), 0.0)
            scale = (high - low) / 15 or 1.0
            zero = round(-low / scale)
            codes = np.clip(np.rint(part / scale) + zero, 0, 15)
            result[start : start + block, column] = (codes - zero) * scale
    return result


@pytest.mark.parametrize("block", [16, BLOCK])
def test_products_compute_with_4_bit_weights(block: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Odd().eval()
    output = quantize_int4(export_graph(text_spec(module, ["input_ids"], POSITIONS)), block)
    with torch.no_grad():
        for layer in (module.wide, module.head):
            layer.weight.copy_(torch.from_numpy(as_stored(layer.weight.T.numpy(), block).T))
        module.tokens.weight.copy_(torch.from_numpy(as_stored(module.tokens.weight.T.numpy(), block).T))
        expected = module(torch.from_numpy(IDS % 50)).numpy()
    result = run(output, tmp_path / "odd.onnx", {"input_ids": IDS % 50})["logits"]
    assert "Add" not in {node.op_type for node in output.graph}  # a bias is the product's own
    # What is left is the rounding of activations to 8 bits.
    assert np.abs(result - expected).max() < 0.02 * expected.std() * 5
    graph = onnx.load(str(tmp_path / "odd.onnx"))
    audit = audit_sharing(graph, count_parameters(module))
    assert audit.stored_parameters == count_parameters(module)  # neither halved by packing nor blown up by padding


def test_every_weight_is_stored_once_and_counted(traced: onnx_ir.Model, tmp_path: Path) -> None:
    old = onnx_ir.to_proto(traced).SerializeToString()
    result = run(quantize_int4(traced), tmp_path / "int4.onnx", {"input_ids": IDS})
    assert onnx_ir.to_proto(traced).SerializeToString() == old
    graph = onnx.load(str(tmp_path / "int4.onnx"))
    # The block and the head are used twice each; positions are a slice, which has rows in INT8.
    assert quantized_nodes(graph) == {"MatMulNBits": 4, "GatherBlockQuantized": 1, "Slice": 1}
    parameters = count_parameters(Everything())
    audit = audit_sharing(graph, parameters)
    assert stored_twice(audit) is None
    assert audit.stored_parameters == parameters
    parts = weight_parts(graph)
    # 3,000 rows of 32 numbers: half a byte each, and a scale and half a byte of zero point per block.
    assert parts["embeddings"] - 40 * (32 + 4) - 2 * 32 * 4 == 3000 * (16 + 4) + 1500
    portability = audit_portability([tmp_path / "int4.onnx"])
    assert portability.needs is not None and release(portability.needs) >= (1, 20)
    assert any("MatMulNBits (4)" in note for note in portability.notes())
    assert any("needs ONNX Runtime 1.20" in note for note in portability.notes_here("1.19.2", frozenset()))
    # An id beyond the table is refused before the runtime sees it, as with every other table.
    assert read_outline(tmp_path / "int4.onnx").tables == {"input_ids": 3000}
    expected = run(traced, tmp_path / "fp32.onnx", {"input_ids": IDS})
    for name in ("first", "second"):
        error = np.abs(result[name] - expected[name])
        assert 0 < error.max() < 0.6 * float(expected[name].std())


def test_small_tables_stay_fp32_where_nodes_have_no_names(traced: onnx_ir.Model) -> None:
    nameless = traced.clone()
    for node in nameless.graph:
        node.name = ""
    output = quantize_int4(nameless)
    assert sum(node.op_type == "GatherBlockQuantized" for node in output.graph) == 1
    assert "types.weight" in output.graph.initializers


@pytest.mark.parametrize(("pretrained", "block"), [(True, BLOCK), (False, LONG_BLOCK)])
def test_pretrained_weights_get_shorter_blocks(traced: onnx_ir.Model, pretrained: bool, block: int) -> None:
    output = quantized_graphs(Graphs(traced, has_row_scales=pretrained), "int4").exits
    products = [node for node in output.graph if node.op_type == "MatMulNBits"]
    assert {node.attributes.get_int("block_size") for node in products} == {block}


def test_a_language_models_graphs_are_judged_like_int8(tmp_path: Path) -> None:
    run_folder = write_language_run(tmp_path / "run")
    artifacts = export(run_folder, ExportOptions(int4=True, keep_going=True)).artifacts
    float_names = {artifact.role: artifact for artifact in artifacts if artifact.precision == "fp32"}
    result = {artifact.role: artifact for artifact in artifacts if artifact.precision == "int4"}
    assert result.keys() == {"full", "decode"}
    for role, artifact in result.items():
        assert artifact.parity is not None and artifact.sharing is not None and artifact.size_bytes is not None
        assert (artifact.parity.status, artifact.parity.tolerance_kind) == ("measured", "score")
        assert artifact.sharing.stored_parameters == artifact.sharing.unique_parameters
        assert artifact.sharing.unique_parameters == float_names[role].sharing.unique_parameters  # type: ignore[union-attr]
        assert artifact.size_bytes < 0.6 * float_names[role].size_bytes  # type: ignore[operator]
        assert artifact.quantized["MatMulNBits"] > 0
        if artifact.status == "built":  # where clients of such repositories look for 4 bits
            assert str(artifact.file).endswith("_q4.onnx") and artifact.weights_file == "onnx/model_q4.onnx_data"
    drift = result["full"].drift
    assert drift is not None and drift.tolerance == 0.3 and len(drift.loops) == 2


LOOPS = 3


@pytest.fixture(scope="module")
def written_out() -> onnx_ir.Model:
    torch.manual_seed(0)
    model = build_crt(small_config(loops=LOOPS, exits=(2,), cycles=2)).eval()
    return compose_decode(model, trace_pieces(model)[1])


@pytest.mark.parametrize(("batch", "new", "past"), [(1, 1, 9), (2, 5, 0), (2, 5, 9)])
def test_merged_attention_computes_the_same(
    written_out: onnx_ir.Model, tmp_path: Path, batch: int, new: int, past: int
) -> None:
    merged = written_out.clone()
    assert merge_attention(merged) == LOOPS
    deduplicate_weights(merged)
    remaining = [node.op_type for node in merged.graph]
    assert remaining.count("MultiHeadAttention") == LOOPS
    assert not {"Softmax", "Trilu", "Where"} & set(remaining)
    draw = np.random.default_rng(batch + new + past)
    sizes = {"batch": batch, "past": past, "sequence": new}
    inputs = {}
    for value in written_out.graph.inputs:
        assert value.shape is not None and value.name is not None
        shape = [size if isinstance(size, int) else sizes[str(size)] for size in value.shape]
        inputs[value.name] = draw.normal(size=shape).astype(np.float32)
    inputs["input_ids"] = draw.integers(0, 60, (batch, new))
    inputs["position_ids"] = np.tile(np.arange(past, past + new), (batch, 1))
    result = []
    for name, graph in (("apart", written_out), ("merged", merged)):
        write_graph(graph, tmp_path / f"{name}.onnx")
        with OnnxSession(tmp_path / f"{name}.onnx") as session:
            result.append(session.run(inputs))
    assert result[0].keys() == result[1].keys()
    for name, array in result[0].items():
        assert np.allclose(array, result[1][name], atol=2e-5, rtol=0), name


@pytest.mark.parametrize("changed", ["upper", "least"])
def test_attention_with_another_mask_is_not_merged(written_out: onnx_ir.Model, changed: str) -> None:
    other = written_out.clone()
    for node in other.graph:
        if changed == "upper" and node.op_type == "Trilu":
            node.attributes["upper"] = onnx_ir.AttrInt64("upper", 1)
        if changed == "least" and node.op_type == "Where":
            value = node.inputs[1]
            assert value is not None
            value.const_value = onnx_ir.tensor(np.array(-1e9, np.float32), name=value.name)
    assert merge_attention(other) == 0
