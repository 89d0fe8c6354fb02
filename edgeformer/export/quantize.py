"""Quantise graphs: products with a stored weight and embedding tables in INT8 or in blocks of 4 bits.

INT8: weights have one scale per output channel and 7 bits, because with 8 bits products saturate silently on CPUs
without VNNI instructions; activations have 8 bits and one scale per call, determined at run time, so a row's logits
depend slightly on the other rows of its call. Pretrained encoders have tokens with much larger states than the others
([SEP] above all) and use a scale per position (``has_row_scales``), which halves the error and takes 5 to 35% longer.
Each row of a table has 8 bits and a scale; a table of a few columns has a scale per column, because those of its rows
would take more bytes than the rows. Only standard ONNX operators are used.

INT4: each block of weights has a scale and a zero point (5.1 bits per weight in blocks of 32, 4.3 in blocks of 128).
Activations are in INT8 by blocks of their own (``accuracy_level`` 4), so no row depends on the others of a call. The
operators (MatMulNBits, GatherBlockQuantized, MultiHeadAttention) are ONNX Runtime's own; the portability audit says so.

Decoders have blocks of 32 in INT8 too: a few of a pretrained decoder's states are so much larger than the others that
one scale per position costs 5% of SmolLM2's perplexity, and one per block 0.5%.

Norms, biases, rotary tables and tables with few rows stay FP32. Every tensor is stored once.
"""

import errno
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir
from numpy.typing import NDArray
from onnx import TensorProto
from onnx_ir.passes.common import DeduplicateHashedInitializersPass, RemoveUnusedNodesPass
from onnx_ir.traversal import RecursiveGraphIterator
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxscript.rewriter.pattern import RewriteRuleClassBase, RewriteRuleSet

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.export.audit import INTEGERS, NO_PARAMETERS, SCALE
from edgeformer.models.blocks.tracing import Graphs

TABLE_ROWS = 32
"""Tables with fewer rows stay FP32: token types, loop encodings."""
NARROW_COLUMNS = 16
"""Columns up to which a table has scales per column."""
BLOCK = 32
"""Numbers that share a scale, for pretrained weights, a few of which are far larger than the others. Most published
4-bit language models use 32; MiniLM's vectors stay within tolerance with 32, and not with 64."""
LONG_BLOCK = 128
"""The same for our own models, which lose almost nothing by it, and read a sixth less per token."""

_LEAST_OPSET = 11
"""Opset that the INT8 quantizer needs."""
_INT8_MAX = 127
_MIN_SCALE = 1e-12
"""Divisor of a position that is all zeros."""
_HEAD_MULTIPLE = 16
"""GroupQueryAttention takes heads whose size is a multiple of it."""
_COMPUTE_INT8 = 4
"""Value of ``accuracy_level``: products compute in INT8."""
SUPPORTED = "finite matrices that are only the second operands of products in the outermost graph"
_WEIGHT_OPERAND = {"MatMulInteger": 1, "Gather": 0, "Slice": 0, "MatMulNBits": 1, "GatherBlockQuantized": 0}
"""Operator → index of the input that can be a weight in INT8, or in blocks of 4 bits."""


def quantized_graphs(graphs: Graphs, precision: Literal["int8", "int4"], folder: Path | None = None) -> Graphs:
    """Quantise all graphs of a model: :func:`quantize_int8`, :func:`quantize_int4` or :func:`quantize_blocks`."""
    convert: Callable[[onnx_ir.Model], onnx_ir.Model]
    if graphs.in_blocks:
        # A part of the step artifact that has no table is quantized as in the other graphs, too.
        tables = [value for value in graphs.exits.graph.initializers.values() if _is_table(value)]
        vocabularies = {table.const_value.shape.numpy()[0] for table in tables if table.const_value is not None}
        convert = partial(quantize_blocks, bits=8 if precision == "int8" else 4, vocabularies=vocabularies)
    elif precision == "int8":
        convert = partial(quantize_int8, folder=folder, has_row_scales=graphs.has_row_scales)
    else:
        convert = partial(quantize_int4, block=BLOCK if graphs.has_row_scales else LONG_BLOCK)
    exits, steps = convert(graphs.exits), {part: convert(graph) for part, graph in graphs.steps.items()}
    decode = convert(graphs.decode) if graphs.decode is not None else None
    return replace(graphs, exits=exits, steps=steps, decode=decode)


