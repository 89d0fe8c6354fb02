"""INT8 and INT4 graphs: close to FP32, every weight quantised and stored once, and nothing left out in silence."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxscript.rewriter.pattern import RewriteRuleSet
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import release
from edgeformer.artifacts.onnx_outline import read_outline
from edgeformer.export import quantize
from edgeformer.export.audit import audit_portability, audit_sharing, weight_parts
from edgeformer.export.graphs import write_graph
from edgeformer.models.adapter import count_parameters
from edgeformer.models.blocks.tracing import Graphs, deduplicate_weights, export_graph, extract_outputs, text_spec
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.adapter import ADAPTER
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.report.sentences import portability_notes, portability_notes_here
from edgeformer.runtimes.decoder import CachedGraph
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.runtime import stored_twice
from tests.export import graphs
from tests.export.language_run import LOOPS, exported_language_run

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
    model = quantize.quantize_int8(traced)
    assert onnx_ir.to_proto(traced).SerializeToString() == original, "the input graph must not change"
    return model


def test_answers_are_close_to_fp32(module, traced, quantized, tmp_path):
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


def test_products_use_seven_bits(quantized: onnx_ir.Model) -> None:
    """Two products of an 8-bit activation and a weight must fit into 16 bits: 2 · 255 · 64 does, 2 · 255 · 127 not."""
    stored = {str(name): value.const_value.numpy() for name, value in quantized.graph.initializers.items()}
    products = [node for node in quantized.graph if node.op_type == "MatMulInteger"]
    assert len(products) == 4
    for node in products:
        weight = stored[str(node.inputs[1].name)]
        assert 60 <= np.abs(weight.astype(int)).max() <= 64
        # one scale per output channel: every channel uses the whole range
        assert (np.abs(weight.astype(int)).max(axis=0) >= 60).all()


def test_int8_uses_standard_operators_and_stores_every_tensor_once(module, quantized):
    proto, parameters = onnx_ir.to_proto(quantized), count_parameters(module)
    assert {node.domain for node in quantized.graph} == {""} and dict(quantized.opset_imports) == {"": 20}
    assert not quantized.metadata_props
    assert quantize.quantized_nodes(proto) == {"Gather": 1, "MatMulInteger": 4, "Slice": 1}
    contents = [(t.data_type, tuple(t.dims), numpy_helper.to_array(t).tobytes()) for t in proto.graph.initializer]
    assert len(set(contents)) == len(contents)
    result = audit_sharing(proto, parameters)
    assert result.stored_parameters == parameters and stored_twice(result) is None


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
    ports = {"x": SIZE, "y": 5}
    inputs, outputs = ([graphs.value(name, TensorProto.FLOAT, [None, size])] for name, size in ports.items())
    stored = [numpy_helper.from_array(weight, "weight")]
    model = onnx_ir.from_proto(graphs.model(graphs.nodes("y = MatMul(x, weight)"), inputs, outputs, stored, opset=18))
    rows = np.random.default_rng(1).normal(size=(4, SIZE)).astype(np.float32)
    rows[0] *= 300  # as [SEP] of a BERT
    rows[1] = 0
    errors = {}
    for has_row_scales in (False, True):
        output = quantize.quantize_int8(model, has_row_scales=has_row_scales)
        result = run(output, tmp_path / f"{has_row_scales}.onnx", {"x": rows})["y"]
        assert quantize.quantized_nodes(onnx_ir.to_proto(output)) == {"MatMulInteger": 1}
        assert not result[1].any()
        errors[has_row_scales] = np.abs(result - rows @ weight)[2:].max()
    assert errors[True] < 0.2 < errors[False]


def test_a_product_is_quantized_or_refused_in_every_opset(caplog: pytest.LogCaptureFixture) -> None:
    model = product([], ["x", "w"])
    model.opset_imports[""], model.ir_version = 9, 4
    output = quantize.quantize_int8(model)
    assert quantize.quantized_nodes(onnx_ir.to_proto(output)) == {"MatMulInteger": 1} and output.opset_imports[""] == 11
    assert caplog.records == [], "the quantizer would warn through the root logger"
    transposed = [helper.make_node("Transpose", ["w"], ["v"])]
    for model, weight in ((product(transposed, ["x", "v"]), "v"), (product([], ["w", "x"]), "w")):
        message = f"cannot quantize these weights: {weight} of [A-Z][A-Za-z]+ the_product"
        with pytest.raises(EdgeformerError, match=message):
            quantize.quantize_int8(model)


class Odd(nn.Module):
    """Sizes that are no multiple of a block: 5 → 37 → 3."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.wide, self.head = nn.Embedding(50, 5), nn.Linear(5, 37), nn.Linear(37, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(self.tokens(input_ids))))


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


