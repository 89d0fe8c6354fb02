"""TensorRT, TensorRT for RTX, and torch-tensorrt: build engines for NVIDIA GPUs and run them without torch."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import ArtifactError, DataError, EdgeformerError, MissingDependencyError, install_hint
from edgeformer.artifacts.manifest import ArtifactManifest, EngineBuild, Precision
from edgeformer.artifacts.progress import bar
from edgeformer.runtimes.runtime import (
    ENGINES_FOLDER,
    ArtifactFiles,
    Builder,
    BuildJob,
    OpenOptions,
    ProviderFacts,
    Runtime,
    Target,
    Unavailable,
)
from edgeformer.runtimes.session import PAST, Graph
from edgeformer.runtimes.tensorrt import state
from edgeformer.system import cuda_driver
from edgeformer.system.capability import Capability, ask_installed, installed_version

_PACKAGES: tuple[state.Package, ...] = ("tensorrt-rtx", "tensorrt", "torch-tensorrt")
RTX_INT8 = (
    "INT8 engines of tensorrt-rtx quantise weights and activations, but NVIDIA's support matrix of TensorRT-RTX lists "
    "INT8 for weights only: they may be no faster than FP16. This is not measured; compare both with edgeformer "
    "profile on the card"
)

_LOOP = "loop"
"""The part of a step artifact whose file is the artifact's ``file``."""


