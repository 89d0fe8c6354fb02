"""``export --executorch``: .pte programs of the full and exit graphs, with XNNPACK's kernels, in FP32 and INT8.

A program takes 1 to 16 texts of any length up to the recipe's longest. ExecuTorch reserves its activations for the
largest shape when it is opened.
"""

import math
from pathlib import Path
from typing import Any, ClassVar

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import Precision
from edgeformer.runtimes.executorch.session import EXTRA, FORMAT
from edgeformer.runtimes.module_builder import ModuleBuilder, StoredModel, export_program
from edgeformer.runtimes.runtime import converting

_KERNELS = ("aten_", "dim_order_ops_", "quantized_decomposed_")
"""Prefixes of operators that compute; the other nodes of a program choose outputs and sizes."""
_ITEM_BYTES = {"BYTE": 1, "CHAR": 1, "BOOL": 1, "SHORT": 2, "HALF": 2, "INT": 4, "FLOAT": 4, "LONG": 8, "DOUBLE": 8}


class ExecuTorchBuilder(ModuleBuilder):
    """A program in FP32 of each full and exit graph with the full vocabulary; with ``--int8`` also one in INT8.

    In INT8, linear layers have a scale per output channel, and activations have one per call.
    """

    name = "executorch"
    formats = (FORMAT,)
    flag = "--executorch"
    packages, extra, precision = ("executorch", "torch"), EXTRA, "fp32"
    distributions = ("executorch", "torch", "torchao")
    endings: ClassVar = {"fp32": ".pte", "int8": "_int8.pte"}
    step = "Lowering {} for ExecuTorch"
    not_run = f"it was not run here; run on the device: edgeformer verify --write ({install_hint(EXTRA)})"
    fp16_note = f"{FORMAT}: programs are FP32 or INT8; --fp16 does not change them"
    no_caches = "ExecuTorch: programs with caches of earlier tokens are not supported; use --gguf or ONNX"

    def write(
        self, module: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], length: int, path: Path,
        precision: Precision,
    ) -> StoredModel:  # fmt: skip

        # 1. Convert the module
        import torch

        with converting("ExecuTorch cannot lower this model"):
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.devtools.backend_debug import get_delegation_info
            from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

            program = export_program(module, inputs, length)
            # Stored tensors that are no parameters: tables of angles, scales.
            constants = {_bytes(tensor) for _, tensor in program.named_buffers()}
            constants |= {_bytes(tensor) for tensor in program.constants.values() if isinstance(tensor, torch.Tensor)}
            integers: set[bytes] = set()
            if precision == "int8":
                from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
                    XNNPACKQuantizer,
                    get_symmetric_quantization_config,
                )
                from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

                quantizer = XNNPACKQuantizer()
                quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True))
                prepared = prepare_pt2e(program.module(), quantizer)
                # Ranges of activations are measured in every call later; this one only runs the observers.
                prepared(*program.example_inputs[0])
                program = export_program(convert_pt2e(prepared), inputs, length)
                for name, tensor in (*program.named_buffers(), *program.constants.items()):
                    if tensor.dtype == torch.int8:
                        integers.add(_bytes(tensor))
                    elif "scale" in name or "zero_point" in name:
                        constants.add(_bytes(tensor))
            # The check of operators would fix the batch at the example's: it compares sizes outside of tracing.
            config = EdgeCompileConfig(_check_ir_validity=False)
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], compile_config=config)
            coverage = get_delegation_info(lowered.exported_program().graph_module)
            contents = lowered.to_executorch().buffer
        with replacing(path) as temporary:
            temporary.write_bytes(contents)
        kernels = {name: count for name, count in coverage.delegation_by_operator.items() if name.startswith(_KERNELS)}
        outside = {name.removeprefix("aten_"): count.non_delegated for name, count in kernels.items()}
        from executorch.exir._serialize._program import deserialize_pte_binary
        from executorch.exir.schema import Tensor

        # 2. Count what is stored
        # Stored tensors and their item sizes; XNNPACK's weights have no type in the file: their item size is 0.
        file = deserialize_pte_binary(contents)
        (plan,) = file.program.execution_plan
        tensors = [value.val for value in plan.values if isinstance(value.val, Tensor)]
        counts = {t.data_buffer_idx: (math.prod(t.sizes), _ITEM_BYTES[t.scalar_type.name]) for t in tensors}
        blobs = []
        for index, part in enumerate(file.program.constant_buffer[1:], start=1):  # the first one stands for activations
            count, item_bytes = counts[index]
            blobs.append((bytes(part.storage)[: count * item_bytes], item_bytes))  # without padding
        if file.named_data is not None:
            blobs += [(bytes(part), 0) for part in file.named_data.buffers]
        parameters = elements = 0
        for blob, item_bytes in blobs:
            count = len(blob) // (item_bytes or (1 if blob in integers else 4))
            elements += count
            parameters += count if count > 1 and blob not in constants else 0
        quantized = sum(count.delegated for name, count in kernels.items() if "dequantize_per_channel" in name)
        engine = {
            "activation_bytes": sum(plan.non_const_buffer_sizes),
            "delegated": sum(count.delegated for count in kernels.values()),
            "not_delegated": {name: count for name, count in sorted(outside.items()) if count},
        }
        weight_bytes = sum(len(blob) for blob, _ in blobs)
        layers = {"linear": quantized} if quantized else {}  # each counts once per loop
        return StoredModel(parameters, elements - parameters, weight_bytes, layers, engine)


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().numpy().tobytes())
