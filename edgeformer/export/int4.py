"""Causal attention to what is kept of earlier tokens, as one operator of ONNX Runtime's own.

Written out it is eighteen operators in every loop, as many as a token has no time for. Only for graphs that no other
runtime could read anyway.
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


class _Attention(RewriteRuleClassBase):  # type: ignore[misc]
    """What :func:`edgeformer.models.crt.graphs._run_loop` is exported as."""

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
        """q, k and v [B, S, 3 H D] in one, with what came before → the mixed values [B, S, H D], keys and values."""
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
        """What is masked is what comes later, and the number of heads and the scale are known.

        The mask is no part of the pattern: all loops share it, so it must stay for those that come after.
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
        """One operator behind a Split: it wants q, k and v apart."""
        assert past_key.shape is not None and scale.const_value is not None
        q, k, v = op.Split(projected, axis=-1, num_outputs=3, _outputs=3)
        return op.MultiHeadAttention(
            q, k, v, None, None, None, past_key, past_value,
            num_heads=past_key.shape[1], scale=float(scale.const_value.numpy()), unidirectional=1,
            _domain=DOMAIN, _outputs=3,
        )  # fmt: skip


def merge_attention(model: onnx_ir.Model) -> int:
    """Put the operator in the place of every such attention, in ``model`` itself; how many there were."""
    count: int = RewriteRuleSet([_Attention.rule()]).apply_to_model(model)
    return count


# INT4: stored weights and tables in blocks of 4 bits, each block with a scale and a zero point.
#
# Weights only: a product reads its weight in 4 bits and computes with what they stand for, activations in INT8 by
# blocks
# of their own (``accuracy_level`` 4), so no row depends on those beside it. A weight takes 5.1 bits with the scales
# and
# zero points of blocks of 32, 4.3 in blocks of 128; a product that reads little else, as in decoding, is faster for
# it,
# one that computes much is not. A block lies along the inputs of a product, and along a table's row.
#
# ONNX has no such operators: MatMulNBits and GatherBlockQuantized are ONNX Runtime's own, which other runtimes may
# lack
# (the portability audit says so). So attention to earlier tokens is an operator of its own there, too. Tables of
# which
# slices are taken have rows in INT8. A weight that is used by several products, as of a looped block, is stored once;
# norms, biases, rotary tables and what has few rows stay FP32.


BLOCK = 32
"""Numbers that share a scale, of weights a few of which are far larger than the others, as pretrained ones have them:
what most 4-bit language models are published with. MiniLM's vectors keep to the bar with 32, and not with 64."""

LONG_BLOCK = 128
"""The same for our own models: they lose next to nothing by it, and a token reads a sixth less."""

_IN_INT8 = 4


def quantize(model: onnx_ir.Model, block: int = BLOCK) -> onnx_ir.Model:
    """The graph with every stored weight of a product and every table in 4 bits; each tensor stored once.

    ``model`` is FP32, with any number of outputs; it is left unchanged.

    Args:
        block: numbers that share a scale; a power of two from 16 on.

    Raises:
        EdgeformerError: some weight would stay FP32.
    """
    handlers, level = logging.root.handlers[:], logging.root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.root.handlers[:] = handlers  # its import makes every library's messages appear on stderr
    logging.root.setLevel(level)
    prepared = model.clone()
    gemm_as_matmul(prepared)
    tables = [list(value.consumers()) for value in prepared.graph.initializers.values() if is_table(value)]
    rows = [node for users in tables if all(node.op_type == "Gather" for node in users) for node in users]
    for node in rows:  # the quantizer selects nodes by name, and foreign graphs often have none
        node.name = f"{node.outputs[0].name}_rows"
    quantizer = MatMulNBitsQuantizer(
        onnx_ir.to_proto(prepared),
        block_size=block,
        accuracy_level=_IN_INT8,
        nodes_to_include=[str(node.name) for node in rows],
    )
    quantizer.process()
    made: onnx_ir.Model = onnx_ir.from_proto(quantizer.model.model)
    quantize_tables(made)
    _add_biases(made)
    merge_attention(made)
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


def _add_biases(model: onnx_ir.Model) -> None:
    """Merge the Add of a stored vector into the MatMulNBits whose result it alone takes; the quantizer leaves it."""
    for node in list(model.graph):
        if node.op_type != "MatMulNBits":
            continue
        (result,) = node.outputs
        users = result.uses()
        if len(users) != 1 or result.is_graph_output() or (add := next(iter(users)).node).op_type != "Add":
            continue
        (bias,) = (value for value in add.inputs if value is not result)
        if bias is None or not bias.is_initializer() or bias.shape is None or len(bias.shape) != 1:
            continue
        inputs, attributes = [*node.inputs, None, bias], list(node.attributes.values())
        replace_node(model, add, [onnx_ir.Node(node.domain, node.op_type, inputs, attributes, name=node.name)])
        model.graph.remove(node, safe=True)
