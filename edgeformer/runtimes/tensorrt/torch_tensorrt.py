"""``--trt-via torch-tensorrt``: compile the exported program with torch-tensorrt to one serialised engine.

Untested on a GPU. It follows the documentation and the code of
``torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine``, 2.11 to 2.13.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.runtime import BuildJob, Target
from edgeformer.runtimes.tensorrt.engine import axis_sizes
from edgeformer.runtimes.tensorrt.state import measured_on

DEVICE = "cuda"


def compile_engine(graph: ArtifactManifest, file: Path, target: Target, job: BuildJob) -> dict[str, str]:
    """Compile a graph's module for this system's GPU, write the engine, and return its ``built_for``.

    Its inputs are all int64 [batch, sequence]. The engine's outputs are called ``output0``…
    """
    torch_tensorrt: Any = importlib.import_module("torch_tensorrt")
    inputs = tuple(graph.inputs)
    module: nn.Module = job.module(graph)
    sizes = axis_sizes(job)
    dims = [torch.export.Dim(name, min=min_size, max=max_size) for name, (min_size, _, max_size) in sizes.items()]
    smallest, best, largest = zip(*sizes.values(), strict=True)  # the same two sizes for every input
    shapes = {"min_shape": smallest, "opt_shape": best, "max_shape": largest}
    trt_inputs = [torch_tensorrt.Input(**shapes, dtype=torch.int64, name=name) for name in inputs]
    try:
        module.to(DEVICE)
        example = tuple(torch.ones(2, best[1], dtype=torch.int64, device=DEVICE) for _ in inputs)
        program = torch.export.export(module, example, dynamic_shapes=dict.fromkeys(inputs, tuple(dims)))
        to_engine: Callable[..., Any] = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
        is_optional = "use_explicit_typing" in inspect.signature(to_engine).parameters  # the default in newer versions
        typing_option = {"use_explicit_typing": True} if is_optional else {}
        # The builder needs the card's memory: the weights are in the engine that it writes.
        options = {"disable_tf32": True, "offload_module_to_cpu": True, **typing_option}
        engine = to_engine(program, arg_inputs=trt_inputs, **options)
    except Exception as error:  # errors of torch.export, converters and TensorRT share no base class
        raise EdgeformerError(
            f"{file.name}: torch-tensorrt cannot compile this model: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.to("cpu")
    with replacing(file) as temporary:
        temporary.write_bytes(memoryview(engine))
    return {
        "compute_capability": str(target.compute_capability),
        "torch-tensorrt": str(torch_tensorrt.__version__),
        # The TensorRT that opens the engine must have this version.
        "tensorrt": str(importlib.import_module("tensorrt").__version__),
        **measured_on(),
    }
