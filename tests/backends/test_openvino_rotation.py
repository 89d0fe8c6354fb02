"""Rotary embeddings become OpenVINO's own operator, and what only looks like one is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.backends import OpenOptions
from edgeformer.backends.openvino import runtime
from edgeformer.backends.openvino.session import OpenVINOSession
from edgeformer.bundle import Bundle

pytestmark = pytest.mark.skipif(runtime.missing() is not None, reason="openvino is not installed")

SHAPE = (2, 3, 5, 8)


def rotations(request: Any) -> int:
    """Fused ones in what was compiled."""
    nodes = request.get_compiled_model().get_runtime_model().get_ops()
    kinds = [node.get_rt_info()["layerType"] for node in nodes]
    return sum((kind if isinstance(kind, str) else kind.astype(str)) == "RoPE" for kind in kinds)


def rotated(
    axis: int = 3, table: tuple[int, ...] = (5, 4), swap: bool = False, parts: int = 2, joined: int | None = None
) -> Any:
    """A graph that turns halves of ``axis``; ``swap``: the sum is of the difference's own products; ``joined``: the
    axis along which they come together."""
    import openvino
    from openvino import opset13 as ops

    x = ops.parameter(SHAPE, np.float32)
    cos, sin = (ops.parameter(table, np.float32) for _ in range(2))
    first, second = ops.split(x, ops.constant(axis), parts).outputs()[:2]
    third, fourth = (cos, sin) if swap else (sin, cos)
    turned = ops.subtract(ops.multiply(first, cos), ops.multiply(second, sin))
    rest = ops.add(ops.multiply(first, third), ops.multiply(second, fourth))
    return openvino.Model([ops.concat([turned, rest], axis if joined is None else joined)], [x, cos, sin])


def test_an_encoder_is_computed_with_fused_rotations(finished_run: Path) -> None:
    bundle = Bundle.open(finished_run / "bundle")
    config = json.loads((bundle.folder / "config.json").read_text(encoding="utf-8"))["edgeformer"]
    entry = bundle.artifact("onnx-fp32")
    rows = {"input_ids": np.array([[5, 6, 7, 8, 9, 10]]), "attention_mask": np.array([[1, 1, 1, 1, 0, 0]])}
    with bundle.session(entry, OpenOptions(runtime.CPU)) as fused, bundle.session(entry) as plain:
        assert isinstance(fused, OpenVINOSession)
        per_pass = 2 * config["layers"]
        assert rotations(fused._request) == per_pass * config["iterations"] > 0
        found, wanted = fused.run(rows), plain.run(rows)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 1),
        ({"axis": 1, "table": (5, 8), "parts": 3}, 0),
        ({"axis": 2, "table": (1, 8), "parts": 5}, 0),
        ({"table": (3, 5, 4)}, 0),
        ({"swap": True}, 0),
        ({"joined": 2}, 0),
        ({"table": (5, 2), "parts": 4}, 0),
    ],
    ids=["halves", "heads", "positions", "a table per head", "the same angle", "stacked", "quarters"],
)
def test_only_halves_of_the_last_axis_are_rewritten_and_stay_what_they_are(changes: dict[str, Any], count: int) -> None:
    from edgeformer.backends.openvino.rotation import fuse_rotations

    draw = np.random.default_rng(0)
    table = changes.get("table", (5, 4))
    feed = [draw.normal(size=size).astype(np.float32) for size in (SHAPE, table, table)]
    model, changed = rotated(**changes), rotated(**changes)
    assert fuse_rotations(changed) == count
    compiled = (
        runtime.core().compile_model(one, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}) for one in (model, changed)
    )
    plain, fused = (one.create_infer_request() for one in compiled)
    assert (rotations(plain), rotations(fused)) == (0, count)
    (wanted,), (found,) = plain.infer(feed).values(), fused.infer(feed).values()
    assert found == pytest.approx(wanted, abs=1e-6)
