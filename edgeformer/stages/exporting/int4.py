"""INT4: stored weights and tables in blocks of 4 bits, each block with a scale and a zero point.

Weights only: a product reads its weight in 4 bits and computes with what they stand for, activations in INT8 by blocks
of their own (``accuracy_level`` 4), so no row depends on those beside it. A weight takes 5.1 bits with the scales and
zero points of blocks of 32, 4.3 in blocks of 128; a product that reads little else, as in decoding, is faster for it,
one that computes much is not. A block lies along the inputs of a product, and along a table's row.

ONNX has no such operators: MatMulNBits and GatherBlockQuantized are ONNX Runtime's own, which other runtimes may lack
(the portability audit says so). So attention to earlier tokens is an operator of its own there, too. Tables of which
slices are taken have rows in INT8. A weight that is used by several products, as of a looped block, is stored once;
norms, biases, rotary tables and what has few rows stay FP32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx_ir
from numpy.typing import NDArray
from onnx_ir.passes.common import DeduplicateHashedInitializersPass, RemoveUnusedNodesPass

from edgeformer.families.tracing import Graphs
from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.exporting.audit import SCALE, ZERO_POINT
from edgeformer.stages.exporting.cached_attention import DOMAIN, merge_attention
from edgeformer.stages.exporting.int8 import (
    gemm_as_matmul,
    is_table,
    left_in_float,
    quantize_tables,
    replace_node,
    store,
)

BLOCK = 32
"""Numbers that share a scale, of weights a few of which are far larger than the others, as pretrained ones have them:
what most 4-bit language models are published with. MiniLM's vectors keep to the bar with 32, and not with 64."""

LONG_BLOCK = 128
"""The same for our own models: they lose next to nothing by it, and a token reads a sixth less."""

_IN_INT8 = 4
_LARGEST = 15


def quantize(model: onnx_ir.Model, block: int = BLOCK) -> onnx_ir.Model:
    """The graph with every stored weight of a product and every table in 4 bits; each tensor stored once.

    ``model`` is FP32, with any number of outputs; it is left unchanged.

    Args:
        block: numbers that share a scale; a power of two from 16 on.

    Raises:
        EdgeformerError: some weight would stay FP32.
    """
    made = model.clone()
    gemm_as_matmul(made)
    _tables(made, block)
    quantize_tables(made)
    _products(made, block)
    merge_attention(made)
    made.graph.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(made)
    DeduplicateHashedInitializersPass()(made)
    if left := left_in_float(made):
        raise EdgeformerError(f"INT4: these weights would stay FP32: {', '.join(left[:5])}")
    return made


def quantized_graphs(graphs: Graphs) -> Graphs:
    """All graphs of a model in 4 bits, in blocks as long as its weights allow; errors are those of :func:`quantize`."""
    block = BLOCK if graphs.row_scales else LONG_BLOCK
    return replace(
        graphs,
        exits=quantize(graphs.exits, block),
        steps={part: quantize(graph, block) for part, graph in graphs.steps.items()},
        decode=quantize(graphs.decode, block) if graphs.decode is not None else None,
    )


@dataclass(frozen=True)
class _Blocks:
    """Rows in 4 bits: a number is (code - zero point) × scale.

    Attributes:
        codes: 0 to 15, uint8 [rows, blocks, block]; a last block is filled up with what stands for 0.
        scales: float32 [rows, blocks].
        zeros: the code of 0, uint8 [rows, blocks].
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]


def _in_blocks(rows: NDArray[np.float32], block: int) -> _Blocks:
    """Rows [n, size] in 4 bits, from the lowest to the highest number of each block; 0 is always exact."""
    count = -(-rows.shape[1] // block)
    padded = np.zeros((len(rows), count * block), np.float32)
    padded[:, : rows.shape[1]] = rows
    parts = padded.reshape(len(rows), count, block)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scales = np.where(high > low, (high - low) / _LARGEST, 1).astype(np.float32)
    zeros = np.rint(-low / scales)
    codes = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, _LARGEST)
    return _Blocks(codes.astype(np.uint8), scales, zeros.astype(np.uint8))


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes of the last axis in a byte, the first one in its lower half; a last odd one has 0 beside it."""
    even = codes if codes.shape[-1] % 2 == 0 else np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    packed: NDArray[np.uint8] = even[..., 0::2] | (even[..., 1::2] << np.uint8(4))
    return packed


