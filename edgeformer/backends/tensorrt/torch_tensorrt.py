"""``--trt-via torch-tensorrt``: the exported program compiled by torch-tensorrt, for people who stay in torch.

Not checked by us on a GPU: torch-tensorrt cannot be installed where edgeformer is developed. It follows the
documentation of ``torch_tensorrt.dynamo.compile`` and ``torch_tensorrt.save``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeformer.backends.tensorrt.plan import EngineRequest, TextShapes
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.files import replacing
from edgeformer.machine import nvidia
from edgeformer.machine.cuda_driver import devices


def compile_program(module: nn.Module, inputs: tuple[str, ...], target: Path, request: EngineRequest) -> dict[str, str]:
    """Compile a module for the GPU that is here and save it; ``torch.export.load(target).module()`` opens it.

    Args:
        module: in evaluation mode, in the precision of the request (types are taken from the module); it is moved to
            the GPU and back.
        inputs: names of its arguments, all int64 [batch, sequence].
        request: from :func:`~edgeformer.backends.tensorrt.plan.plan_torch_tensorrt`.

    Returns:
        ``built_for``: compute capability, torch-tensorrt's version, GPU and driver.

    Raises:
        EdgeformerError: torch cannot export the module, or torch-tensorrt cannot compile it.
    """
    torch_tensorrt: Any = importlib.import_module("torch_tensorrt")
    shapes = request.shapes
    axes = dict.fromkeys(inputs, _axes(shapes))  # the same two sizes for every input
    example = tuple(torch.ones(2, shapes.sequence.best, dtype=torch.int64, device="cuda") for _ in inputs)
    described = [torch_tensorrt.Input(**_sizes(shapes), dtype=torch.int64, name=name) for name in inputs]
    try:
        module.to("cuda")
        program = torch.export.export(module, example, dynamic_shapes=axes)
        # Types as in the module: strongly typed.
        compiled = torch_tensorrt.dynamo.compile(program, arg_inputs=described, use_explicit_typing=True)
        with replacing(target) as temporary:
            torch_tensorrt.save(compiled, str(temporary), arg_inputs=list(example), dynamic_shapes=axes)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise EdgeformerError(f"{target.name}: torch-tensorrt cannot compile this model: {error}") from error
    finally:
        module.to("cpu")
    return {
        "compute_capability": request.target.compute_capability,
        "torch-tensorrt": str(torch_tensorrt.__version__),
        "gpu": devices()[0].name,
        "driver": nvidia.driver_version() or "unknown",
    }


def _sizes(shapes: TextShapes) -> Mapping[str, tuple[int, int]]:
    batch, sequence = shapes.batch, shapes.sequence
    return {
        "min_shape": (batch.smallest, sequence.smallest),
        "opt_shape": (batch.best, sequence.best),
        "max_shape": (batch.largest, sequence.largest),
    }


def _axes(shapes: TextShapes) -> dict[int, torch.export.Dim]:
    return {
        0: torch.export.Dim("batch", min=shapes.batch.smallest, max=shapes.batch.largest),
        1: torch.export.Dim("sequence", min=shapes.sequence.smallest, max=shapes.sequence.largest),
    }
