"""INT8: products with a stored weight compute in integers, and embedding tables are stored in them.

Weights get one scale per output channel and 7 bits. With 8 bits the sum of two products overflows the 16 bits in which
CPUs without VNNI instructions keep it, and they saturate silently: up to 0.18 in the logits of the light SST-2 model.
With 7 bits every CPU computes the same integers.

Activations get 8 bits and one scale for all rows and positions of a call, determined at run time, so the other rows of
a call change a row's logits by about as much as INT8 itself does. Pretrained encoders have tokens with much larger
states than the others ([SEP] above all), which leaves the others few of the 255 steps. They use a scale per position
(``has_row_scales``), which halves the error and takes longer: 5 to 13 % for one text, 20 to 35 % in batches, measured
in turns on one loaded core. Our own models gain nothing by it.

Tables (token and position embeddings) are read by row: each row has 8 bits and a scale. Norms, biases, rotary tables
and tables with few rows stay FP32. Only standard ONNX operators are used.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections import Counter
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
"""Tables with fewer rows stay FP32: token types, loop encodings."""

_INT8_MAX = 127
_MIN_SCALE = 1e-12
"""Divisor of a position that is all zeros."""

_WEIGHT_OPERAND = {"MatMulInteger": 1, "Gather": 0, "Slice": 0, "MatMulNBits": 1, "GatherBlockQuantized": 0}
"""Operator → index of the input that can be a weight in INT8, or in blocks of 4 bits."""


def quantize(model: onnx_ir.Model, folder: Path | None = None, *, has_row_scales: bool = False) -> onnx_ir.Model:
    """Quantise every MatMul and Gemm with a stored weight, and every table; each tensor is stored once.

    Args:
        model: FP32, from :func:`~edgeformer.models.tracing.export_graph` or ``extract_outputs``; left unchanged.
        folder: for temporary files as large as the model; None: the system's.
        has_row_scales: activations get a scale per position, instead of one per call.

    Raises:
        EdgeformerError: a weight would stay FP32.
    """
    prepared = prepare(model)
    if has_row_scales:
        _scale_rows(prepared)
    quantized = _quantize_products(prepared, folder)
    RemoveUnusedNodesPass()(quantized)
    DeduplicateHashedInitializersPass()(quantized)
    if unquantized := left_in_float(quantized):
        raise EdgeformerError(f"INT8: these weights would stay FP32: {', '.join(unquantized[:5])}")
    return quantized


def quantized_graphs(graphs: Graphs, folder: Path) -> Graphs:
    """Quantise all graphs of a model; arguments and errors are those of :func:`quantize`."""
    convert = partial(quantize, folder=folder, has_row_scales=graphs.has_row_scales)
    return replace(
        graphs,
        exits=convert(graphs.exits),
        steps={part: convert(graph) for part, graph in graphs.steps.items()},
        decode=convert(graphs.decode) if graphs.decode is not None else None,
    )


def prepare(model: onnx_ir.Model) -> onnx_ir.Model:
    """Copy a graph for a quantiser of products: tables in INT8, Gemm as MatMul, every tensor stored once."""
    prepared = model.clone()
    gemm_as_matmul(prepared)
    quantize_tables(prepared)
    DeduplicateHashedInitializersPass()(prepared)
    return prepared


def quantized_nodes(graph: onnx.ModelProto) -> dict[str, int]:
    """Operator → nodes with a weight that is stored in INT8, or in blocks of 4 bits."""
    stored = {tensor.name for tensor in graph.graph.initializer if tensor.data_type in INTEGERS}
    counts = Counter(
        node.op_type
        for node in graph.graph.node
        if node.op_type in _WEIGHT_OPERAND and node.input[_WEIGHT_OPERAND[node.op_type]] in stored
    )
    return dict(counts)


def quantized_pairs(graph: onnx.ModelProto) -> dict[str, int]:
    """Operator → nodes whose weight is stored in INT8 behind a DequantizeLinear, as static quantisers write it."""
    stored = {tensor.name for tensor in graph.graph.initializer if tensor.data_type in INTEGERS}
    pairs = (node for node in graph.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored)
    weights = {node.output[0] for node in pairs}
    return dict(Counter(node.op_type for node in graph.graph.node if weights.intersection(node.input)))


def gemm_as_matmul(model: onnx_ir.Model) -> None:
    """Replace Gemm by MatMul and Add where these are equal; the quantizer's own way is wrong for a shared weight."""
    transposed: dict[onnx_ir.Value, onnx_ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        attributes, (data, weight, *bias) = node.attributes, node.inputs
        factors = attributes.get_float("alpha", 1.0), attributes.get_float("beta", 1.0), attributes.get_int("transA", 0)
        if factors != (1.0, 1.0, 0) or weight is None or not weight.is_initializer():
            continue
        assert data is not None and weight.const_value is not None
        if attributes.get_int("transB", 0):
            if weight not in transposed:
                array = np.ascontiguousarray(weight.const_value.numpy().T)
                transposed[weight] = store(model, f"{weight.name}_transposed", array)
            weight = transposed[weight]
        name = node.outputs[0].name
        nodes = [onnx_ir.node("MatMul", [data, weight], name=f"{name}_matmul")]
        if bias and bias[0] is not None:
            nodes[0].outputs[0].name = f"{name}_product"
            nodes.append(onnx_ir.node("Add", [nodes[0].outputs[0], bias[0]], name=f"{name}_add"))
        replace_node(model, node, nodes)
    RemoveUnusedNodesPass()(model)


def quantize_tables(model: onnx_ir.Model) -> None:
    """Store tables in INT8: consumers read rows and their FP32 scales, and multiply them."""
    for table in [value for value in model.graph.initializers.values() if is_table(value)]:
        assert table.const_value is not None
        rows = table.const_value.numpy()
        max_abs = np.abs(rows).max(axis=1, keepdims=True)
        scales = np.where(max_abs > 0, max_abs / _INT8_MAX, 1).astype(np.float32)
        stored = store(model, f"{table.name}_quantized", np.rint(rows / scales).astype(np.int8))
        scale = store(model, f"{table.name}{SCALE}", scales)
        for node in list(table.consumers()):
            name, indices, attributes = node.outputs[0].name, list(node.inputs[1:]), list(node.attributes.values())
            read = onnx_ir.Node("", node.op_type, [stored, *indices], attributes, name=f"{node.name}_rows")
            read_scale = onnx_ir.Node("", node.op_type, [scale, *indices], attributes, name=f"{node.name}_row_scales")
            cast = onnx_ir.node("Cast", [read.outputs[0]], {"to": TensorProto.FLOAT}, name=f"{node.name}_rows_cast")
            product = onnx_ir.node("Mul", [cast.outputs[0], read_scale.outputs[0]], name=f"{node.name}_rows_scaled")
            # The quantizer calls the input of a product "…_quantized", so these names must differ from that.
            for new, suffix in ((read, "rows"), (read_scale, "row_scales"), (cast, "rows_cast")):
                new.outputs[0].name = f"{name}_{suffix}"
            replace_node(model, node, [read, read_scale, cast, product])
        model.graph.initializers.pop(str(table.name))


def is_table(value: onnx_ir.Value) -> bool:
    """Whether a value is FP32 [rows, size], holds no scales, and is only read by row, outside subgraphs."""
    tensor = value.const_value
    if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or len(tensor.shape) != 2:
        return False
    name = str(value.name)
    if tensor.shape.numpy()[0] < TABLE_ROWS or name.endswith(SCALE) or name.rsplit(".", 1)[-1] in NO_PARAMETERS:
        return False

    def reads_rows(node: onnx_ir.Node) -> bool:
        if node.op_type == "Gather":
            return node.attributes.get_int("axis", 0) == 0
        if node.op_type != "Slice" or len(node.inputs) < 4:
            return False
        axes = onnx_ir.convenience.get_const_tensor(node.inputs[3]) if node.inputs[3] is not None else None
        return axes is not None and axes.numpy().tolist() == [0]

    uses = value.uses()
    return bool(uses) and all(index == 0 and node.graph is value.graph and reads_rows(node) for node, index in uses)


def _scale_rows(model: onnx_ir.Model) -> None:
    """Divide every position [..., in] that is multiplied by a stored weight by its largest absolute number, and
    multiply the product by that: quantised numbers then reach from -1 to 1 at every position."""
    last_axis = store(model, "rows_last_axis", np.array([-1]))
    min_scale = store(model, "rows_smallest", np.array(_MIN_SCALE, np.float32))
    scaled: dict[onnx_ir.Value, tuple[onnx_ir.Value, onnx_ir.Value]] = {}
    for node in list(model.graph):
        data, weight = (*node.inputs, None, None)[:2]
        if node.op_type != "MatMul" or data is None or weight is None or not weight.is_initializer():
            continue
        new = []
        if data not in scaled:
            name, keep = str(data.name), {"keepdims": 1}
            size = onnx_ir.node("Abs", [data], name=f"{name}_rows_abs")
            max_abs = onnx_ir.node("ReduceMax", [size.outputs[0], last_axis], keep, name=f"{name}_rows_largest")
            bounded = onnx_ir.node("Max", [max_abs.outputs[0], min_scale], name=f"{name}_rows_bounded")
            divided = onnx_ir.node("Div", [data, bounded.outputs[0]], name=f"{name}_rows_divided")
            new = [size, max_abs, bounded, divided]
            for new_node in new:
                new_node.outputs[0].name = new_node.name
            scaled[data] = divided.outputs[0], bounded.outputs[0]
        product = onnx_ir.node("MatMul", [scaled[data][0], weight], name=f"{node.name}_rows")
        rescaled = onnx_ir.node("Mul", [product.outputs[0], scaled[data][1]], name=f"{node.name}_rows_back")
        product.outputs[0].name = f"{node.outputs[0].name}_rows"
        replace_node(model, node, [*new, product, rescaled])


def store(model: onnx_ir.Model, name: str, array: NDArray[np.generic]) -> onnx_ir.Value:
    """Add an initializer to a graph."""
    value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value


def replace_node(model: onnx_ir.Model, old: onnx_ir.Node, new: list[onnx_ir.Node]) -> None:
    """Replace ``old`` by ``new`` nodes; the outputs of the last one take its outputs' place."""
    onnx_ir.convenience.replace_nodes_and_values(model.graph, old, [old], new, old.outputs, new[-1].outputs)


def _quantize_products(model: onnx_ir.Model, folder: Path | None) -> onnx_ir.Model:
    """Replace every MatMul with a stored weight by DynamicQuantizeLinear, MatMulInteger, Cast and Mul."""
    model.metadata_props["onnx.quant.pre_process"] = "onnxruntime.quant"  # else it warns through the root logger
    with tempfile.TemporaryDirectory(prefix=".int8-", dir=folder) as temporary:
        source, target = Path(temporary, "fp32.onnx"), Path(temporary, "int8.onnx")
        try:
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
        except OSError:
            raise
        except Exception as error:
            # onnx's writer truncates its file on a full disk without an error; whoever reads the file fails.
            largest = max((path.stat().st_size for path in Path(temporary).iterdir()), default=0)
            if shutil.disk_usage(temporary).free >= largest:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary) from error
    quantized.metadata_props.clear()
    quantized.producer_name, quantized.producer_version = model.producer_name, model.producer_version
    return quantized


def left_in_float(model: onnx_ir.Model) -> list[str]:
    """Names of tables, and of operands of products that depend on no input, that are not quantised."""
    constant = set(model.graph.initializers.values())
    unquantized = [str(value.name) for value in constant if is_table(value)]
    for node in model.graph:
        operands = [value for value in node.inputs if value is not None]
        if all(value in constant for value in operands):
            constant.update(node.outputs)
        elif node.op_type in ("MatMul", "Gemm"):
            unquantized += [f"{value.name} of {node.name}" for value in operands[:2] if value in constant]
    return sorted(unquantized)
