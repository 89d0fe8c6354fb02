"""A torch model as an ONNX file: dynamic batch and sequence, every weight stored once, float32 logits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import torch
from onnx_ir.passes import PassManager
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    CommonSubexpressionEliminationPass,
    DeduplicateHashedInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import fold_constants
from torch import nn

from edgeformer.schema.errors import EdgeformerError
from edgeformer.schema.files import replacing

OPSET = 20
OUTPUTS = ("logits",)
_NO_LIMIT = 2**40


def export_onnx(model: nn.Module, path: Path, *, inputs: Sequence[str], max_positions: int) -> None:
    """Write ``model`` (in evaluation mode, on the CPU) to ``path``.

    Args:
        inputs: names of the model's arguments in their order, all int64 [batch, sequence]; ``attention_mask`` is one
            that may hold zeros.
        max_positions: the longest sequence the graph takes.

    Raises:
        EdgeformerError: torch cannot export the model.
    """
    program = _export(model, inputs, max_positions)
    _store_weights_once(program.model)
    with replacing(path) as temporary:
        program.save(str(temporary))
        onnx.checker.check_model(str(temporary))


def _export(model: nn.Module, inputs: Sequence[str], max_positions: int) -> torch.onnx.ONNXProgram:
    # Two rows of different length, so that nothing specialises on a batch of one or a full mask.
    length = min(7, max_positions)
    examples = {name: torch.ones(2, length, dtype=torch.int64) for name in inputs}
    if "attention_mask" in examples:
        examples["attention_mask"][1, length // 2 :] = 0
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=max_positions)}
    # The exporter reports that torchvision is absent; nobody here needs it.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside torch, and axis names that coincide
        try:
            program = torch.onnx.export(
                model,
                tuple(examples.values()),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                external_data=False,
                input_names=list(inputs),
                output_names=list(OUTPUTS),
                dynamic_shapes=dict.fromkeys(inputs, axes),
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise EdgeformerError(f"torch cannot export this model to ONNX: {error}") from error
    assert program is not None
    return program


def _store_weights_once(graph: onnx_ir.Model) -> None:
    """Fold ``Transpose(weight)`` into the weight and merge equal tensors.

    A layer that is used twice refers to its weight through one transposition per use. Runtimes fold each into a copy
    of its own when they load the file, and quantizers silently skip products whose weight is not a stored tensor.
    """
    fold_constants(
        graph,
        input_size_limit=_NO_LIMIT,
        output_size_limit=_NO_LIMIT,
        should_fold=lambda node: node.op_type == "Transpose" or None,
    )
    for value in graph.graph.initializers.values():
        assert value.const_value is not None
        # A folded transposition is a strided view, which cannot be hashed.
        value.const_value = onnx_ir.tensor(np.asarray(value.const_value.numpy(), order="C"), name=value.name)
    PassManager(
        [
            RemoveUnusedNodesPass(),
            DeduplicateHashedInitializersPass(),
            CommonSubexpressionEliminationPass(),
            RemoveUnusedNodesPass(),
            ClearMetadataAndDocStringPass(),  # torch's stack traces: hundreds of kilobytes, and paths of this machine
        ]
    )(graph)
