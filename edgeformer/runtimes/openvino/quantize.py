"""INT8 for OpenVINO: NNCF's post-training quantisation of an FP32 graph, as an ONNX file with QuantizeLinear pairs.

OpenVINO runs that file as fast as its native format (.xml and .bin), and its weights can be counted. Weights get 7
bits, as in export's INT8 graphs: processors without VNNI silently saturate sums of 8-bit products. NNCF imports torch
if it is installed; the quantised graph needs neither.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import DataError, EdgeformerError, install_hint
from edgeformer.artifacts.files import replacing, sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.openvino.session import EXTRA, without_telemetry
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Builder, BuildJob, Calls, Target, Unavailable
from edgeformer.system.capability import installed_version

FORMAT = "openvino"
_NEEDED = ("openvino", "nncf", "onnx")
_BUILT_WITH = (*_NEEDED, "onnxruntime", "torch")


class Int8Builder(Builder):
    """``--int8`` with the extra installed: INT8 of the FP32 full and exit graphs with the full vocabulary."""

    name = "openvino"
    formats = (FORMAT,)
    joins = "int8"

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        missing = [name for name in _NEEDED if installed_version(name) is None]
        if missing:
            reason = f"package: {' and '.join(missing)} not installed ({install_hint(EXTRA)})"
            return Unavailable(FORMAT, reason, precision="int8")
        return Target(FORMAT, precision="int8")

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        graphs = [graph for graph in job.graphs if graph.role in ("full", "exit") and not graph.trimmed]
        graphs = [graph for graph in graphs if graph.precision == "fp32" and graph.is_graph]
        calls: Calls | None = None
        for graph in graphs:
            entry = ArtifactManifest(
                id=graph.id.replace(ONNX, FORMAT, 1).replace("fp32", "int8"),
                file=None, role=graph.role, exit=graph.exit, format=FORMAT, precision="int8", status="rejected",
                inputs=graph.inputs, outputs=graph.outputs, opset=graph.opset,
            )  # fmt: skip
            try:
                calls = calls if calls is not None else job.calibration()
                yield _built(entry, graph, calls, job)
            except DataError as error:
                yield entry.model_copy(
                    update={"status": "unavailable", "reason": f"no rows to calibrate with: {error}"}
                )
            except EdgeformerError as error:
                yield entry.model_copy(update={"reason": str(error)})


def _built(entry: ArtifactManifest, graph: ArtifactManifest, calls: Calls, job: BuildJob) -> ArtifactManifest:
    """Quantise a graph, write it and judge it. Raises EdgeformerError if NNCF fails."""
    import onnx

    from edgeformer.runtimes.openvino.session import OpenVINOSession

    file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}_int8.openvino.onnx"
    path = job.bundle / file
    with bar(job.progress, f"Quantising {graph.id} for OpenVINO with {len(calls)} training rows", None):
        model = quantize(onnx.load(str(job.bundle / str(graph.file))), calls)
        with replacing(path) as temporary:
            onnx.save_model(model, str(temporary))
    with OpenVINOSession(path) as session:
        judged = job.judge(entry, path, session)
    versions = {name: installed_version(name) for name in _BUILT_WITH}
    about = {
        "file": file,
        "size_bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "status": "rejected" if judged.get("reason") else "built",
        "built_with": {name: version for name, version in versions.items() if version is not None},
    }
    return entry.model_copy(update={**about, **judged})


def quantize(model: Any, calls: Calls, *, for_tensorrt: bool = False) -> Any:
    """Quantise an FP32 graph to INT8; weights are stored once, as INT8.

    Args:
        model: an ``onnx.ModelProto``; not modified.
        calls: calibration inputs, one row each.
        for_tensorrt: use zero points of 0, the only ones that TensorRT supports, and 8-bit weights, because its sums do
            not overflow.

    Raises:
        EdgeformerError: NNCF cannot quantise it.
    """
    with _quietly():
        import nncf
        from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix

        names = [value.name for value in model.graph.input]
        rows = [{name: call[name] for name in names} for call in calls]
        try:
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
        except Exception as error:  # errors of NNCF and onnxruntime have no common base class
            text = " ".join(str(error).split())[:200]
            raise EdgeformerError(f"NNCF cannot quantise it: {type(error).__name__}: {text}") from None
    _name_scales(quantized)
    return quantized


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress NNCF's telemetry, warnings, log and output on stdout."""
    with without_telemetry(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logger = logging.getLogger("nncf")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def _name_scales(model: Any) -> None:
    """Rename scales and zero points as ONNX Runtime's quantizer does, so that they do not count as parameters."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {name: f"{name}_scale" for name in stored if "nncf_smooth_quant_scale" in name}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            for name, ending in zip(node.input[1:], ("_scale", "_zero_point"), strict=False):
                if name in stored and not name.endswith(ending):
                    names[name] = f"{name}{ending}"
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
    for name, new_name in names.items():
        stored[name].name = new_name