class TensorRTBuilder(Builder):
    """``--trt``: builds an engine of every graph in the requested precision, including step and decode graphs.

    It uses tensorrt-rtx if the device's profile says ``tensorrt: rtx``, otherwise tensorrt on the device itself. An
    engine that cannot be opened on this system is checked by ``verify --write`` on its device.
    """

    name: str = "tensorrt"
    formats: tuple[str, ...] = ("tensorrt-rtx", "tensorrt")
    flag = "--trt"
    needs_device = True

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        assert device is not None  # needs_device
        subject = f"{device.title} (profile {device.name!r}"
        if device.kind != "cuda" or device.compute_capability is None:
            reason = f"{subject}) is not an NVIDIA GPU, which TensorRT needs; give another --target"
            return Unavailable(self.formats[0], reason)
        if device.tensorrt_edition == "none":
            reason = "its profile says that TensorRT does not support it (tensorrt: none); give another --target"
            return Unavailable(self.formats[0], f"{subject}): {reason}")
        capability = device.compute_capability.value
        package: state.Package = "tensorrt" if self.name == "tensorrt" else "torch-tensorrt"
        own, problem = state.tensorrt_state(package), None  # why it cannot build on the device itself
        if missing := own.missing(to_build=True):
            problem = missing if own.is_installed else f"{missing} ({state.REMEDIES[package]})"
        elif (gpu := own.gpus[0]).compute_capability != capability or (
            (device.match or device.title).lower() not in gpu.name.lower()
        ):
            problem = f"device: the GPU is {gpu.name} with compute capability {gpu.compute_capability}"
        if package == "torch-tensorrt":
            reason = f"{subject}): torch-tensorrt compiles only on that GPU itself, and here: {problem}"
            return Unavailable(package, reason) if problem is not None else Target(package, device.name, capability)
        note = f"engines: {device.title}: {device.tensorrt_source}" if device.tensorrt is None else None
        subject += f", compute capability {capability})"
        is_rtx = device.tensorrt_edition == "rtx"
        if is_rtx:
            rtx = state.tensorrt_state("tensorrt-rtx")
            supported, missing = rtx.capabilities or state.RTX_CAPABILITIES, rtx.missing(to_build=True)
            if capability in supported and not missing:
                return Target("tensorrt-rtx", device.name, capability, note=note)
        if problem is None:
            return Target("tensorrt", device.name, capability, note=note)
        if not is_rtx:
            reason = (
                f"TensorRT for RTX supports GeForce RTX and RTX workstation cards only ({device.tensorrt_source}); use "
                f"tensorrt on that GPU itself (on a Jetson: that of JetPack); here: {problem}"
            )
        elif capability in supported:
            remedy = state.REMEDIES["tensorrt-rtx"]
            reason = f"tensorrt-rtx builds for it on any machine, but here: {missing} ({remedy})"
            reason += f"; {device.tensorrt_source}" if device.tensorrt is None else ""
        else:
            reason = (
                f"{device.tensorrt_source}, but this version of tensorrt-rtx builds only for compute capability "
                f"{', '.join(supported)}; install a newer one, or use tensorrt on that GPU itself (here: {problem})"
            )
        return Unavailable("tensorrt-rtx" if is_rtx else "tensorrt", f"{subject}: {reason}")

    def entry(self, graph: ArtifactManifest, target: Target, precision: Precision | None = None) -> ArtifactManifest:
        """Return the initial entry of an engine of ``graph``; ``precision`` None: the graph's."""
        reason = f"this machine cannot run an engine for {target.device}; run on the device: edgeformer verify --write"
        parity = self.unmeasured_parity(graph, reason, precision)
        fields = {"trimmed": graph.trimmed, "vocabulary": graph.vocabulary, "parity": parity}
        return self.initial_entry(graph, precision or graph.precision, target.format, **fields)

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        if target.note is not None:
            job.note(target.note)
        for graph in job.graphs:
            if graph.precision == job.precision:
                yield self._build(graph, target, job)
        if not any(graph.precision == "int8" for graph in job.graphs):
            return
        if installed_version("nncf") is None:
            hint = install_hint("openvino")  # the extra that installs NNCF
            job.note(f"INT8 engines: NNCF, which makes the graphs that TensorRT takes, is missing: {hint}")
            return
        if target.format == "tensorrt-rtx":
            job.note(RTX_INT8)
        for graph in job.full_text_graphs("fp32"):
            yield self._build(graph, target, job, "int8")

    def _build(
        self, graph: ArtifactManifest, target: Target, job: BuildJob, precision: Precision | None = None
    ) -> ArtifactManifest:
        """Build the engine of a graph, or one for each part of a step artifact, and return the manifest entry.

        ``int8`` is quantised from the FP32 graph: TensorRT takes the symmetric QuantizeLinear pairs of NNCF, and not
        the MatMulInteger products of export's INT8 graphs. Nodes that are not quantised compute in FP32.
        """
        from edgeformer.runtimes.tensorrt.engine import axis_sizes, build_engine

        entry = self.entry(graph, target, precision)
        suffix = "_int8" if precision is not None else "_trim" if graph.trimmed else ""
        sources = graph.parts or {_LOOP: str(graph.file)}
        files = {
            part: f"{ENGINES_FOLDER}/{Path(source).stem}{suffix}.{target.device}.engine"
            for part, source in sources.items()
        }

        # 1. Build the parts
        built = {}
        try:
            for part, source in sources.items():
                path, file = job.bundle / source, job.bundle / files[part]
                if precision is None:
                    generates = any(name.startswith(PAST) for name in graph.inputs)
                    axes = axis_sizes(job, generates=generates)
                    built[part] = build_engine(path, file, target, job, axes)
                    continue
                import onnx

                from edgeformer.runtimes.openvino import quantize

                quantized = file.with_name(f"{file.name}.onnx")  # a file, because the parser reads nothing else
                try:
                    with bar(job.progress, f"Quantizing {graph.id} for {target.format}", None):
                        model = quantize(onnx.load(str(path)), job.calibration(), for_tensorrt=True)
                        onnx.save_model(model, str(quantized))
                    built[part] = build_engine(quantized, file, target, replace(job, precision=precision))
                finally:
                    quantized.unlink(missing_ok=True)
        except DataError as error:
            reason = f"there are no rows to calibrate with: {error}"
            return entry.model_copy(update={"status": "unavailable", "reason": reason, "parity": None})
        except EdgeformerError as error:
            return entry.model_copy(update={"reason": str(error)})

        # 2. Combine their facts: sums, and all warnings; the rest is that of the main part
        engines = [part.engine for part in built.values()]
        update: dict[str, Any] = {}
        for name in ("seconds", "layers", "weight_bytes", "activation_bytes", "graph_bytes"):
            values = [getattr(engine, name) for engine in engines]
            update[name] = None if None in values else sum(values)
        for name in ("layers_by_precision", "weight_elements"):
            update[name] = dict(sum((Counter(getattr(engine, name)) for engine in engines), Counter[str]()))
        update["warnings"] = tuple(dict.fromkeys(warning for engine in engines for warning in engine.warnings))
        packages = ("torch", "onnx", "onnxscript", *(() if precision is None else ("nncf",)))
        entry = self.built_entry(
            entry, job.bundle, files[_LOOP], packages, engine=built[_LOOP].engine.model_copy(update=update),
            built_for=built[_LOOP].built_for, reason=next(filter(None, (part.reason for part in built.values())), None),
        )  # fmt: skip
        if not graph.parts:
            return entry
        size_bytes = sum((job.bundle / file).stat().st_size for file in files.values())
        return entry.model_copy(update={"parts": files, "size_bytes": size_bytes})