def quantize_int8(
    model: onnx_ir.Model, folder: Path | None = None, *, has_row_scales: bool = False, kept: list[str] | None = None
) -> onnx_ir.Model:
    """Quantise every MatMul and Gemm with a stored weight, and every table; ``model`` (FP32) is left unchanged.

    ``folder`` is for temporary files as large as the model (None: the system's). ``kept`` receives the weights of a
    foreign graph that stay FP32; None: raise EdgeformerError if there is one.
    """
    # 1. Prepare the products: tables in INT8, Gemm as MatMul, every tensor stored once
    prepared = model.clone()
    _gemm_as_matmul(prepared)
    _quantize_tables(prepared)
    DeduplicateHashedInitializersPass()(prepared)

    # 2. Scale their operands per position
    if has_row_scales:
        # Divide every position [..., in] that is multiplied by a stored weight by its largest absolute number, and
        # multiply the product by that: quantised numbers then reach from -1 to 1 at every position.
        last_axis = _store(prepared, "rows_last_axis", np.array([-1]))
        min_scale = _store(prepared, "rows_smallest", np.array(_MIN_SCALE, np.float32))
        scaled: dict[onnx_ir.Value, tuple[onnx_ir.Value, onnx_ir.Value]] = {}
        for node in list(prepared.graph):
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
            _replace_node(prepared, node, [*new, product, rescaled])

    # 3. Replace every MatMul with a stored matrix by DynamicQuantizeLinear, MatMulInteger, Cast and Mul
    opset = prepared.opset_imports.get("", _LEAST_OPSET)
    if opset < _LEAST_OPSET and any(_can_quantize(node, prepared.graph) for node in prepared.graph):
        try:  # the quantizer does this too, with a warning through the root logger
            older: onnx.ModelProto = onnx_ir.to_proto(prepared)
            prepared = onnx_ir.from_proto(onnx.version_converter.convert_version(older, _LEAST_OPSET))
        except Exception as error:  # ConvertError, RuntimeError
            raise EdgeformerError(
                f"INT8: needs opset {_LEAST_OPSET}, and the graph has opset {opset}, which cannot be converted "
                f"({' '.join(str(error).split())[:200]}); export the model with a newer opset"
            ) from None
    products = [str(node.name) for node in prepared.graph if _can_quantize(node, prepared.graph)]
    if not products:
        return _complete(prepared, "INT8", kept)
    prepared.metadata_props["onnx.quant.pre_process"] = "onnxruntime.quant"  # else it warns through the root logger
    with tempfile.TemporaryDirectory(prefix=".int8-", dir=folder) as temporary:
        source, target = Path(temporary, "fp32.onnx"), Path(temporary, "int8.onnx")
        try:
            onnx_ir.save(prepared, source, external_data="fp32.data")
            quantize_dynamic(
                source, target, op_types_to_quantize=["MatMul"], nodes_to_quantize=products, per_channel=True,
                reduce_range=True, weight_type=QuantType.QInt8,
            )  # fmt: skip
            quantized = onnx_ir.serde.deserialize_model(onnx.load(str(target)))
            quantized.graph.sort()  # the quantizer sorts without regard to what subgraphs read
        except OSError:
            raise
        except Exception as error:
            # onnx's writer truncates its file on a full disk without an error; whoever reads the file fails.
            largest = max((path.stat().st_size for path in Path(temporary).iterdir()), default=0)
            if shutil.disk_usage(temporary).free >= largest:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary) from error
    quantized.metadata_props.clear()
    quantized.producer_name, quantized.producer_version = prepared.producer_name, prepared.producer_version
    return _complete(quantized, "INT8", kept)


