"""The builders of engines: which TensorRT builds for a device, for which shapes, or why none can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeformer.backends.backend import ENGINES_FOLDER, Builder, BuildJob, Target, Unavailable
from edgeformer.backends.tensorrt.state import (
    ENGINE_SUFFIX,
    REMEDIES,
    RTX_CAPABILITIES,
    Package,
    TensorRTState,
    tensorrt_state,
)
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ONNX, ArtifactManifest, Parity, Precision
from edgeformer.machine.capability import installed_version
from edgeformer.tasks.parity import TOLERANCES

if TYPE_CHECKING:
    from edgeformer.formats.device import DeviceProfile

LARGEST_BATCH = 16
BEST_LENGTH = 128
"""Tokens at which latency is judged (the budgets' shape); engines are tuned for it where the text gets so long."""

_JETSON = ("5.3", "6.2", "7.2", "8.7", "11.0")
"""Compute capabilities that only Jetsons have."""


@dataclass(frozen=True)
class Sizes:
    """A dynamic axis: the smallest size that the engine takes, the one it is tuned for, the largest."""

    smallest: int
    best: int
    largest: int


@dataclass(frozen=True)
class TextShapes:
    """Sizes of the axes of a text graph's inputs, by the axes' names in the graph."""

    batch: Sizes
    sequence: Sizes

    def axis(self, name: str) -> Sizes | None:
        """The sizes of an axis; None for one that an engine is not built for."""
        return {"batch": self.batch, "sequence": self.sequence}.get(name)


def text_shapes(max_length: int, max_positions: int) -> TextShapes:
    """The one rule: batch 1…16, tuned for 1; sequence 1…``max_length``, tuned for 128 tokens or the longest text.

    The largest sequence is at least 128 where the model can take that: latency is judged there.

    Args:
        max_length: tokens of the longest text of the recipe.
        max_positions: tokens that the model can take.
    """
    longest = min(max_positions, max(max_length, BEST_LENGTH))
    return TextShapes(Sizes(1, 1, LARGEST_BATCH), Sizes(1, min(BEST_LENGTH, max_length), longest))


@dataclass(frozen=True)
class EngineRequest:
    """What to build.

    Attributes:
        precision: the graph's; an engine computes in the types of its graph.
        cache: folder for what builders learn about a GPU (timings); None: learn it again.
    """

    target: Target
    precision: Precision
    shapes: TextShapes
    cache: Path | None = None

    @property
    def compute_capability(self) -> str:
        """What the engine's code is compiled for."""
        assert self.target.compute_capability is not None  # every plan for an NVIDIA GPU names one
        return self.target.compute_capability


def plan_engine(
    device: DeviceProfile, state: Callable[[Package], TensorRTState] = tensorrt_state
) -> Target | Unavailable:
    """Choose the builder: tensorrt-rtx where it supports the device, else tensorrt on that very device.

    Args:
        state: says what works here.
    """
    named = f"{device.title} (profile {device.name!r}"
    if device.kind != "cuda" or device.compute_capability is None:
        return Unavailable(
            "tensorrt-rtx", f"{named}) is not an NVIDIA GPU, which TensorRT needs; name another --target"
        )
    capability = device.compute_capability.value
    named = f"{named}, compute capability {capability})"
    rtx = state("tensorrt-rtx")
    supported = rtx.capabilities or RTX_CAPABILITIES
    if capability in supported and rtx.can_build():
        return Target("tensorrt-rtx", device.name, capability)
    full = state("tensorrt")
    problem = _why_not_on_device(full, device, capability)
    if problem is None:
        return Target("tensorrt", device.name, capability)
    if capability in supported:
        missing = f"{rtx.missing_to_build()} ({REMEDIES['tensorrt-rtx']})"
        return Unavailable("tensorrt-rtx", f"{named}: tensorrt-rtx builds for it on any machine, but here {missing}")
    alternative = "TensorRT of JetPack, on the Jetson itself" if capability in _JETSON else "tensorrt, on that very GPU"
    return Unavailable(
        "tensorrt",
        f"{named}: tensorrt-rtx supports only compute capability {', '.join(supported)}. Use {alternative}; "
        f"here {problem}",
    )


def plan_torch_tensorrt(
    device: DeviceProfile, state: Callable[[Package], TensorRTState] = tensorrt_state
) -> Target | Unavailable:
    """For ``--trt-via torch-tensorrt``: like tensorrt, it compiles on that very device."""
    named = f"{device.title} (profile {device.name!r})"
    if device.kind != "cuda" or device.compute_capability is None:
        return Unavailable(
            "torch-tensorrt", f"{named} is not an NVIDIA GPU, which TensorRT needs; name another --target"
        )
    capability = device.compute_capability.value
    problem = _why_not_on_device(state("torch-tensorrt"), device, capability)
    if problem is None:
        return Target("torch-tensorrt", device.name, capability)
    return Unavailable("torch-tensorrt", f"{named}: torch-tensorrt compiles on that very GPU, but here {problem}")


def _why_not_on_device(state: TensorRTState, device: DeviceProfile, capability: str) -> str | None:
    if not state.can_build():
        remedy = f" ({REMEDIES[state.name]})" if not state.installed() else ""
        return f"{state.missing_to_build()}{remedy}"
    gpu = state.gpus[0]
    wanted = device.match or device.title
    if gpu.compute_capability != capability or wanted.lower() not in gpu.name.lower():
        return f"device: this machine's GPU is {gpu.name} with compute capability {gpu.compute_capability}"
    return None


class TensorRTBuilder(Builder):
    """``--trt``: an engine of every graph for whole texts, in the precision that was asked for.

    What an engine answers is checked by ``edgeformer verify`` on its device: here may be no GPU that could open it.
    """

    name = "tensorrt"
    formats = ("tensorrt-rtx", "tensorrt")
    needs_device = True
    flag = "--trt"

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        """See :func:`plan_engine`."""
        assert device is not None  # needs_device
        return plan_engine(device)

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        """See :meth:`Builder.build`."""
        from edgeformer.backends.tensorrt.engine import build_engine, size_note

        shapes = text_shapes(job.max_length, job.max_positions)
        request = EngineRequest(target, job.precision, shapes, job.cache / "tensorrt" if job.cache else None)
        if any(graph.trimmed for graph in job.graphs):
            job.note("engines are built of the graphs with the whole vocabulary only")
        for graph in _whole_texts(job):
            assert graph.file is not None
            entry = _entry(graph, target, graph.id.replace(ONNX, target.format, 1))
            file = f"{ENGINES_FOLDER}/{Path(graph.file).stem}.{target.device}{ENGINE_SUFFIX}"
            try:
                built = build_engine(job.bundle / graph.file, job.bundle / file, request, job.progress)
            except EdgeformerError as error:
                yield entry.model_copy(update={"reason": str(error)})
                continue
            status = {"status": "rejected" if built.reason else "built", "reason": built.reason}
            versions = {"engine": built.engine, "built_for": built.built_for, "built_with": _versions(*_GRAPH_MAKERS)}
            engine = entry.model_copy(update={**_of_file(job.bundle, file), **status, **versions})
            larger = size_note(engine.id, built.engine, engine.size_bytes or 0)
            if larger is not None:
                job.note(larger)
            yield engine


class TorchTensorRTBuilder(Builder):
    """``--trt --trt-via torch-tensorrt``: an engine of the full model, compiled from torch."""

    name = "torch-tensorrt"
    formats = ("torch-tensorrt",)
    needs_device = True
    flag = "--trt --trt-via torch-tensorrt"

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        """See :func:`plan_torch_tensorrt`."""
        assert device is not None  # needs_device
        return plan_torch_tensorrt(device)

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        """See :meth:`Builder.build`."""
        from edgeformer.backends.tensorrt.torch_tensorrt import compile_engine

        graph = next((graph for graph in _whole_texts(job) if graph.role == "full"), None)
        if graph is None:
            return
        entry = _entry(graph, target, f"{target.format}-{job.precision}")
        suffix = "" if job.precision == "fp32" else f"_{job.precision}"
        # Not the name of TensorRT's own engine of the same graph, which may lie beside it.
        file = f"{ENGINES_FOLDER}/model{suffix}.{target.device}.torch{ENGINE_SUFFIX}"
        shapes = text_shapes(job.max_length, job.max_positions)
        job.progress.start("Compiling with torch-tensorrt", None)
        try:
            request = EngineRequest(target, job.precision, shapes)
            built_for = compile_engine(job.module(), tuple(graph.inputs), job.bundle / file, request)
        except EdgeformerError as error:
            yield entry.model_copy(update={"reason": str(error)})
            return
        finally:
            job.progress.finish()
        versions = {"built_for": built_for, "built_with": _versions("torch", "torch-tensorrt")}
        yield entry.model_copy(update={**_of_file(job.bundle, file), "status": "built", **versions})


_GRAPH_MAKERS = ("torch", "onnx", "onnxscript")


def _whole_texts(job: BuildJob) -> list[ArtifactManifest]:
    """The graphs that engines are built of: whole vocabulary, no caches, in the precision that was asked for."""
    graphs = [graph for graph in job.graphs if graph.role in ("full", "exit") and not graph.trimmed]
    return [graph for graph in graphs if graph.precision == job.precision]


def _entry(graph: ArtifactManifest, target: Target, id_: str) -> ArtifactManifest:
    """An engine of ``graph`` before anything was built: rejected, without a file."""
    kind, tolerance = TOLERANCES[graph.precision]
    unknown = f"this machine cannot run an engine for {target.device}; on the device, run: edgeformer verify"
    return ArtifactManifest(
        id=id_,
        file=None,
        role=graph.role,
        exit=graph.exit,
        format=target.format,
        precision=graph.precision,
        status="rejected",
        inputs=graph.inputs,
        outputs=graph.outputs,
        parity=Parity(status="unavailable", tolerance=tolerance, tolerance_kind=kind, reason=unknown),
    )


def _of_file(bundle: Path, file: str) -> dict[str, object]:
    """What an entry says of the file that was written."""
    return {"file": file, "size_bytes": (bundle / file).stat().st_size, "sha256": sha256_of(bundle / file)}


def _versions(*distributions: str) -> dict[str, str]:
    """Versions of those of ``distributions`` that are installed."""
    found = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in found.items() if version is not None}
