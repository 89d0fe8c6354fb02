"""Rotary embeddings become OpenVINO's own operator, and what only looks like one is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.bundle import Bundle
from edgeformer.runtimes import OpenOptions
from edgeformer.runtimes.openvino import session as runtime
from edgeformer.runtimes.openvino.session import OpenVINOSession, fuse_rotations

pytestmark = pytest.mark.skipif(runtime.OPENVINO.missing() is not None, reason="openvino is not installed")


def rotated(
    shape: tuple[int, ...] = (2, 3, 5, 8), table: tuple[int, ...] = (5, 4), kind: str = "float32", joined: int = 3,
    look_alike: str = "",
) -> Any:  # fmt: skip
    """Rotate the halves of the last axis of x by tables; a look-alike adds the wrong products or another x."""
    runtime.core()
    import openvino as package

    ops = package.opset13
    x, other = (ops.parameter(shape, np.dtype(kind)) for _ in range(2))
    cos, sin = (ops.parameter(table, np.dtype(kind)) for _ in range(2))
    first, second = ops.split(x, ops.constant(3), 2).outputs()
    third, fourth = ops.split(other if look_alike == "another x" else x, ops.constant(3), 2).outputs()
    if look_alike != "another x":
        third, fourth = first, second
    angles = (cos, sin) if look_alike == "the same products" else (sin, cos)
    terms = [ops.multiply(angles[1], fourth), ops.multiply(angles[0], third)]
    turned = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin))
    return package.Model([ops.concat([turned, ops.add(*terms)], joined)], [x, other, cos, sin])


def test_an_encoder_is_computed_with_fused_rotations(finished_run: Path) -> None:
    bundle = Bundle.open(finished_run / "bundle")
    config = json.loads((bundle.folder / "config.json").read_text(encoding="utf-8"))["edgeformer"]
    entry = bundle.artifact("onnx-fp32")
    rows = {"input_ids": np.array([[5, 6, 7, 8, 9, 10]]), "attention_mask": np.array([[1, 1, 1, 1, 0, 0]])}
    with bundle.session(entry, OpenOptions(runtime.CPU)) as fused, bundle.session(entry) as plain:
        assert isinstance(fused, OpenVINOSession)
        per_pass = 2 * config["layers"]
        assert kernels_of(fused._request.get_compiled_model()) == per_pass * config["iterations"] > 0
        actual, expected = fused.run(rows), plain.run(rows)
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "rewritten"),
    [
        ({}, 1),
        ({"kind": "float16"}, 1),
        ({"table": (3, 5, 4)}, 0),
        ({"shape": (2, 3, 1, 8)}, 0),
        ({"table": (1, 4)}, 0),
        ({"joined": 2}, 0),
        ({"look_alike": "the same products"}, 0),
        ({"look_alike": "another x"}, 0),
    ],
    ids=str,
)
def test_only_rotations_are_rewritten_and_stay_what_they_are(changes: dict[str, Any], rewritten: int) -> None:
    draw = np.random.default_rng(0)
    plain, changed = rotated(**changes), rotated(**changes)
    feed = [draw.normal(size=list(port.shape)).astype(port.element_type.to_dtype()) for port in plain.inputs]
    assert fuse_rotations(changed) == rewritten
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = [runtime.core().compile_model(model, "CPU", options) for model in (plain, changed)]
    expected, actual = (next(iter(model(feed).values())) for model in compiled)
    assert [*map(kernels_of, compiled)] == [0, rewritten]
    assert actual == pytest.approx(expected, abs=(2e-3 if "kind" in changes else 1e-6) * rewritten)


def kernels_of(compiled: Any) -> int:
    """Rotations in what OpenVINO made of a graph."""
    kinds = [node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops()]
    return sum((kind if isinstance(kind, str) else kind.astype(str)) == "RoPE" for kind in kinds)