def quantize_int4(model: onnx_ir.Model, block: int = BLOCK, kept: list[str] | None = None) -> onnx_ir.Model:
    """Quantise every stored weight of a product and every table; ``model`` (FP32) is left unchanged.

    ``block``: numbers that share a scale, a power of two from 16 on. ``kept``: as of :func:`quantize_int8`.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.root.handlers[:] = handlers  # the import installs a handler that prints every library's messages
    logging.root.setLevel(level)
    prepared = model.clone()
    _gemm_as_matmul(prepared)
    stored_tables = [value for value in prepared.graph.initializers.values() if _is_table(value)]
    tables = []
    for table in stored_tables:
        assert table.const_value is not None
        columns = table.const_value.shape.numpy()[1]
        if 4 * columns > block // 2:  # bytes of a row in FP32, and of its codes
            tables += [list(table.consumers())] if _is_finite(table) else []
        elif kept is None or len(stored_tables) == 1:
            raise EdgeformerError(
                f"INT4: the rows of {table.name} have {columns} numbers, and blocks of {block} along a row share a "
                "scale, so the file would not shrink; use --int8"
            )
    rows = [node for users in tables if all(node.op_type == "Gather" for node in users) for node in users]
    products = [node for node in RecursiveGraphIterator(prepared.graph) if _stored_matrix(node) is not None]
    excluded = [str(node.name) for node in products if not _can_quantize(node)]
    for node in rows:  # the quantizer selects nodes by name, which foreign graphs often lack
        node.name = f"{node.outputs[0].name}_rows"
    quantizer = MatMulNBitsQuantizer(
        onnx_ir.to_proto(prepared), block_size=block, accuracy_level=_COMPUTE_INT8,
        nodes_to_include=[str(node.name) for node in rows], nodes_to_exclude=excluded,
    )  # fmt: skip
    quantizer.process()
    quantized: onnx_ir.Model = onnx_ir.from_proto(quantizer.model.model)
    _quantize_tables(quantized)
    _add_biases(quantized)
    RewriteRuleSet([CachedAttention.rule()]).apply_to_model(quantized)
    return _complete(quantized, "INT4", kept)


def quantize_blocks(model: onnx_ir.Model, bits: Literal[8, 4], vocabularies: Collection[int]) -> onnx_ir.Model:
    """Quantise a decoder as llama.cpp's Q8_0 and Q4_0 do; ``model`` (FP32) is left unchanged.

    Blocks of a row share a scale, without a zero point. With 4 bits the head, which is usually the token table, keeps
    8: what has as many outputs as a table has rows (``vocabularies``). Attention with caches becomes ONNX Runtime's
    GroupQueryAttention. Raises EdgeformerError if a weight stays FP32.
    """
    quantized = model.clone()
    _gemm_as_matmul(quantized)
    stored: dict[onnx_ir.Value, tuple[list[onnx_ir.Value], dict[str, int]]] = {}
    for node in list(quantized.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not weight.is_initializer() or weight.const_value is None:
            continue
        if weight not in stored:
            matrix = weight.const_value.numpy()
            width = 8 if matrix.shape[1] in vocabularies else bits
            codes, scales = block_codes(matrix, width)
            sizes = {"K": matrix.shape[0], "N": matrix.shape[1], "bits": width, "block_size": BLOCK}
            names = f"{weight.name}_quantized", f"{weight.name}{SCALE}"
            stored[weight] = [_store(quantized, names[0], codes), _store(quantized, names[1], scales)], sizes
        values, sizes = stored[weight]
        inputs, attributes = [node.inputs[0], *values], {**sizes, "accuracy_level": _COMPUTE_INT8}
        product = onnx_ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft", name=f"{node.name}_blocks")
        product.outputs[0].name = f"{node.outputs[0].name}_blocks"
        _replace_node(quantized, node, [product])
    _quantize_tables(quantized)
    _add_biases(quantized)
    RewriteRuleSet([GroupedAttention.rule()]).apply_to_model(quantized)
    return _complete(quantized, f"INT{bits}")


def block_codes(matrix: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise a matrix [in, out] for MatMulNBits: codes [out, blocks, bytes] and scales [out, blocks].

    The number of a block with the largest size becomes the lowest code, as in Q4_0.
    """
    padded = np.pad(matrix, ((0, -len(matrix) % BLOCK), (0, 0)))
    rows = np.ascontiguousarray(padded.T).reshape(matrix.shape[1], -1, BLOCK)
    middle = 1 << (bits - 1)
    scales = np.take_along_axis(rows, np.abs(rows).argmax(-1, keepdims=True), -1) / -middle
    codes = np.rint(np.divide(rows, scales, out=np.zeros_like(rows), where=scales != 0))
    stored = (codes.clip(-middle, middle - 1) + middle).astype(np.uint8)
    if bits == 4:  # two codes in a byte
        stored = stored[..., ::2] | stored[..., 1::2] << 4
    return stored, scales[..., 0].astype(np.float32)


