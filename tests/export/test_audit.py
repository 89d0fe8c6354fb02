"""Audits of ONNX files: weight bytes by part, and portability."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeformer.artifacts.manifest import Denormals, Portability, Saturation
from edgeformer.bundle import Bundle
from edgeformer.export.audit import audit_portability, weight_parts
from edgeformer.inference import verify as verifying
from edgeformer.models.weights import load_model
from edgeformer.report.sentences import portability_notes, portability_notes_here


def test_parts_of_a_classifier_are_those_of_its_modules(finished_run: Path) -> None:
    """The graph's weights have lost their names; the model still knows which is which."""
    sizes = {name: parameter.numel() for name, parameter in load_model(finished_run).named_parameters()}
    tables = sum(size for name, size in sizes.items() if name.startswith(("tokens.", "positions.", "types.")))
    head = sum(size for name, size in sizes.items() if name.startswith("head."))
    folder = finished_run / "bundle" / "onnx"
    fp32, fp16 = (weight_parts(onnx.load(folder / f"{name}.onnx")) for name in ("model", "model_fp16"))
    assert fp32["embeddings"] == 4 * tables and fp16["embeddings"] == 2 * tables
    # A bias of zeros is stored once with others like it, wherever it stands.
    assert 0 <= 4 * head - fp32["heads"] <= 8
    assert fp32["block"] == pytest.approx(4 * (sum(sizes.values()) - tables - head), abs=8)


def stored(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def graph(nodes: list[onnx.NodeProto], tensors: list[onnx.TensorProto]) -> onnx.ModelProto:
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [ids], [logits], tensors))


def node(kind: str, inputs: str, output: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


READ = node("Gather", "table ids", "x")


@pytest.mark.parametrize(
    ("nodes", "tensors", "parts"),
    [
        (  # a tied table counts once, as embeddings
            [READ, node("MatMul", "x weight", "y"), node("Gemm", "y table bias", "logits", transB=1)],
            [stored("weight", 8, 8), stored("bias", 40)],
            {"block": 4 * 64, "heads": 4 * 40},
        ),
        (  # rotary tables and scalars do not count
            [READ, node("Gather", "model.cos ids", "c"), node("Mul", "x c", "y"), node("Mul", "y half", "z"),
             node("MatMul", "z weight", "logits")],
            [stored("model.cos", 64, 8), stored("half", 1), stored("weight", 8, 2)],
            {"block": 0, "heads": 4 * 16},
        ),
        (  # no head: the last layer's sum has two products behind it, its own and that of the layer before
            [READ, node("MatMul", "x first", "y"), node("MatMul", "y second", "z"), node("Add", "y z", "logits")],
            [stored("first", 8, 8), stored("second", 8, 8)],
            {"block": 4 * 128, "heads": 0},
        ),
    ],
    ids=["tied", "rotary", "headless"],
)  # fmt: skip
def test_weight_bytes_by_part(nodes, tensors, parts):
    assert weight_parts(graph(nodes, [stored("table", 40, 8), *tensors])) == {"embeddings": 4 * 320, **parts}


OLD = Path(__file__).parents[1] / "old_format" / "classifier-v1" / "bundle"


def saved(path: Path, nodes: list[onnx.NodeProto], tensors: dict[str, NDArray[np.generic]], opset: int = 20) -> Path:
    """A graph x [B, S, 4] → y, with these stored tensors."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    stored = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "tiny", [x], [y], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), path)
    return path


def test_zero_nan_infinity_and_smallest_normals_are_not_denormal(tmp_path: Path) -> None:
    normal, denormal = np.finfo(np.float32).tiny, np.finfo(np.float32).smallest_subnormal
    edge = [0.0, -0.0, np.nan, np.inf, -np.inf, normal, -normal, denormal, -denormal]
    weight = np.array([*edge, np.nextafter(normal, np.float32(0))], dtype=np.float32)
    path = saved(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "one"], ["y"])], {"one": weight})
    result = audit_portability([path])
    assert (result.denormals.weights, result.denormals.of_weights) == (3, 10)
    assert "3 of 10 FP32 weights are denormal" in " ".join(portability_notes(result))
    assert "session.set_denormal_as_zero" in " ".join(portability_notes(result))


def test_operators_and_shapes_of_exported_and_foreign_graphs(tmp_path: Path) -> None:
    """A bundle that was exported has standard operators, any batch and length."""
    result = audit_portability([OLD / "onnx" / "model_int8.onnx"])
    assert (result.opset, result.other_operators, result.control_flow, result.fixed) == (20, {}, {}, ())
    assert result.dynamic == dict.fromkeys(("input_ids", "attention_mask"), ("batch", "sequence"))
    assert result.needs == "1.18" and portability_notes(result) == []
    node = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    path = saved(tmp_path / "m.onnx", [node], {})
    graph = onnx.load(path)
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    graph.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    onnx.save(graph, path)
    result = audit_portability([path])
    assert result.other_operators == {"com.microsoft:Gelu": 1} and result.fixed == ("x",)
    assert "com.microsoft:Gelu (1)" in portability_notes(result)[0]


def audit(**changes: object) -> Portability:
    usual = {"opset": 17, "ir_version": 8, "denormals": Denormals(weights=0, of_weights=9)}
    return Portability.model_validate({**usual, **changes})


@pytest.mark.parametrize(
    ("opset", "ir_version", "needs"),
    [(11, 6, None), (17, 9, "1.16"), (20, 8, "1.17"), (20, 10, "1.18"), (22, 10, "1.21"), (99, 10, None)],
)
def test_required_runtime_version(opset: int, ir_version: int, needs: str | None) -> None:
    assert audit(opset=opset, ir_version=ir_version).needs == needs


def test_notes_depend_on_runtime_version_and_cpu() -> None:
    risky = Saturation(pairs=10, at_risk=2)
    assert portability_notes(audit(saturation=risky))[0].endswith("without VNNI"), "no sum was looked at"
    old = audit(opset=20, ir_version=10)
    assert "needs ONNX Runtime 1.18" in portability_notes_here(old, "1.9.2", None)[0]
    assert portability_notes_here(old, "1.18.0", None) == []
    avx2, vnni = frozenset({"avx2"}), frozenset({"avx2", "avx512_vnni"})
    assert "no VNNI" in portability_notes_here(audit(saturation=risky), "1.31", avx2)[0]
    assert portability_notes_here(audit(saturation=risky), "1.31", vnni) == []
    assert portability_notes_here(audit(saturation=risky), "1.31", frozenset({"asimd"})) == []
    assert "unknown" in portability_notes_here(audit(saturation=risky), "1.31", None)[0]
    assert portability_notes_here(audit(saturation=Saturation(pairs=10, at_risk=0)), "1.31", avx2) == []


def test_verify_reports_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(OLD)
    entry = bundle.artifact("onnx-int8")
    risky = entry.model_copy(update={"portability": audit(saturation=Saturation(pairs=10, at_risk=2))})
    bundle.artifacts = (risky,)
    monkeypatch.setattr(verifying, "cpu_flags", lambda: frozenset({"avx2"}))
    (check,) = verifying.verify(bundle, "onnx-int8").artifacts
    assert check.status == "verified" and "no VNNI" in check.notes[0] and "2 of 10 pairs" in check.notes[1]