class TorchTensorRTBuilder(TensorRTBuilder):
    """``--trt --trt-via torch-tensorrt``: an engine of the full model, compiled from torch on the device itself."""

    name = "torch-tensorrt"
    formats = ("torch-tensorrt",)
    flag = "--trt --trt-via torch-tensorrt"

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        from edgeformer.runtimes.tensorrt.engine import (
            axis_sizes,
            compile_torch_engine,
            graph_bytes,
            why_engine_rejected,
        )

        graph = next((graph for graph in job.full_text_graphs(job.precision) if graph.role == "full"), None)
        if graph is None:
            return
        entry = self.entry(graph, target)
        suffix = "" if job.precision == "fp32" else f"_{job.precision}"
        # Differs from the name of TensorRT's engine of the same graph in this folder.
        file = f"{ENGINES_FOLDER}/model{suffix}.{target.device}.torch.engine"
        start_s = time.perf_counter()
        try:
            with bar(job.progress, "Compiling with torch-tensorrt", None):
                built_for = compile_torch_engine(graph, job.bundle / file, target, job)
        except EdgeformerError as error:
            yield entry.model_copy(update={"reason": str(error)})
            return
        sizes = zip(*axis_sizes(job).values(), strict=True)
        engine = EngineBuild(
            builder=f"torch-tensorrt {built_for['torch-tensorrt']}", seconds=round(time.perf_counter() - start_s, 2),
            checked_by="size", graph_bytes=graph_bytes(job.bundle / str(graph.file)),
            shapes=dict.fromkeys(graph.inputs, tuple(sizes)),
        )  # fmt: skip
        reason = why_engine_rejected(engine, (job.bundle / file).stat().st_size, job.precision)
        packages = ("torch", "torch-tensorrt")
        yield self.built_entry(entry, job.bundle, file, packages, built_for=built_for, engine=engine, reason=reason)


class TensorRTRuntime(Runtime):
    name = "tensorrt"
    formats = tuple(state.RUNTIMES)
    distributions = _PACKAGES
    facts: ClassVar = {format_: ProviderFacts(format_, "cuda") for format_ in state.RUNTIMES}
    # torch-tensorrt's engine first, so that profile can compare it with TensorRT's.
    builders = (TorchTensorRTBuilder(), TensorRTBuilder())
    fuses = True
    session_modules = ("edgeformer.runtimes.decoder", "edgeformer.runtimes.tensorrt.session")

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return state.why_engine_cannot_run(artifact)

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        from edgeformer.runtimes.tensorrt.session import TensorRTSession

        refusal = self.cannot_run(files.artifact)
        if refusal is not None:  # before the file is read
            is_missing = state.tensorrt_state(state.RUNTIMES[files.artifact.format]).missing()
            raise (MissingDependencyError if is_missing else ArtifactError)(f"{path}: {refusal}")
        return TensorRTSession(path, files.artifact, files.max_positions, repeated_shapes=options.repeated_shapes)

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answers = ask_installed(state.SCRIPTS, timeout_s)
        driver, gpus = cuda_driver.problem(), cuda_driver.devices()
        return [state.describe(state.judge(name, answers[name.replace("-", "_")], driver, gpus)) for name in _PACKAGES]

    def never_runs(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        if device.kind != "cuda":
            return f"{artifact.format} engines run on NVIDIA GPUs only"
        built_for = (artifact.built_for or {}).get("compute_capability")
        capability = device.compute_capability.value if device.compute_capability is not None else None
        if built_for is not None and capability is not None and built_for != capability:
            return f"the engine was built for compute capability {built_for}; {device.name!r} has {capability}"
        return None


RUNTIME = TensorRTRuntime()
