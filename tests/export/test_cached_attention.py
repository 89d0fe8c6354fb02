"""Attention to kept tokens as one operator: the same numbers, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch

from edgeformer.export.graphs import write_graph
from edgeformer.export.int4 import merge_attention
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.graphs import compose_decode, trace_pieces
from edgeformer.models.tracing import tidy
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from tests.models.crt_oracle import small_config

LOOPS = 3


@pytest.fixture(scope="module")
def written_out() -> onnx_ir.Model:
    torch.manual_seed(0)
    model = build_crt(small_config(loops=LOOPS, exits=(2,), cycles=2)).eval()
    return compose_decode(model, trace_pieces(model)[1])


@pytest.mark.parametrize(("batch", "new", "past"), [(1, 1, 9), (2, 1, 9), (2, 5, 0), (2, 5, 9), (1, 1, 0)])
def test_it_computes_what_was_written_out(
    written_out: onnx_ir.Model, tmp_path: Path, batch: int, new: int, past: int
) -> None:
    merged = written_out.clone()
    assert merge_attention(merged) == LOOPS
    tidy(merged)
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
def test_another_mask_is_left_alone(written_out: onnx_ir.Model, changed: str) -> None:
    other = written_out.clone()
    for node in other.graph:
        if changed == "upper" and node.op_type == "Trilu":
            node.attributes["upper"] = onnx_ir.AttrInt64("upper", 1)
        if changed == "least" and node.op_type == "Where":
            value = node.inputs[1]
            assert value is not None
            value.const_value = onnx_ir.tensor(np.array(-1e9, np.float32), name=value.name)
    assert merge_attention(other) == 0