def _numbers(value: onnx_ir.Value) -> NDArray[np.float32]:
    assert value.const_value is not None
    found: NDArray[np.float32] = np.asarray(value.const_value.numpy(), np.float32)
    return found


def _tables(model: onnx_ir.Model, block: int) -> None:
    """Every Gather of rows from a table as GatherBlockQuantized."""
    for table in [value for value in model.graph.initializers.values() if is_table(value)]:
        users = list(table.consumers())
        if any(node.op_type != "Gather" for node in users):
            continue
        rows, name = _numbers(table), str(table.name)
        found = _in_blocks(rows, block)
        codes = found.codes.reshape(len(rows), -1)[:, : rows.shape[1]]
        stored = [
            store(model, f"{name}_int4", codes.astype(ml_dtypes.uint4)),
            store(model, f"{name}{SCALE}", found.scales),
            store(model, f"{name}{ZERO_POINT}", found.zeros.astype(ml_dtypes.uint4)),
        ]
        sizes = {"gather_axis": 0, "quantize_axis": 1, "block_size": block}
        for node in users:
            inputs = [stored[0], node.inputs[1], *stored[1:]]
            taken = onnx_ir.node(
                "GatherBlockQuantized", inputs, sizes, domain=DOMAIN, name=f"{node.outputs[0].name}_int4"
            )
            replace_node(model, node, [taken])
        model.graph.initializers.pop(name)


def _products(model: onnx_ir.Model, block: int) -> None:
    """Every MatMul with a stored weight [K, N] as MatMulNBits."""
    made: dict[onnx_ir.Value, tuple[list[onnx_ir.Value], dict[str, int]]] = {}
    for node in list(model.graph):
        data, weight = (*node.inputs, None, None)[:2]
        if node.op_type != "MatMul" or data is None or weight is None or not weight.is_initializer():
            continue
        if weight not in made:
            numbers, name = _numbers(weight), str(weight.name)
            if numbers.ndim != 2:
                continue
            found = _in_blocks(np.ascontiguousarray(numbers.T), block)
            stored = [
                store(model, f"{name}_int4", _pairs(found.codes)),
                store(model, f"{name}{SCALE}", found.scales.reshape(-1)),
                store(model, f"{name}{ZERO_POINT}", _pairs(found.zeros).reshape(-1)),
            ]
            inner, outer = numbers.shape
            made[weight] = stored, {"K": inner, "N": outer, "bits": 4, "block_size": block, "accuracy_level": _IN_INT8}
        stored, sizes = made[weight]
        inputs: list[onnx_ir.Value | None] = [data, *stored]
        last = node
        if (added := _sum_behind(node)) is not None:
            last, bias = added
            inputs += [None, bias]
        name = f"{last.outputs[0].name}_int4"
        replace_node(model, last, [onnx_ir.node("MatMulNBits", inputs, sizes, domain=DOMAIN, name=name)])
        if last is not node:
            model.graph.remove(node, safe=True)


def _sum_behind(product: onnx_ir.Node) -> tuple[onnx_ir.Node, onnx_ir.Value] | None:
    """The Add of a stored vector that alone takes a product, and the vector: the operator adds it itself."""
    (result,) = product.outputs
    users = result.uses()
    if len(users) != 1 or result.is_graph_output() or (add := next(iter(users)).node).op_type != "Add":
        return None
    (bias,) = (value for value in add.inputs if value is not result)
    alone = bias is not None and bias.is_initializer() and bias.shape is not None and len(bias.shape) == 1
    return (add, bias) if alone and bias is not None else None
