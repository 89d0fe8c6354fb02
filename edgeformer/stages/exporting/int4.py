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

import logging
from dataclasses import replace

import onnx_ir
from onnx_ir.passes.common import DeduplicateHashedInitializersPass, RemoveUnusedNodesPass

from edgeformer.families.tracing import Graphs
from edgeformer.formats.errors import EdgeformerError
from edgeformer.stages.exporting.cached_attention import merge_attention
from edgeformer.stages.exporting.int8 import gemm_as_matmul, is_table, left_in_float, quantize_tables, replace_node

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
