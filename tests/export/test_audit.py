"""Audits of ONNX files: weight bytes by part, and portability."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.manifest import Denormals, Portability, Saturation
from edgeformer.bundle import Bundle
from edgeformer.export.audit import audit_portability, weight_parts
from edgeformer.inference import verify as verifying
from edgeformer.models.weights import load_model
from edgeformer.report.sentences import portability_notes, portability_notes_here
from tests.conftest import OLD_FORMAT
from tests.export import graphs

OLD = OLD_FORMAT / "classifier-v1" / "bundle"


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


@pytest.mark.parametrize(
    ("nodes", "tensors", "parts"),
    [
        (  # a tied table counts once, as embeddings
            "y = MatMul(x, weight)  logits = Gemm <transB = 1> (y, table, bias)",
            {"weight": (8, 8), "bias": (40,)},
            {"block": 4 * 64, "heads": 4 * 40},
        ),
        (  # rotary tables and scalars do not count
            "c = Gather(model_cos, ids)  y = Mul(x, c)  z = Mul(y, half)  logits = MatMul(z, weight)",
            {"model_cos": (64, 8), "half": (1,), "weight": (8, 2)},
            {"block": 0, "heads": 4 * 16},
        ),
        (  # no head: the last layer's sum has two products behind it, its own and that of the layer before
            "y = MatMul(x, first)  z = MatMul(y, second)  logits = Add(y, z)",
            {"first": (8, 8), "second": (8, 8)},
            {"block": 4 * 128, "heads": 0},
        ),
    ],
    ids=["tied", "rotary", "headless"],
)
def test_weight_bytes_by_part(nodes, tensors, parts):
    stored = [graphs.weights(name, *shape) for name, shape in {"table": (40, 8), **tensors}.items()]
    layers = graphs.nodes(f"x = Gather(table, ids)  {nodes}")
    ports = [graphs.value("ids", graphs.INT64, ["batch"])], [graphs.value("logits", graphs.FLOAT, None)]
    assert weight_parts(graphs.model(layers, *ports, stored)) == {"embeddings": 4 * 320, **parts}


def test_zero_nan_infinity_and_smallest_normals_are_not_denormal(tmp_path: Path) -> None:
    normal, denormal = np.finfo(np.float32).tiny, np.finfo(np.float32).smallest_subnormal
    edge = [0.0, -0.0, np.nan, np.inf, -np.inf, normal, -normal, denormal, -denormal]
    weight = np.array([*edge, np.nextafter(normal, np.float32(0))], dtype=np.float32)
    ports = [graphs.value("x", graphs.FLOAT, ["batch", 10])], [graphs.value("y", graphs.FLOAT, None)]
    graph = graphs.model(graphs.nodes("y = Add(x, one)"), *ports, [graphs.constant("one", weight)])
    result = audit_portability([graphs.save(tmp_path, graph)])
    assert (result.denormals.weights, result.denormals.of_weights) == (3, 10)
    assert "3 of 10 FP32 weights are denormal" in " ".join(portability_notes(result))
    assert "session.set_denormal_as_zero" in " ".join(portability_notes(result))


def test_operators_and_shapes_of_exported_and_foreign_graphs(tmp_path: Path) -> None:
    result = audit_portability([OLD / "onnx" / "model_int8.onnx"])
    assert (result.opset, result.other_operators, result.control_flow, result.fixed) == (20, {}, {}, ())
    assert result.dynamic == dict.fromkeys(("input_ids", "attention_mask"), ("batch", "sequence"))
    assert result.needs == "1.18" and portability_notes(result) == []
    ports = [graphs.value("x", graphs.FLOAT, [1, 16, 4])], [graphs.value("y", graphs.FLOAT, None)]
    graph = graphs.model(graphs.nodes("y = com.microsoft.Gelu(x)"), *ports)
    result = audit_portability([graphs.save(tmp_path, graph)])
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
