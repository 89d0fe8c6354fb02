"""INT4: weights of products and embedding tables in blocks of 4 bits, each block with a scale and a zero point.

Only weights are stored in 4 bits. Products compute with the numbers that these stand for, and with activations in INT8
by blocks of their own (``accuracy_level`` 4), so no row depends on the other rows of a call. A weight takes 5.1 bits
with the scales and zero points of blocks of 32, and 4.3 in blocks of 128. Products that mostly read weights, as in
decoding, get faster; others do not. A block lies along the inputs of a product, and along a table's row.

ONNX has no such operators: MatMulNBits and GatherBlockQuantized belong to ONNX Runtime, and other runtimes may lack
them (the portability audit says so). Therefore attention to cached tokens is one operator of ONNX Runtime there, too.
Tables that are read by slices have rows in INT8. A weight that several products use is stored once. Norms, biases,
rotary tables and tables with few rows stay FP32.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import DeduplicateHashedInitializersPass, RemoveUnusedNodesPass
from onnxscript.rewriter.pattern import RewriteRuleClassBase, RewriteRuleSet

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.export.int8 import gemm_as_matmul, is_table, left_in_float, quantize_tables, replace_node
from edgeformer.models.tracing import Graphs

DOMAIN = "com.microsoft"

BLOCK = 32
"""Numbers that share a scale, for pretrained weights, a few of which are far larger than the others. Most published
4-bit language models use 32; MiniLM's vectors stay within tolerance with 32, and not with 64."""
LONG_BLOCK = 128
"""The same for our own models, which lose almost nothing by it, and read a sixth less per token."""

_COMPUTE_INT8 = 4
"""Value of ``accuracy_level``: products compute in INT8."""


class _Attention(RewriteRuleClassBase):  # type: ignore[misc]
    """Matches the operators that :func:`edgeformer.models.crt.graphs._run_loop` is exported as: eighteen per loop."""

    def pattern(
        self,
        op: Any,
        projected: Any,
        heads: Any,
        past_key: Any,
        past_value: Any,
        scale: Any,
        unseen: Any,
        least: Any,
        flat: Any,
    ) -> Any:
        """q, k and v [B, S, 3 H D] with cached keys and values → mixed values [B, S, H D], all keys and values."""
        split = op.Transpose(op.Reshape(projected, heads), perm=[2, 0, 3, 1, 4])
        q, k, v = (op.Squeeze(op.Slice(split, [place], [place + 1], [0]), [0]) for place in range(3))
        keys, values = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
        scores = op.MatMul(op.Mul(q, scale), op.Transpose(keys, perm=[0, 1, 3, 2]))
        mixed = op.MatMul(op.Softmax(op.Where(unseen, least, scores), axis=-1), values)
        return op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), flat), keys, values

    def check(
        self,
        context: Any,
        past_key: onnx_ir.Value,
        scale: onnx_ir.Value,
        unseen: onnx_ir.Value,
        least: onnx_ir.Value,
        **_: Any,
    ) -> bool:
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
        self,
        op: Any,
        projected: onnx_ir.Value,
        past_key: onnx_ir.Value,
        past_value: onnx_ir.Value,
        scale: onnx_ir.Value,
        **_: Any,
    ) -> Any:
        """Split q, k and v, which the operator takes apart."""
        assert past_key.shape is not None and scale.const_value is not None
        q, k, v = op.Split(projected, axis=-1, num_outputs=3, _outputs=3)
        return op.MultiHeadAttention(
            q, k, v, None, None, None, past_key, past_value,
            num_heads=past_key.shape[1], scale=float(scale.const_value.numpy()), unidirectional=1,
            _domain=DOMAIN, _outputs=3,
        )  # fmt: skip


def merge_attention(model: onnx_ir.Model) -> int:
    """Replace causal attention to cached tokens by one operator of ONNX Runtime, in ``model`` itself.

    Returns:
        How many were replaced.
    """
    count: int = RewriteRuleSet([_Attention.rule()]).apply_to_model(model)
    return count


def quantize(model: onnx_ir.Model, block: int = BLOCK) -> onnx_ir.Model:
    """Quantise every stored weight of a product and every table to 4 bits; each tensor is stored once.

    Args:
        model: FP32; left unchanged.
        block: numbers that share a scale; a power of two, at least 16.

    Raises:
        EdgeformerError: a weight would stay FP32.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.root.handlers[:] = handlers  # the import installs a handler that prints every library's messages
    logging.root.setLevel(level)
    prepared = model.clone()
    gemm_as_matmul(prepared)
    tables = [list(value.consumers()) for value in prepared.graph.initializers.values() if is_table(value)]
    rows = [node for users in tables if all(node.op_type == "Gather" for node in users) for node in users]
    for node in rows:  # the quantizer selects nodes by name, which foreign graphs often lack
        node.name = f"{node.outputs[0].name}_rows"
    quantizer = MatMulNBitsQuantizer(
        onnx_ir.to_proto(prepared),
        block_size=block,
        accuracy_level=_COMPUTE_INT8,
        nodes_to_include=[str(node.name) for node in rows],
    )
    quantizer.process()
    quantized: onnx_ir.Model = onnx_ir.from_proto(quantizer.model.model)
    quantize_tables(quantized)
    _add_biases(quantized)
    merge_attention(quantized)
    RemoveUnusedNodesPass()(quantized)
    DeduplicateHashedInitializersPass()(quantized)
    if unquantized := left_in_float(quantized):
        raise EdgeformerError(f"INT4: these weights would stay FP32: {', '.join(unquantized[:5])}")
    return quantized


def quantized_graphs(graphs: Graphs) -> Graphs:
    """Quantise all graphs of a model, in long blocks where its weights allow it. Raises like :func:`quantize`."""
    block = BLOCK if graphs.has_row_scales else LONG_BLOCK
    return replace(
        graphs,
        exits=quantize(graphs.exits, block),
        steps={part: quantize(graph, block) for part, graph in graphs.steps.items()},
        decode=quantize(graphs.decode, block) if graphs.decode is not None else None,
    )


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
        if bias is None or not bias.is_initializer() or bias.shape is None or len(bias.shape) != 1:
            continue
        inputs, attributes = [*node.inputs, None, bias], list(node.attributes.values())
        replace_node(model, add, [onnx_ir.Node(node.domain, node.op_type, inputs, attributes, name=node.name)])
        model.graph.remove(node, safe=True)