def _complete(quantized: onnx_ir.Model, precision: str, kept: list[str] | None = None) -> onnx_ir.Model:
    """Remove what is unused or stored twice. Weights that stayed FP32 are added to ``kept``; None: EdgeformerError."""
    RemoveUnusedNodesPass()(quantized)
    DeduplicateHashedInitializersPass()(quantized)
    # Tables, and operands of products that depend on no input.
    constant = set(quantized.graph.initializers.values())
    tables = [value for value in constant if _is_table(value)]
    unquantized = [str(value.name) for value in tables]
    for node in RecursiveGraphIterator(quantized.graph):
        operands = [value for value in node.inputs if value is not None]
        graph_types = (onnx_ir.AttributeType.GRAPH, onnx_ir.AttributeType.GRAPHS)
        holds_graph = any(attribute.type in graph_types for attribute in node.attributes.values())
        if all(value in constant for value in operands) and not holds_graph:
            constant.update(node.outputs)
        elif node.op_type in ("MatMul", "Gemm"):
            place = f"{node.op_type} {node.name}".strip()
            unquantized += [f"{value.name} of {place}" for value in operands[:2] if value in constant]
        elif kept is not None and node.op_type == "Gather" and operands[0] in constant - set(tables):
            shape = operands[0].shape
            if operands[0].dtype == onnx_ir.DataType.FLOAT and shape is not None and len(shape) == 2:
                unquantized.append(f"{operands[0].name} of Gather {node.name}".strip())
    if unquantized and kept is None:
        raise EdgeformerError(
            f"{precision}: cannot quantize these weights: {', '.join(sorted(unquantized)[:5])} (supported: {SUPPORTED})"
        )
    if kept is not None:
        kept += sorted(unquantized)
    return quantized


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


