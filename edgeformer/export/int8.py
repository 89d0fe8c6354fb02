"""INT8: products with a stored weight compute in integers, tables of rows are stored in them.

Weights get one scale per output channel and 7 bits. With 8 bits the sum of two products overflows the 16 bits that CPUs
without VNNI instructions keep it in, and they cut it off without a word: up to 0.18 in the logits of the light SST-2
model. With 7 bits every CPU computes the same integers. Activations get 8 bits and one scale for all rows and positions
of a call, found while running: what shares a call with a row moves its logits by about as much as INT8 itself does.
Pretrained encoders keep tokens whose states are many times larger than others' ([SEP] above all), which leaves the
others few of the 255 steps; they ask for a scale per position (``row_scales``), which halves the error and costs time:
5 to 13 % for one text, 20 to 35 % in batches, measured in turns on one loaded core. Our own models gain nothing by it.

Tables (token and position embeddings) take no part in products, so their rows have 8 bits and a scale each. Norms,
biases, rotary tables and whatever has few rows stay FP32. Only standard ONNX operators are used.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
from numpy.typing import NDArray
from onnx import TensorProto
from onnx_ir.passes.common import DeduplicateHashedInitializersPass, RemoveUnusedNodesPass
from onnxruntime.quantization import QuantType, quantize_dynamic

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.export.audit import INTEGERS, NO_PARAMETERS, SCALE
from edgeformer.models.tracing import Graphs

TABLE_ROWS = 32
"""A table with fewer rows stays FP32: token types, loop encodings."""

_LARGEST = 127
_SMALLEST = 1e-12
"""What a position of zeros is divided by."""

_PRODUCTS = ("MatMul", "Gemm")
_WEIGHT_OPERAND = {"MatMulInteger": 1, "Gather": 0, "Slice": 0, "MatMulNBits": 1, "GatherBlockQuantized": 0}
"""Operator → which of its inputs can be a weight stored in INT8, or in blocks of 4 bits."""


def quantize(model: onnx_ir.Model, workplace: Path | None = None, *, row_scales: bool = False) -> onnx_ir.Model:
    """The graph in INT8: every MatMul and Gemm with a stored weight, every table; each tensor stored once.

    ``model`` is FP32, as :func:`~edgeformer.models.tracing.export_graph` and ``cut_out`` make it, with any number of
    outputs. It is left unchanged.

    Args:
        workplace: folder for the quantizer's files, which take as much as the model; None: the system's.
        row_scales: every position's activations get a scale of their own, instead of one for the whole call.

    Raises:
        EdgeformerError: some weight would stay FP32.
    """
    prepared = prepare(model)
    if row_scales:
        _scale_rows(prepared)
    quantized = _quantize_products(prepared, workplace)
    RemoveUnusedNodesPass()(quantized)
    DeduplicateHashedInitializersPass()(quantized)
    left = left_in_float(quantized)
    if left:
        raise EdgeformerError(f"INT8: these weights would stay FP32: {', '.join(left[:5])}")
    return quantized


def quantized_graphs(graphs: Graphs, workplace: Path) -> Graphs:
    """All graphs of a model in INT8; arguments and errors are those of :func:`quantize`."""
    made = partial(quantize, workplace=workplace, row_scales=graphs.row_scales)
    return replace(
        graphs,
        exits=made(graphs.exits),
        steps={part: made(graph) for part, graph in graphs.steps.items()},
        decode=made(graphs.decode) if graphs.decode is not None else None,
    )


def prepare(model: onnx_ir.Model) -> onnx_ir.Model:
    """A copy that any quantizer of products can take: tables are in INT8, Gemm is MatMul, every tensor stored once."""
    prepared = model.clone()
    gemm_as_matmul(prepared)
    quantize_tables(prepared)
    DeduplicateHashedInitializersPass()(prepared)
    return prepared


def quantized_nodes(graph: onnx.ModelProto) -> dict[str, int]:
    """Operator → nodes with a weight that is stored in INT8, or in blocks of 4 bits."""
    stored = {tensor.name for tensor in graph.graph.initializer if tensor.data_type in INTEGERS}
    counted = Counter(
        node.op_type
        for node in graph.graph.node
        if node.op_type in _WEIGHT_OPERAND and node.input[_WEIGHT_OPERAND[node.op_type]] in stored
    )
    return dict(counted)


def quantized_pairs(graph: onnx.ModelProto) -> dict[str, int]:
    """Operator → nodes whose weight is stored in INT8 behind a DequantizeLinear, as static quantisers write it."""
    stored = {tensor.name for tensor in graph.graph.initializer if tensor.data_type in INTEGERS}
    pairs = (node for node in graph.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored)
    weights = {node.output[0] for node in pairs}
    return dict(Counter(node.op_type for node in graph.graph.node if weights.intersection(node.input)))


def gemm_as_matmul(model: onnx_ir.Model) -> None:
    """Gemm → MatMul, Add where it is the same. The quantizer would do that too, but wrongly for a shared weight."""
    transposed: dict[onnx_ir.Value, onnx_ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        attributes, (data, weight, *bias) = node.attributes, node.inputs
        factors = attributes.get_float("alpha", 1.0), attributes.get_float("beta", 1.0), attributes.get_int("transA", 0)
        if factors != (1.0, 1.0, 0) or weight is None or not weight.is_initializer():
            continue  # more than a product with a stored weight and a sum
        assert data is not None and weight.const_value is not None
        if attributes.get_int("transB", 0):
            if weight not in transposed:
                turned = np.ascontiguousarray(weight.const_value.numpy().T)
                transposed[weight] = store(model, f"{weight.name}_transposed", turned)
            weight = transposed[weight]
        product = onnx_ir.node("MatMul", [data, weight], name=f"{node.outputs[0].name}_matmul")
        last = product
        if bias and bias[0] is not None:
            last = onnx_ir.node("Add", [product.outputs[0], bias[0]], name=f"{node.outputs[0].name}_add")
            product.outputs[0].name = f"{node.outputs[0].name}_product"
        replace_node(model, node, [product] if last is product else [product, last])
    RemoveUnusedNodesPass()(model)


def quantize_tables(model: onnx_ir.Model) -> None:
    """Rows are taken from the table in INT8, from its scales in FP32, and multiplied."""
    for table in [value for value in model.graph.initializers.values() if is_table(value)]:
        assert table.const_value is not None
        rows = table.const_value.numpy()
        largest = np.abs(rows).max(axis=1, keepdims=True)
        scales = np.where(largest > 0, largest / _LARGEST, 1).astype(np.float32)
        stored = store(model, f"{table.name}_quantized", np.rint(rows / scales).astype(np.int8))
        scale = store(model, f"{table.name}{SCALE}", scales)
        for node in list(table.consumers()):
            name, rest = node.outputs[0].name, list(node.inputs[1:])
            attributes = list(node.attributes.values())
            taken = onnx_ir.Node("", node.op_type, [stored, *rest], attributes, name=f"{node.name}_rows")
            scaling = onnx_ir.Node("", node.op_type, [scale, *rest], attributes, name=f"{node.name}_row_scales")
            cast = onnx_ir.node("Cast", [taken.outputs[0]], {"to": TensorProto.FLOAT}, name=f"{node.name}_rows_cast")
            product = onnx_ir.node("Mul", [cast.outputs[0], scaling.outputs[0]], name=f"{node.name}_rows_scaled")
            # Not "_quantized": that is what the quantizer calls the activation, where a product takes it.
            for made, suffix in ((taken, "rows"), (scaling, "row_scales"), (cast, "rows_cast")):
                made.outputs[0].name = f"{name}_{suffix}"
            replace_node(model, node, [taken, scaling, cast, product])
        model.graph.initializers.pop(str(table.name))


def is_table(value: onnx_ir.Value) -> bool:
    """FP32 [rows, size] of which only rows are ever taken, none inside of a subgraph, and which holds no scales."""
    tensor = value.const_value
    if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or len(tensor.shape) != 2:
        return False
    name = str(value.name)
    if tensor.shape.numpy()[0] < TABLE_ROWS or name.endswith(SCALE) or name.rsplit(".", 1)[-1] in NO_PARAMETERS:
        return False
    return bool(value.uses()) and all(
        index == 0 and node.graph is value.graph and _takes_rows(node) for node, index in value.uses()
    )


def _takes_rows(node: onnx_ir.Node) -> bool:
    if node.op_type == "Gather":
        return node.attributes.get_int("axis", 0) == 0
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    axes = onnx_ir.convenience.get_const_tensor(node.inputs[3]) if node.inputs[3] is not None else None
    return axes is not None and axes.numpy().tolist() == [0]


def _scale_rows(model: onnx_ir.Model) -> None:
    """Divide every position [..., in] that a product with a stored weight takes by its largest number, and multiply the
    product by it: what is quantised then reaches from -1 to 1 at every position. The product is the same."""
    last_axis = store(model, "rows_last_axis", np.array([-1]))
    smallest = store(model, "rows_smallest", np.array(_SMALLEST, np.float32))
    scaled: dict[onnx_ir.Value, tuple[onnx_ir.Value, onnx_ir.Value]] = {}
    for node in list(model.graph):
        data, weight = (*node.inputs, None, None)[:2]
        if node.op_type != "MatMul" or data is None or weight is None or not weight.is_initializer():
            continue
        made = []
        if data not in scaled:
            name = str(data.name)
            size = onnx_ir.node("Abs", [data], name=f"{name}_rows_abs")
            largest = onnx_ir.node(
                "ReduceMax", [size.outputs[0], last_axis], {"keepdims": 1}, name=f"{name}_rows_largest"
            )
            bounded = onnx_ir.node("Max", [largest.outputs[0], smallest], name=f"{name}_rows_bounded")
            divided = onnx_ir.node("Div", [data, bounded.outputs[0]], name=f"{name}_rows_divided")
            made = [size, largest, bounded, divided]
            for one in made:
                one.outputs[0].name = one.name
            scaled[data] = divided.outputs[0], bounded.outputs[0]
        product = onnx_ir.node("MatMul", [scaled[data][0], weight], name=f"{node.name}_rows")
        back = onnx_ir.node("Mul", [product.outputs[0], scaled[data][1]], name=f"{node.name}_rows_back")
        product.outputs[0].name = f"{node.outputs[0].name}_rows"
        replace_node(model, node, [*made, product, back])


def store(model: onnx_ir.Model, name: str, array: NDArray[np.generic]) -> onnx_ir.Value:
    value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value


def replace_node(model: onnx_ir.Model, old: onnx_ir.Node, new: list[onnx_ir.Node]) -> None:
    """Put ``new`` in the place of ``old``; the last one's output takes over."""
    onnx_ir.convenience.replace_nodes_and_values(model.graph, old, [old], new, old.outputs, new[-1].outputs)


