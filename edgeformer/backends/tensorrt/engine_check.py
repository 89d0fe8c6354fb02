"""Opening engines: whether one can run here is told from its manifest, before TensorRT touches the file.

An engine is bound to the TensorRT version that built it and to the GPU's compute capability (built by ``tensorrt``:
to the GPU model); elsewhere TensorRT fails with texts that name neither side, or ends the process.
"""

from __future__ import annotations

from pathlib import Path

from edgeformer.backends.session import Session
from edgeformer.backends.tensorrt.state import REMEDIES, Builder, TensorRTState, tensorrt_state
from edgeformer.formats.errors import ArtifactError, MissingDependencyError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.machine.cuda_driver import Device

ENGINES: dict[str, Builder] = {
    "tensorrt-rtx": "tensorrt-rtx",
    "tensorrt": "tensorrt",
    "torch-tensorrt": "torch-tensorrt",
}
"""Artifact formats that are engines → what runs them."""

_REBUILD = "export the run again for this device, or use an ONNX artifact of the bundle"


def open_engine(path: Path, artifact: ArtifactManifest) -> Session:
    """Open an engine whose file was compared with the manifest.

    Raises:
        MissingDependencyError: package, libraries, driver or GPU are missing; the message says which.
        ArtifactError: the engine was built for another GPU or by another version, or TensorRT refuses it.
    """
    runtime = ENGINES[artifact.format]
    refusal = why_engine_cannot_run(artifact)
    if refusal is not None:
        kind = ArtifactError if tensorrt_state(runtime).can_run() else MissingDependencyError
        raise kind(f"{path}: {refusal}")
    if runtime == "torch-tensorrt":
        from edgeformer.backends.torch.session import open_torch_tensorrt

        return open_torch_tensorrt(path, tuple(artifact.inputs))
    from edgeformer.backends.tensorrt.session import TensorRTSession

    return TensorRTSession(path, runtime)


def why_engine_cannot_run(artifact: ArtifactManifest, here: TensorRTState | None = None) -> str | None:
    """None when this machine can run the engine.

    Args:
        artifact: an engine of a bundle; ``built_for`` says what it needs.
        here: what works here; None: ask.
    """
    runtime = ENGINES[artifact.format]
    here = here or tensorrt_state(runtime)
    wanted = artifact.built_for or {}
    needs = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in wanted.items()) or "an unknown GPU"
    if not here.can_run():
        remedy = f" ({REMEDIES[runtime]})" if not here.installed() else ""
        return (
            f"this {artifact.format} engine was built for {needs} and cannot run here: {here.missing()}{remedy}; "
            "use an ONNX artifact of the bundle, or copy the bundle to its target"
        )
    version = wanted.get(runtime)
    if version is not None and version != here.version:
        return (
            f"this engine was built by {runtime} {version}, and {runtime} {here.version} is installed here; "
            f"engines run only with the version that built them: install {runtime}=={version}, or {_REBUILD}"
        )
    return _wrong_gpu(artifact, wanted, here.gpus[0])


def _wrong_gpu(artifact: ArtifactManifest, wanted: dict[str, str], gpu: Device) -> str | None:
    """The first GPU is the one that an engine is opened on."""
    capability, name = wanted.get("compute_capability"), wanted.get("gpu")
    if capability is not None and capability != gpu.compute_capability:
        return (
            f"this engine was built for {_named(name)}compute capability {capability}, but this GPU is "
            f"{gpu.name} with {gpu.compute_capability}; {_REBUILD}"
        )
    if name is not None and name != gpu.name:
        return f"this {artifact.format} engine was built for the GPU {name}, but this one is {gpu.name}; {_REBUILD}"
    return None


def _named(gpu: str | None) -> str:
    return f"{gpu} with " if gpu else ""