@pytest.mark.parametrize("block", [16, quantize.BLOCK])
def test_products_compute_with_4_bit_weights(block: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = Odd().eval()
    output = quantize.quantize_int4(export_graph(text_spec(module, ["input_ids"], POSITIONS)), block)
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


def test_every_int4_weight_is_stored_once_and_counted(traced: onnx_ir.Model, tmp_path: Path) -> None:
    old = onnx_ir.to_proto(traced).SerializeToString()
    result = run(quantize.quantize_int4(traced), tmp_path / "int4.onnx", {"input_ids": IDS})
    assert onnx_ir.to_proto(traced).SerializeToString() == old
    graph = onnx.load(str(tmp_path / "int4.onnx"))
    # The block and the head are used twice each; positions are a slice, which has rows in INT8.
    assert quantize.quantized_nodes(graph) == {"MatMulNBits": 4, "GatherBlockQuantized": 1, "Slice": 1}
    parameters = count_parameters(Everything())
    audit = audit_sharing(graph, parameters)
    assert stored_twice(audit) is None
    assert audit.stored_parameters == parameters
    parts = weight_parts(graph)
    # 3,000 rows of 32 numbers: half a byte each, and a scale and half a byte of zero point per block.
    assert parts["embeddings"] - 40 * (32 + 4) - 2 * 32 * 4 == 3000 * (16 + 4) + 1500
    portability = audit_portability([tmp_path / "int4.onnx"])
    assert portability.needs is not None and release(portability.needs) >= (1, 20)
    assert any("MatMulNBits (4)" in note for note in portability_notes(portability))
    assert any("needs ONNX Runtime 1.20" in note for note in portability_notes_here(portability, "1.19.2", frozenset()))
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
    output = quantize.quantize_int4(nameless)
    assert sum(node.op_type == "GatherBlockQuantized" for node in output.graph) == 1
    assert "types.weight" in output.graph.initializers


@pytest.fixture(scope="module")
def written_out(tmp_path_factory: pytest.TempPathFactory) -> onnx_ir.Model:
    path = exported_language_run(tmp_path_factory) / "bundle" / "onnx" / "decode.onnx"
    return onnx_ir.from_proto(onnx.load(path))


@pytest.mark.parametrize(("batch", "new", "past"), [(1, 1, 9), (2, 5, 0), (2, 5, 9)])
def test_merged_attention_computes_the_same(written_out, tmp_path, batch, new, past):
    merged = written_out.clone()
    assert RewriteRuleSet([quantize.CachedAttention.rule()]).apply_to_model(merged) == LOOPS
    deduplicate_weights(merged)
    remaining = [node.op_type for node in merged.graph]
    assert remaining.count("MultiHeadAttention") == LOOPS
    assert not {"Softmax", "Trilu", "Where"} & set(remaining)
    draw = np.random.default_rng(batch + new + past)
    sizes = {"batch": batch, "past": past, "sequence": new}
    inputs = {}
    for value in written_out.graph.inputs:
        shape = [size if isinstance(size, int) else sizes[str(size)] for size in value.shape]
        inputs[value.name] = draw.normal(size=shape).astype(np.float32)
    inputs["input_ids"] = draw.integers(0, 60, (batch, new))
    inputs["position_ids"] = np.tile(np.arange(past, past + new), (batch, 1))
    expected, result = (run(graph, tmp_path / "graph.onnx", inputs) for graph in (written_out, merged))
    assert result.keys() == expected.keys()
    for name, array in expected.items():
        assert np.allclose(array, result[name], atol=2e-5, rtol=0), name


@pytest.mark.parametrize("changed", ["upper", "least"])
def test_attention_with_another_mask_is_not_merged(written_out: onnx_ir.Model, changed: str) -> None:
    other = written_out.clone()
    for node in other.graph:
        if changed == "upper" and node.op_type == "Trilu":
            node.attributes["upper"] = onnx_ir.AttrInt64("upper", 1)
        if changed == "least" and node.op_type == "Where":
            value = node.inputs[1]
            value.const_value = onnx_ir.tensor(np.array(-1e9, np.float32), name=value.name)
    assert RewriteRuleSet([quantize.CachedAttention.rule()]).apply_to_model(other) == 0


@pytest.fixture(scope="module")
def decoder_graphs() -> Graphs:
    torch.manual_seed(0)
    config = DecoderConfig(
        kind="decoder", vocab_size=100, hidden_size=96, layers=2, iterations=3, heads=6, kv_heads=2, ffn_size=64,
        max_positions=64,
    )  # fmt: skip
    return ADAPTER.trace(DecoderModel(config).eval(), ("input_ids",), steps=False)


def decoded(model: onnx_ir.Model, path: Path) -> list[np.ndarray]:
    """Logits, keys and values after a prompt, three tokens, and one."""
    onnx_ir.save(model, path)
    ids, results = np.arange(9)[None] * 7 % 100, []
    with OnnxSession(path, threads=1) as session:
        cached = CachedGraph(session)
        for start, end in ((0, 5), (5, 8), (8, 9)):
            (outputs,) = cached.run({"input_ids": ids[:, start:end]}, keep=True)
            results += [outputs["logits"], outputs["present.5.key"], outputs["present.0.value"]]
    return results


@pytest.mark.slow
def test_fused_attention_of_a_decoder_computes_the_same(decoder_graphs: Graphs, tmp_path: Path) -> None:
    fused = decoder_graphs.decode.clone()
    assert RewriteRuleSet([quantize.GroupedAttention.rule()]).apply_to_model(fused) == 6  # 2 layers × 3 iterations
    expected = decoded(decoder_graphs.decode, tmp_path / "plain.onnx")
    for result, exact in zip(decoded(fused, tmp_path / "fused.onnx"), expected, strict=True):
        np.testing.assert_allclose(result, exact, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bits", "tolerance"), [("int8", {8: 30}, 0.05), ("int4", {4: 30}, 0.5)])
def test_a_decoders_weights_have_blocks_and_its_head_8_bits(precision, bits, tolerance, decoder_graphs, tmp_path):
    quantized = quantize.quantized_graphs(decoder_graphs, precision)
    nodes = list(quantized.decode.graph)
    widths = Counter(node.attributes.get_int("bits", 0) for node in nodes if node.op_type == "MatMulNBits")
    assert widths == Counter(bits) + Counter({8: 1})  # five products of 2 layers × 3 iterations, and the head
    assert sum(node.op_type == "GroupQueryAttention" for node in nodes) == 6
    expected, results = (decoded(graph.decode, tmp_path / "graph.onnx") for graph in (decoder_graphs, quantized))
    assert np.abs(results[-3] - expected[-3]).max() < tolerance * expected[-3].std()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_a_block_are_within_half_a_step(bits: int) -> None:
    matrix = np.random.default_rng(0).normal(size=(quantize.BLOCK + 8, 3)).astype(np.float32)
    codes, scales = quantize.block_codes(matrix, bits)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(3, 2, quantize.BLOCK)
    restored = ((codes.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]).reshape(3, -1)[:, : len(matrix)]
    steps = np.abs(restored.T - matrix) / np.abs(scales).repeat(quantize.BLOCK, 1)[:, : len(matrix)].T
    assert steps.max() <= 1.0 and np.median(steps) < 0.5  # only the opposite end of a range is clipped
