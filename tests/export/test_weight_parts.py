"""What the bytes of an exported graph are for: embeddings, block, heads, and the rest of the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.export.audit import weight_parts
from edgeformer.export.int8 import quantize
from edgeformer.models.weights import load_model


def by_name(artifacts: tuple[ArtifactManifest, ...]) -> dict[str, dict[str, int]]:
    return {artifact.id: artifact.parts_bytes for artifact in artifacts}


def test_parts_of_a_classifier_are_those_of_its_modules(fresh_run: Path) -> None:
    """The graph's weights have lost their names; the model still knows which is which."""
    bundle = Bundle.open(fresh_run / "bundle").manifest
    model = load_model(fresh_run)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = sum(size for name, size in sizes.items() if name.startswith(("tokens.", "positions.", "types.")))
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    parts = by_name(bundle.artifacts)
    assert parts["onnx-fp32"]["embeddings"] == 4 * tables
    # A bias of zeros is stored once with others like it, wherever it stands.
    assert 0 <= 4 * head - parts["onnx-fp32"]["heads"] <= 8
    assert parts["onnx-fp32"]["block"] == pytest.approx(4 * (sum(sizes.values()) - tables - head), abs=8)
    assert parts["onnx-fp16"]["embeddings"] == 2 * tables
    for artifact in bundle.artifacts:
        assert sum(artifact.parts_bytes.values()) == artifact.size_bytes


def test_int8_parts_keep_their_places(finished_run: Path) -> None:
    fp32 = onnx_ir.load(finished_run / "bundle" / "onnx" / "model.onnx")
    old, new = weight_parts(onnx_ir.to_proto(fp32)), weight_parts(onnx_ir.to_proto(quantize(fp32)))
    for part in ("embeddings", "block"):
        assert 0.2 < new[part] / old[part] < 0.75
    assert 0 < new["heads"] <= old["heads"]


def stored(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def graph(nodes: list[onnx.NodeProto], tensors: list[onnx.TensorProto]) -> onnx.ModelProto:
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [ids], [logits], tensors))


def test_a_tied_table_counts_once_as_embeddings() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
        helper.make_node("Gemm", ["y", "table", "bias"], ["logits"], transB=1),
    ]
    parts = weight_parts(graph(nodes, [stored("table", 40, 8), stored("weight", 8, 8), stored("bias", 40)]))
    assert parts == {"embeddings": 4 * 320, "block": 4 * 64, "heads": 4 * 40}


def test_rotary_tables_and_scalars_are_no_part() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Gather", ["model.cos", "ids"], ["c"]),
        helper.make_node("Mul", ["x", "c"], ["y"]),
        helper.make_node("Mul", ["y", "half"], ["z"]),
        helper.make_node("MatMul", ["z", "weight"], ["logits"]),
    ]
    tensors = [stored("table", 40, 8), stored("model.cos", 64, 8), stored("half", 1), stored("weight", 8, 2)]
    assert weight_parts(graph(nodes, tensors)) == {"embeddings": 4 * 320, "block": 0, "heads": 4 * 16}


def test_a_stack_that_ends_without_a_head_has_none() -> None:
    """Embeddings: the last layer's sum has two products behind it, its own and that of the layer before."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "first"], ["y"]),
        helper.make_node("MatMul", ["y", "second"], ["z"]),
        helper.make_node("Add", ["y", "z"], ["logits"]),
    ]
    parts = weight_parts(graph(nodes, [stored("table", 40, 8), stored("first", 8, 8), stored("second", 8, 8)]))
    assert parts == {"embeddings": 4 * 320, "block": 4 * 128, "heads": 0}