def _quantize_products(model: onnx_ir.Model, workplace: Path | None) -> onnx_ir.Model:
    """Every MatMul with a stored weight as DynamicQuantizeLinear, MatMulInteger, Cast and Mul."""
    model.metadata_props["onnx.quant.pre_process"] = "onnxruntime.quant"  # or it warns through the root logger
    with tempfile.TemporaryDirectory(prefix=".int8-", dir=workplace) as folder, _noticing_a_full_disk(Path(folder)):
        source, target = Path(folder, "fp32.onnx"), Path(folder, "int8.onnx")
        onnx_ir.save(model, source, external_data="fp32.data")
        quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
        quantized = onnx_ir.serde.deserialize_model(onnx.load(str(target)))
    quantized.metadata_props.clear()
    quantized.producer_name, quantized.producer_version = model.producer_name, model.producer_version
    return quantized


@contextmanager
def _noticing_a_full_disk(folder: Path) -> Iterator[None]:
    """onnx's own writer does not say that a disk is full: it cuts its file off, and whoever reads that fails.

    Raises:
        OSError: there is no room for a further file like those that are there.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if shutil.disk_usage(folder).free >= max((path.stat().st_size for path in folder.iterdir()), default=0):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error


def left_in_float(model: onnx_ir.Model) -> list[str]:
    """Products of which an operand depends on no input, and tables, that are not INT8."""
    constant = set(model.graph.initializers.values())
    left = [str(value.name) for value in constant if is_table(value)]
    for node in model.graph:
        operands = [value for value in node.inputs if value is not None]
        if all(value in constant for value in operands):
            constant.update(node.outputs)
        elif node.op_type in _PRODUCTS:
            left += [f"{value.name} of {node.name}" for value in operands[:2] if value in constant]
    return sorted(left)