def _gemm_as_matmul(model: onnx_ir.Model) -> None:
    """Replace Gemm by MatMul and Add; the quantizer's own way is wrong for a shared weight.

    A Gemm with transA, or with beta and a bias that is not stored, stays.
    """
    matrices: dict[tuple[Any, ...], onnx_ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "Gemm":
            continue
        attributes, (data, weight, *biases) = node.attributes, node.inputs
        alpha, beta = (attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
        bias, is_transposed = next(iter(biases), None), bool(attributes.get_int("transB", 0))
        if attributes.get_int("transA", 0) or weight is None or not weight.is_initializer():
            continue
        if bias is not None and beta != 1.0 and not bias.is_initializer():
            continue
        assert data is not None and weight.const_value is not None
        if is_transposed or alpha != 1.0:
            key = weight, is_transposed, alpha
            if key not in matrices:
                array = weight.const_value.numpy()
                array = np.ascontiguousarray(array.T if is_transposed else array) * np.float32(alpha)
                matrices[key] = _store(model, f"{weight.name}_transposed{len(matrices) or ''}", array)
            weight = matrices[key]
        name = node.outputs[0].name
        nodes = [onnx_ir.node("MatMul", [data, weight], name=f"{name}_matmul")]
        if bias is not None:
            if beta != 1.0 and bias.const_value is not None:
                bias = _store(model, f"{name}_bias", bias.const_value.numpy() * np.float32(beta))
            nodes[0].outputs[0].name = f"{name}_product"
            nodes.append(onnx_ir.node("Add", [nodes[0].outputs[0], bias], name=f"{name}_add"))
        _replace_node(model, node, nodes)
    RemoveUnusedNodesPass()(model)


def _quantize_tables(model: onnx_ir.Model) -> None:
    """Store tables in INT8: consumers read rows and their FP32 scales, and multiply them; see the module."""
    for table in [value for value in model.graph.initializers.values() if _is_table(value)]:
        assert table.const_value is not None
        rows = table.const_value.numpy()
        if not _is_finite(table):
            continue
        is_narrow = rows.shape[1] <= NARROW_COLUMNS
        max_abs = np.abs(rows).max(axis=0 if is_narrow else 1, keepdims=not is_narrow)
        scales = np.where(max_abs > 0, max_abs / _INT8_MAX, 1).astype(np.float32)
        stored = _store(model, f"{table.name}_quantized", np.rint(rows / scales).astype(np.int8))
        scale = _store(model, f"{table.name}{SCALE}", scales)
        for node in list(table.consumers()):
            name, indices, attributes = node.outputs[0].name, list(node.inputs[1:]), list(node.attributes.values())
            read = onnx_ir.Node("", node.op_type, [stored, *indices], attributes, name=f"{node.name}_rows")
            cast = onnx_ir.node("Cast", [read.outputs[0]], {"to": TensorProto.FLOAT}, name=f"{node.name}_rows_cast")
            new, factor = [read, cast], scale
            # The quantizer calls the input of a product "…_quantized", so these names must differ from that.
            read.outputs[0].name, cast.outputs[0].name = f"{name}_rows", f"{name}_rows_cast"
            if not is_narrow:
                row_scales = f"{node.name}_row_scales"
                new.append(onnx_ir.Node("", node.op_type, [scale, *indices], attributes, name=row_scales))
                factor = new[-1].outputs[0]
                factor.name = f"{name}_row_scales"
            new.append(onnx_ir.node("Mul", [cast.outputs[0], factor], name=f"{node.name}_rows_scaled"))
            _replace_node(model, node, new)
        model.graph.initializers.pop(str(table.name))


def _is_table(value: onnx_ir.Value) -> bool:
    """Whether a value is FP32 [rows, size], holds no scales, and is only read by row, outside subgraphs."""
    tensor = value.const_value
    if tensor is None or tensor.dtype != onnx_ir.DataType.FLOAT or len(tensor.shape) != 2:
        return False
    name = str(value.name)
    if tensor.shape.numpy()[0] < TABLE_ROWS or name.endswith(SCALE) or name.rsplit(".", 1)[-1] in NO_PARAMETERS:
        return False
    for node, index in value.uses():
        reads_rows = node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0
        if node.op_type == "Slice" and len(node.inputs) >= 4 and node.inputs[3] is not None:
            axes = onnx_ir.convenience.get_const_tensor(node.inputs[3])
            reads_rows = axes is not None and axes.numpy().tolist() == [0]
        if index != 0 or node.graph is not value.graph or not reads_rows:
            return False
    return bool(value.uses())


def _store(model: onnx_ir.Model, name: str, array: NDArray[np.generic]) -> onnx_ir.Value:
    value = onnx_ir.val(name, const_value=onnx_ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value


def _replace_node(model: onnx_ir.Model, old: onnx_ir.Node, new: list[onnx_ir.Node]) -> None:
    """Replace ``old`` by ``new`` nodes; the outputs of the last one take its outputs' place."""
    onnx_ir.convenience.replace_nodes_and_values(model.graph, old, [old], new, old.outputs, new[-1].outputs)


def _is_finite(value: onnx_ir.Value) -> bool:
    return value.const_value is not None and bool(np.isfinite(value.const_value.numpy()).all())


def _stored_matrix(node: onnx_ir.Node) -> onnx_ir.Value | None:
    """Return the weight of a MatMul with a stored matrix. With a weight of other than two axes, the quantizer would
    write a graph that does not run."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    is_matrix = weight is not None and weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2
    return weight if is_matrix else None


def _can_quantize(node: onnx_ir.Node, graph: onnx_ir.Graph | None = None) -> bool:
    """Whether the matrix of a MatMul is finite, and only that of products (all in ``graph``), so that FP32 can go."""
    weight = _stored_matrix(node)
    uses = weight.uses() if weight is not None else ()
    is_shared = any(_stored_matrix(user) is not weight or index != 1 for user, index in uses)
    is_shared = is_shared or (graph is not None and any(user.graph is not graph for user, _ in uses))
    return weight is not None and not is_shared and _is_finite(weight)


class CachedAttention(RewriteRuleClassBase):  # type: ignore[misc]
    """Matches the operators that :func:`edgeformer.models.crt.adapter._run_loop` is exported as: eighteen per loop."""

    def pattern(
        self, op: Any, projected: Any, heads: Any, past_key: Any, past_value: Any, scale: Any, unseen: Any, least: Any,
        flat: Any,
    ) -> Any:  # fmt: skip
        """q, k and v [B, S, 3 H D] with cached keys and values → mixed values [B, S, H D], all keys and values."""
        split = op.Transpose(op.Reshape(projected, heads), perm=[2, 0, 3, 1, 4])
        q, k, v = (op.Squeeze(op.Slice(split, [place], [place + 1], [0]), [0]) for place in range(3))
        keys, values = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
        scores = op.MatMul(op.Mul(q, scale), op.Transpose(keys, perm=[0, 1, 3, 2]))
        mixed = op.MatMul(op.Softmax(op.Where(unseen, least, scores), axis=-1), values)
        return op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), flat), keys, values

    def check(
        self, context: Any, past_key: onnx_ir.Value, scale: onnx_ir.Value, unseen: onnx_ir.Value, least: onnx_ir.Value,
        **_: Any,
    ) -> bool:  # fmt: skip
        """Whether the mask is causal, and the number of heads and the scale are constants.

        The mask is not in the pattern: all loops share it, so it must stay for the loops after this one.
        """
        inverted = unseen.producer()
        triangle = inverted.inputs[0].producer() if inverted is not None and inverted.inputs[0] is not None else None
        causal = triangle is not None and triangle.op_type == "Trilu" and not triangle.attributes.get_int("upper", 1)
        masked = least.const_value is not None and bool(np.all(least.const_value.numpy() == -np.inf))
        shape = past_key.shape
        return causal and masked and shape is not None and isinstance(shape[1], int) and scale.const_value is not None

    def rewrite(
        self, op: Any, projected: onnx_ir.Value, past_key: onnx_ir.Value, past_value: onnx_ir.Value,
        scale: onnx_ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        """Split q, k and v, which the operator takes apart."""
        assert past_key.shape is not None and scale.const_value is not None
        q, k, v = op.Split(projected, axis=-1, num_outputs=3, _outputs=3)
        return op.MultiHeadAttention(
            q, k, v, None, None, None, past_key, past_value,
            num_heads=past_key.shape[1], scale=float(scale.const_value.numpy()), unidirectional=1,
            _domain="com.microsoft", _outputs=3,
        )  # fmt: skip


class GroupedAttention(RewriteRuleClassBase):  # type: ignore[misc]
    """Matches :func:`edgeformer.models.decoder.adapter.grouped_attention` with the rotations before it and caches."""

    _lengths: tuple[onnx_ir.Value, onnx_ir.Value] | None = None

    def pattern(
        self, op: Any, projected: Any, heads: Any, widths: Any, cos: Any, sin: Any, past_key: Any, past_value: Any,
        scale: Any, mask: Any, q_shape: Any, score_shape: Any, weight_shape: Any, mixed_shape: Any, flat: Any,
    ) -> Any:  # fmt: skip
        """q, k and v [B, n, (H + 2 K) D] with cached keys and values → mixed values, all keys and values."""

        def rotate(x: Any) -> Any:
            first, second = op.Split(x, axis=3, num_outputs=2, _outputs=2)
            halves = op.Sub(op.Mul(first, cos), op.Mul(second, sin)), op.Add(op.Mul(first, sin), op.Mul(second, cos))
            return op.Transpose(op.Concat(*halves, axis=-1), perm=[0, 2, 1, 3])

        q, k, v = op.Split(op.Reshape(projected, heads), widths, axis=2, _outputs=3)
        q = op.Reshape(op.Mul(rotate(q), scale), q_shape)
        keys = op.Concat(past_key, rotate(k), axis=2)
        values = op.Concat(past_value, op.Transpose(v, perm=[0, 2, 1, 3]), axis=2)
        scores = op.Reshape(op.MatMul(q, op.Transpose(keys, perm=[0, 1, 3, 2])), score_shape)
        weights = op.Reshape(op.Softmax(op.Add(scores, mask), axis=-1), weight_shape)
        mixed = op.Reshape(op.MatMul(weights, values), mixed_shape)
        return op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), flat), keys, values

    def check(self, context: Any, cos: onnx_ir.Value, sin: onnx_ir.Value, past_key: onnx_ir.Value, **_: Any) -> bool:
        """Whether cos and sin are rows of tables, and the operator takes heads of this size."""
        heads, size = (past_key.shape[1], past_key.shape[3]) if past_key.shape is not None else (None, None)
        is_supported = isinstance(heads, int) and isinstance(size, int) and size % _HEAD_MULTIPLE == 0
        return is_supported and all(map(_table_of, (cos, sin)))

    def rewrite(
        self, op: Any, projected: onnx_ir.Value, widths: onnx_ir.Value, cos: onnx_ir.Value, sin: onnx_ir.Value,
        past_key: onnx_ir.Value, past_value: onnx_ir.Value, scale: onnx_ir.Value, **_: Any,
    ) -> Any:  # fmt: skip
        """The operator rotates and concatenates itself; all layers share the number of tokens so far."""
        assert past_key.shape is not None and scale.const_value is not None and widths.const_value is not None
        if self._lengths is None:
            past, rows = op.Shape(past_key, start=2, end=3), op.Shape(past_key, start=0, end=1)
            total = op.Cast(op.Add(past, op.Shape(projected, start=1, end=2)), to=TensorProto.INT32)
            one = op.Constant(value=onnx_ir.tensor(np.array([1], np.int32)))
            self._lengths = op.Expand(op.Sub(total, one), rows), op.Squeeze(total)
        return op.GroupQueryAttention(
            projected, None, None, past_key, past_value, *self._lengths, _table_of(cos), _table_of(sin),
            num_heads=int(widths.const_value.numpy()[0]), kv_num_heads=past_key.shape[1],
            scale=float(scale.const_value.numpy()), do_rotary=1, _domain="com.microsoft", _outputs=3,
        )  # fmt: skip


def _table_of(angles: onnx_ir.Value) -> onnx_ir.Value | None:
    """Return the stored table [positions, D / 2] whose rows ``angles`` are; None: they are none."""
    widened = angles.producer()
    rows = widened.inputs[0] if widened is not None and widened.op_type == "Unsqueeze" else None
    read = rows.producer() if rows is not None else None
    table = read.inputs[0] if read is not None and read.op_type == "Gather" else None
    return table if table is not None and table.is_initializer() else None


def _add_biases(model: onnx_ir.Model) -> None:
    """Merge the Add of a bias into its MatMulNBits, which the quantizer does not do."""
    for node in list(model.graph):
        if node.op_type != "MatMulNBits":
            continue
        (result,) = node.outputs
        uses = result.uses()
        if len(uses) != 1 or result.is_graph_output() or (add := next(iter(uses)).node).op_type != "Add":
            continue
        (bias,) = (value for value in add.inputs if value is not result)
        if bias is None or not bias.is_initializer() or bias.shape is None:
            continue
        if bias.shape.dims != (node.attributes.get_int("N"),):  # the operator does not broadcast
            continue
        inputs, attributes = [*node.inputs, None, bias], list(node.attributes.values())
        _replace_node(model, add, [onnx_ir.Node(node.domain, node.op_type, inputs, attributes, name=node.name)])
        model.graph.remove(node, safe=True)
