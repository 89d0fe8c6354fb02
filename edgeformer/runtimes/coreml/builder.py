"""``export --coreml``: ML programs of the full and exit graphs in FP16, and with INT8 weights, as zipped .mlpackage.

An artifact of a bundle is a file, and an .mlpackage is a folder: the zip file holds it, uncompressed.
"""

import math
import tempfile
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import Precision
from edgeformer.runtimes.coreml.session import EXTRA, FORMAT, NOT_APPLE, PACKAGE
from edgeformer.runtimes.module_builder import MAX_BATCH, ModuleBuilder, StoredModel, export_program
from edgeformer.runtimes.runtime import converting

_ITEM_BYTES = {10: 2, 11: 4, 21: 1}
"""Types of weights in an ML program → bytes: FP16, FP32, INT8."""


class CoreMLBuilder(ModuleBuilder):
    """A model in FP16 of each full and exit graph with the full vocabulary; with ``--int8`` also one with INT8 weights.

    FP16 is the default of ML programs: the Neural Engine and the GPU compute in it. INT8 weights have a scale per
    output channel, and products are computed in FP16. A model's inputs are int32.
    """

    name = "coreml"
    formats = (FORMAT,)
    flag = "--coreml"
    packages, extra, precision = ("coremltools", "torch"), EXTRA, "fp16"
    distributions = ("coremltools", "torch")
    endings: ClassVar = {"fp16": "_fp16.mlpackage.zip", "int8": "_int8.mlpackage.zip"}
    step = "Converting {} to Core ML"
    not_run = f"{NOT_APPLE}; run there: edgeformer verify --write"
    no_caches = "Core ML: models with caches of earlier tokens are not supported; use --gguf or ONNX"

    def write(
        self, module: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], length: int, path: Path,
        precision: Precision,
    ) -> StoredModel:  # fmt: skip
        # 1. Convert the module
        import torch

        with tempfile.TemporaryDirectory() as folder, replacing(path) as temporary:
            package = Path(folder) / PACKAGE
            with converting("coremltools cannot convert this model"):
                import coremltools
                from coremltools.optimize import coreml as optimize

                program = export_program(module, inputs, length)
                example_length = program.example_inputs[0][0].shape[1]
                program = program.run_decompositions({})
                for node in list(program.graph.nodes):
                    # coremltools does not know this operator, which changes nothing.
                    if node.target == torch.ops.aten.alias.default:
                        node.replace_all_uses_with(node.args[0])
                        program.graph.erase_node(node)
                ranges = (coremltools.RangeDim(1, MAX_BATCH, 1), coremltools.RangeDim(1, length, example_length))
                model = coremltools.convert(
                    program,
                    inputs=[coremltools.TensorType(name, coremltools.Shape(ranges), np.int32) for name in inputs],
                    outputs=[coremltools.TensorType(name, dtype=np.float32) for name in outputs],
                    convert_to="mlprogram",
                    minimum_deployment_target=coremltools.target.iOS17,
                    skip_model_load=True,
                )
                if precision == "int8":
                    settings = optimize.OpLinearQuantizerConfig(mode="linear_symmetric")
                    model = optimize.linear_quantize_weights(model, optimize.OptimizationConfig(settings))
                model.save(str(package))
                spec: Any = model.get_spec()
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
                for part in (package / "Manifest.json", *sorted((package / "Data").rglob("*"))):  # no debugging files
                    if part.is_file():
                        archive.write(part, part.relative_to(package.parent).as_posix())

        # 2. Count its weights: a stored tensor once per place in the file, small ones once per use
        # Names begin with p_ for parameters and b_ for other tensors of a module, such as tables of angles.
        ((block,),) = ([*function.block_specializations.values()] for function in spec.mlProgram.functions.values())
        parameters = constants = size = quantized = 0
        offsets: set[int] = set()
        for operation in block.operations:
            values = [*operation.attributes.items()]
            values += [(key, part.value) for key, bound in operation.inputs.items() for part in bound.arguments]
            for key, value in values:
                tensor = value.type.tensorType
                if tensor.dataType not in _ITEM_BYTES or not (value.HasField("blobFileValue") or tensor.rank):
                    continue
                if value.HasField("blobFileValue"):
                    if value.blobFileValue.offset in offsets:
                        continue
                    offsets.add(value.blobFileValue.offset)
                count = math.prod(dimension.constant.size for dimension in tensor.dimensions)
                size += count * _ITEM_BYTES[tensor.dataType]
                quantized += key == "quantized_data"
                name = operation.outputs[0].name
                is_added = "_bias_" in name and not name.startswith("p_")  # zeros, where a product becomes a layer
                if key in ("scale", "zero_point") or name.startswith("b_") or is_added or count == 1:
                    constants += count
                else:
                    parameters += count
        return StoredModel(parameters, constants, size, {"weights": quantized} if quantized else {})
