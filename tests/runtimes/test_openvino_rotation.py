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

pytestmark = pytest.mark.skipif(runtime.missing() is not None, reason="openvino is not installed")

SHAPE = (2, 3, 5, 8)


def rotated(**changes: Any) -> Any:
    """A graph that turns the halves of the last axis of x [2, 3, 5, 8] by tables [5, 4], but for the ``changes``:

    ``shape`` and ``table``, their sizes; ``axis`` and ``parts`` of what is taken apart, and ``joined``, along which it
    comes together; ``same``: the sum is of the difference's own products; ``other_x``: of another x; ``kind``: numpy's
    name of the type; ``turned_round``: factors and terms stand in the other order.
    """
    runtime.core()
    import openvino as package

    ops = package.opset13
    kind = np.dtype(changes.get("kind", "float32"))
    axis, parts = changes.get("axis", 3), changes.get("parts", 2)
    x, other = (ops.parameter(changes.get("shape", SHAPE), kind) for _ in range(2))
    cos, sin = (ops.parameter(changes.get("table", (5, 4)), kind) for _ in range(2))
    first, second = ops.split(x, ops.constant(axis), parts).outputs()[:2]
    third, fourth = (
        ops.split(other, ops.constant(axis), parts).outputs()[:2] if "other_x" in changes else (first, second)
    )
    angles = (cos, sin) if "same" in changes else (sin, cos)
    terms = [ops.multiply(third, angles[0]), ops.multiply(fourth, angles[1])]
    if "turned_round" in changes:
        terms = [ops.multiply(angles[1], fourth), ops.multiply(angles[0], third)]
    turned = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin))
    concatenated = ops.concat([turned, ops.add(*terms)], changes.get("joined", axis))
    return package.Model([concatenated], [x, other, cos, sin])


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


@pytest.mark.parametrize("changes", [{}, {"turned_round": True}, {"kind": "float16"}], ids=str)
def test_what_is_rewritten_stays_what_it_is(changes: dict[str, Any]) -> None:
    expected, actual, kernels = both(changes, rewritten=1)
    assert kernels == (0, 1)
    assert actual == pytest.approx(expected, abs=2e-3 if "kind" in changes else 1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"axis": 0, "table": (5, 8)},
        {"axis": 2, "shape": (2, 3, 10, 8), "table": (5, 8)},
        {"parts": 4, "table": (5, 2)},
        {"shape": (2, 3, 5, 16), "parts": 4},
        {"table": (3, 5, 4)},
        {"shape": (2, 3, 1, 8)},
        {"table": (1, 4)},
        {"joined": 2},
        {"same": True},
        {"other_x": True},
    ],
    ids=str,
)
def test_what_only_looks_like_a_rotation_is_left_alone(changes: dict[str, Any]) -> None:
    expected, actual, kernels = both(changes, rewritten=0)
    assert kernels == (0, 0) and np.array_equal(actual, expected)


def both(changes: dict[str, Any], rewritten: int) -> tuple[Any, Any, tuple[int, int]]:
    """What a graph answers as it is and behind the rewriting, and how many kernels of rotations each has."""
    draw = np.random.default_rng(0)
    plain, changed = rotated(**changes), rotated(**changes)
    feed = [
        draw.normal(size=list(model_part.shape)).astype(model_part.element_type.to_dtype())
        for model_part in plain.inputs
    ]
    assert fuse_rotations(changed) == rewritten
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = [runtime.core().compile_model(model_part, "CPU", options) for model_part in (plain, changed)]
    answers = [next(iter(model_part(feed).values())) for model_part in compiled]
    return answers[0], answers[1], (kernels_of(compiled[0]), kernels_of(compiled[1]))


def kernels_of(compiled: Any) -> int:
    """Rotations in what OpenVINO made of a graph."""
    kinds = [node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops()]
    return sum((kind if isinstance(kind, str) else kind.astype(str)) == "RoPE" for kind in kinds)
