"""Builders of TensorRT engines: choose the TensorRT package for a device and build every graph."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgeformer.artifacts.errors import DataError, EdgeformerError, install_hint
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, Engine, Parity, Precision
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.runtime import ENGINES_FOLDER, Builder, BuildJob, Target, Unavailable
from edgeformer.runtimes.session import KEPT
from edgeformer.runtimes.tensorrt.state import ENGINE_SUFFIX, REMEDIES, RTX_CAPABILITIES, TensorRTState, tensorrt_state
from edgeformer.system.capability import installed_version
from edgeformer.tasks.metric import TOLERANCES

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile

_JETSON_CAPABILITIES = ("5.3", "6.2", "7.2", "8.7", "11.0")
"""Compute capabilities that only Jetsons have."""

_INT8_EXTRA = "openvino"
"""The extra that installs NNCF."""

RTX_INT8 = (
    "INT8 engines of tensorrt-rtx quantise weights and activations, but NVIDIA's support matrix of TensorRT-RTX lists "
    "INT8 for weights only: they may be no faster than FP16. This is not measured; compare both with edgeformer "
    "profile on the card"
)

_LOOP = "loop"
"""The part of a step artifact whose file is the artifact's ``file``."""


def _why_not_on_device(state: TensorRTState, device: DeviceProfile, capability: str) -> str | None:
    if state.missing_to_build():
        remedy = f" ({REMEDIES[state.name]})" if not state.installed() else ""
        return f"{state.missing_to_build()}{remedy}"
    gpu = state.gpus[0]
    device_title = device.match or device.title
    if gpu.compute_capability != capability or device_title.lower() not in gpu.name.lower():
        return f"device: this machine's GPU is {gpu.name} with compute capability {gpu.compute_capability}"
    return None


class EngineBuilder(Builder):
    """Base class of builders whose engines are built for one NVIDIA GPU."""

    needs_device = True

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        assert device is not None  # needs_device
        subject = f"{device.title} (profile {device.name!r}"
        if device.kind != "cuda" or device.compute_capability is None:
            reason = f"{subject}) is not an NVIDIA GPU, which TensorRT needs; name another --target"
            return Unavailable(self.formats[0], reason)
        if device.tensorrt_edition == "none":
            reason = (
                f"{subject}): its profile says that no TensorRT supports it (tensorrt: none); name another --target"
            )
            return Unavailable(self.formats[0], reason)
        return self._plan(device, device.compute_capability.value, subject)

    @abstractmethod
    def _plan(self, device: DeviceProfile, capability: str, subject: str) -> Target | Unavailable:
        """Plan for a GPU of that compute capability. ``subject`` begins every reason and has an open parenthesis."""


class TensorRTBuilder(EngineBuilder):
    """``--trt``: builds an engine of every graph in the requested precision, including step and decode graphs.

    It uses tensorrt-rtx if the device's profile says ``tensorrt: rtx``, otherwise tensorrt on the device itself.
    Export checks the engine's results if it can be opened on this system, otherwise ``verify --write`` on its device.
    """

    name = "tensorrt"
    formats = ("tensorrt-rtx", "tensorrt")
    flag = "--trt"

    def _plan(self, device: DeviceProfile, capability: str, subject: str) -> Target | Unavailable:
        note = f"engines: {device.title}: {device.tensorrt_source}" if device.tensorrt is None else None
        subject += f", compute capability {capability})"
        problem = _why_not_on_device(tensorrt_state("tensorrt"), device, capability)
        if device.tensorrt_edition == "rtx":
            rtx = tensorrt_state("tensorrt-rtx")
            supported = rtx.capabilities or RTX_CAPABILITIES
            missing = rtx.missing_to_build()
            if capability in supported and not missing:
                return Target("tensorrt-rtx", device.name, capability, note=note)
            if problem is None:
                return Target("tensorrt", device.name, capability, note=note)
            if capability in supported:
                reason = f"tensorrt-rtx builds for it on any machine, but here {missing} ({REMEDIES['tensorrt-rtx']})"
                if device.tensorrt is None:
                    reason += f"; {device.tensorrt_source}"
                return Unavailable("tensorrt-rtx", f"{subject}: {reason}")
            return Unavailable(
                "tensorrt-rtx",
                f"{subject}: {device.tensorrt_source}, but this tensorrt-rtx builds only for compute capability "
                f"{', '.join(supported)}; install a newer one, or use tensorrt on that very GPU (here {problem})",
            )
        if problem is None:
            return Target("tensorrt", device.name, capability, note=note)
        alternative = (
            "TensorRT of JetPack, on the Jetson itself"
            if capability in _JETSON_CAPABILITIES
            else "tensorrt, on that very GPU"
        )
        return Unavailable(
            "tensorrt",
            f"{subject}: TensorRT for RTX is for GeForce RTX and RTX workstation cards, and {device.tensorrt_source}. "
            f"Use {alternative}; here {problem}",
        )

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        if target.note is not None:
            job.note(target.note)
        for graph in (graph for graph in job.graphs if graph.precision == job.precision):
            yield _engine(_entry(graph, target), job, partial(_built, graph=graph, target=target, job=job))
        if not any(graph.precision == "int8" for graph in job.graphs):
            return
        if installed_version("nncf") is None:
            hint = install_hint(_INT8_EXTRA)
            job.note(f"INT8 engines: NNCF, which makes the graphs that TensorRT takes, is missing: {hint}")
            return
        if target.format == "tensorrt-rtx":
            job.note(RTX_INT8)
        for graph in _full_text_graphs(replace(job, precision="fp32")):
            entry = _entry(graph, target, "int8")
            yield _engine(entry, job, partial(_built_in_int8, graph=graph, target=target, job=job))


