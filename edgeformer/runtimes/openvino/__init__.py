"""OpenVINO: runs a bundle's ONNX graphs on the processor in FP32 or bfloat16, and INT8 graphs quantised by NNCF.

OpenVINO runs an ONNX file with QuantizeLinear pairs as fast as its native format (.xml and .bin), and its weights can
be counted. Weights get 7 bits, as in export's INT8 graphs: processors without VNNI silently saturate sums of 8-bit
products. NNCF imports torch if it is installed; the quantised graph needs neither.
"""

import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from edgeformer.artifacts.errors import DataError, EdgeformerError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.openvino.session import CPU, CPU_BF16, EXTRA, HINTS, OPENVINO, without_telemetry
from edgeformer.runtimes.runtime import (
    ENGINES_FOLDER,
    ArtifactFiles,
    Builder,
    BuildJob,
    Calls,
    OpenOptions,
    OptionalPackage,
    OptionalRuntime,
    ProviderFacts,
    Target,
    converting,
)
from edgeformer.runtimes.session import Graph

FORMAT = "openvino"


class Int8Builder(Builder):
    """``--int8`` with the extra installed: INT8 of the FP32 full and exit graphs with the full vocabulary."""

    name = "openvino"
    formats = (FORMAT,)
    packages, extra = ("openvino", "nncf", "onnx"), EXTRA
    precision = joins = "int8"

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        import onnx

        calls: Calls | None = None
        note = f"{FORMAT}-int8: made by --int8, because openvino and nncf are installed; it runs in OpenVINO, and"
        note += " profile measures it beside onnx-int8"
        for graph in job.full_text_graphs("fp32"):
            entry = self.initial_entry(graph, "int8", opset=graph.opset)
            file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}_int8.openvino.onnx"
            try:
                calls = calls if calls is not None else job.calibration()
                label = f"Quantizing {graph.id} for OpenVINO with {len(calls)} training rows"
                with bar(job.progress, label, None):
                    model = quantize(onnx.load(str(job.bundle / str(graph.file))), calls)
                    with replacing(job.bundle / file) as temporary:
                        onnx.save_model(model, str(temporary))
            except DataError as error:
                reason = f"there are no rows to calibrate with: {error}"
                yield entry.model_copy(update={"status": "unavailable", "reason": reason})
            except EdgeformerError as error:
                yield entry.model_copy(update={"reason": str(error)})
            else:
                if graph.role == "full":
                    job.note(note)
                parity = self.unmeasured_parity(graph, "it was not run", "int8")
                yield self.built_entry(entry, job.bundle, file, (*self.packages, "onnxruntime", "torch"), parity=parity)


def quantize(model: Any, calls: Calls, *, for_tensorrt: bool = False) -> Any:
    """Return an ``onnx.ModelProto`` in FP32 quantised to INT8 with NNCF; weights are stored once, as INT8.

    ``calls`` are calibration inputs of one row. ``for_tensorrt``: with zero points of 0, the only ones that TensorRT
    supports, and 8-bit weights, because its sums do not overflow. Raises EdgeformerError if NNCF cannot quantise it.
    """
    with converting("NNCF cannot quantize this graph"), without_telemetry(), redirect_stdout(io.StringIO()):
        import nncf
        from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

        names = [value.name for value in model.graph.input]
        rows = [{name: call[name] for name in names} for call in calls]
        quantized = nncf.quantize(
            model,
            nncf.Dataset(rows),
            subset_size=len(rows),
            model_type=nncf.ModelType.TRANSFORMER,
            target_device=nncf.TargetDevice.CPU,
            preset=nncf.QuantizationPreset.PERFORMANCE if for_tensorrt else None,
            advanced_parameters=AdvancedQuantizationParameters(
                overflow_fix=OverflowFix.DISABLE if for_tensorrt else OverflowFix.ENABLE
            ),
        )
    # Name scales and zero points as ONNX Runtime's quantizer does, so that they do not count as parameters.
    stored = {tensor.name: tensor for tensor in quantized.graph.initializer}
    new_names = {name: f"{name}_scale" for name in stored if "nncf_smooth_quant_scale" in name}
    for node in quantized.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            for name, ending in zip(node.input[1:], ("_scale", "_zero_point"), strict=False):
                if name in stored and not name.endswith(ending):
                    new_names[name] = f"{name}{ending}"
    for node in quantized.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = new_names.get(name, name)
    for name, new_name in new_names.items():
        stored[name].name = new_name
    return quantized


class OpenVINORuntime(OptionalRuntime):
    name = "openvino"
    formats = (FORMAT,)
    builders = (Int8Builder(),)
    reads = (ONNX,)
    fuses = True
    distributions = ("openvino", "nncf")
    packages = (OPENVINO, OptionalPackage("nncf", EXTRA, "INT8 for OpenVINO, by export --int8", ("nncf",)))
    facts: ClassVar = {
        CPU: ProviderFacts("OpenVINO", "cpu", counts_threads=True),
        CPU_BF16: ProviderFacts("OpenVINO bf16", "cpu", counts_threads=True, rounds_to="bf16"),
    }

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        from edgeformer.runtimes.openvino.session import OpenVINOSession

        return OpenVINOSession(path, options.provider or CPU, options.threads, files.max_positions)

    def offers(self, artifact: ArtifactManifest) -> tuple[str, ...]:
        if artifact.precision == "int4":  # 4-bit tables are not supported
            return ()
        # Export's INT8 graphs are slow in OpenVINO, so they are not offered in bfloat16.
        return tuple(HINTS) if artifact.precision == "fp32" or artifact.format == FORMAT else (CPU,)

    def load(self, artifact: ArtifactManifest) -> None:
        from edgeformer.runtimes.openvino.session import core

        core()


RUNTIME = OpenVINORuntime()