def _engine(
    entry: ArtifactManifest, job: BuildJob, build: Callable[[ArtifactManifest], ArtifactManifest]
) -> ArtifactManifest:
    """Build an engine and return its manifest entry, or an entry with the reason why it failed."""
    from edgeformer.runtimes.tensorrt.engine import size_note

    try:
        engine = build(entry)
    except DataError as error:
        reason = f"no rows to calibrate with: {error}"
        return entry.model_copy(update={"status": "unavailable", "reason": reason, "parity": None})
    except EdgeformerError as error:
        return entry.model_copy(update={"reason": str(error)})
    larger = size_note(engine.id, engine.engine, engine.size_bytes or 0) if engine.engine is not None else None
    if larger is not None:
        job.note(larger)
    return engine


def _built_in_int8(entry: ArtifactManifest, graph: ArtifactManifest, target: Target, job: BuildJob) -> ArtifactManifest:
    """Build an INT8 engine from the symmetric QuantizeLinear pairs that NNCF inserts into the FP32 graph.

    TensorRT does not support the MatMulInteger products of export's INT8 graphs. Nodes that are not quantised compute
    in FP32.
    """
    import onnx

    from edgeformer.runtimes.openvino.quantize import quantize
    from edgeformer.runtimes.tensorrt.engine import build_engine

    file = f"{ENGINES_FOLDER}/{Path(str(graph.file)).stem}_int8.{target.device}{ENGINE_SUFFIX}"
    source = job.bundle / f"{file}.onnx"  # the parser reads files only
    try:
        with bar(job.progress, f"Quantising {graph.id} for {target.format}", None):
            model = quantize(onnx.load(str(job.bundle / str(graph.file))), job.calibration(), for_tensorrt=True)
            onnx.save_model(model, str(source))
        built = build_engine(source, job.bundle / file, target, replace(job, precision="int8"))
    finally:
        source.unlink(missing_ok=True)
    return _written(entry, job.bundle, file, ("torch", "onnx", "onnxscript", "nncf"), vars(built))


def _built(entry: ArtifactManifest, graph: ArtifactManifest, target: Target, job: BuildJob) -> ArtifactManifest:
    """Build the engine of a graph, or one for each part of a step artifact. Raises EdgeformerError on failure."""
    from edgeformer.runtimes.tensorrt.engine import build_engine, combine_engines, writing_shapes

    sources = graph.parts or {_LOOP: str(graph.file)}
    trim_suffix, engines = "_trim" if graph.trimmed else "", {}
    files = {
        part: f"{ENGINES_FOLDER}/{Path(source).stem}{trim_suffix}.{target.device}{ENGINE_SUFFIX}"
        for part, source in sources.items()
    }
    writes = any(name.startswith(KEPT) for name in graph.inputs)
    for part, source in sources.items():
        path = job.bundle / source
        part_job = replace(job, shapes=writing_shapes(path, job)) if writes else job
        engines[part] = build_engine(path, job.bundle / files[part], target, part_job)
    facts = vars(combine_engines(engines.values(), first=engines[_LOOP]))
    engine = _written(entry, job.bundle, files[_LOOP], ("torch", "onnx", "onnxscript"), facts)
    if not graph.parts:
        return engine
    size_bytes = sum((job.bundle / file).stat().st_size for file in files.values())
    return engine.model_copy(update={"parts": files, "size_bytes": size_bytes})


class TorchTensorRTBuilder(EngineBuilder):
    """``--trt --trt-via torch-tensorrt``: an engine of the full model, compiled from torch on the device itself."""

    name = "torch-tensorrt"
    formats = ("torch-tensorrt",)
    flag = "--trt --trt-via torch-tensorrt"

    def _plan(self, device: DeviceProfile, capability: str, subject: str) -> Target | Unavailable:
        problem = _why_not_on_device(tensorrt_state("torch-tensorrt"), device, capability)
        if problem is None:
            return Target("torch-tensorrt", device.name, capability)
        reason = f"{subject}): torch-tensorrt compiles on that very GPU, but here {problem}"
        return Unavailable("torch-tensorrt", reason)

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        from edgeformer.runtimes.tensorrt.engine import graph_bytes, text_shapes
        from edgeformer.runtimes.tensorrt.torch_tensorrt import compile_engine

        graph = next((graph for graph in _full_text_graphs(job) if graph.role == "full"), None)
        if graph is None:
            return
        entry = _entry(graph, target)
        suffix = "" if job.precision == "fp32" else f"_{job.precision}"
        # Differs from the name of TensorRT's engine of the same graph in this folder.
        file = f"{ENGINES_FOLDER}/model{suffix}.{target.device}.torch{ENGINE_SUFFIX}"
        began = time.perf_counter()
        try:
            with bar(job.progress, "Compiling with torch-tensorrt", None):
                built_for = compile_engine(tuple(graph.inputs), job.bundle / file, target, job)
        except EdgeformerError as error:
            yield entry.model_copy(update={"reason": str(error)})
            return
        sizes = zip(*text_shapes(job.max_length, job.max_positions).values(), strict=True)
        engine = Engine(
            builder=f"torch-tensorrt {built_for['torch-tensorrt']}",
            seconds=round(time.perf_counter() - began, 2),
            checked_by="size",
            graph_bytes=graph_bytes(job.bundle / str(graph.file)),
            shapes=dict.fromkeys(graph.inputs, tuple(sizes)),
        )
        facts = {"built_for": built_for, "engine": engine}
        yield _written(entry, job.bundle, file, ("torch", "torch-tensorrt"), facts)


def _full_text_graphs(job: BuildJob) -> list[ArtifactManifest]:
    """Return the full and exit graphs with the full vocabulary in the job's precision."""
    graphs = [graph for graph in job.graphs if graph.role in ("full", "exit") and not graph.trimmed]
    return [graph for graph in graphs if graph.precision == job.precision]


def _entry(graph: ArtifactManifest, target: Target, precision: Precision | None = None) -> ArtifactManifest:
    """Return the initial entry of an engine of ``graph``: rejected, without a file.

    Args:
        precision: precision of the engine; None: the graph's.
    """
    kind, tolerance = TOLERANCES[precision or graph.precision]
    if graph.parity is not None and precision is None:  # its task may define other tolerances
        kind, tolerance = graph.parity.tolerance_kind, graph.parity.tolerance
    unknown = f"this machine cannot run an engine for {target.device}; on the device, run: edgeformer verify --write"
    return ArtifactManifest(
        id=graph.id.replace(ONNX, target.format, 1).replace(graph.precision, precision or graph.precision, 1),
        file=None,
        role=graph.role,
        exit=graph.exit,
        format=target.format,
        precision=precision or graph.precision,
        trimmed=graph.trimmed,
        vocabulary=graph.vocabulary,
        status="rejected",
        inputs=graph.inputs,
        outputs=graph.outputs,
        parity=Parity(status="unavailable", tolerance=tolerance, tolerance_kind=kind, reason=unknown),
    )


def _written(
    entry: ArtifactManifest, bundle: Path, file: str, makers: tuple[str, ...], facts: dict[str, object]
) -> ArtifactManifest:
    """Complete the entry of an engine written to ``file``; a ``reason`` in ``facts`` keeps it rejected."""
    path, versions = bundle / file, {name: installed_version(name) for name in makers}
    about: dict[str, object] = {
        "file": file,
        "size_bytes": path.stat().st_size,
        "sha256": sha256_of(path),
        "status": "rejected" if facts.get("reason") else "built",
        "built_with": {name: version for name, version in versions.items() if version is not None},
    }
    return entry.model_copy(update={**about, **facts})
