"""TensorRT, TensorRT for RTX, and torch-tensorrt: build engines for NVIDIA GPUs and run them without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, ProviderFacts, Runtime
from edgeformer.runtimes.tensorrt.builders import TensorRTBuilder, TorchTensorRTBuilder
from edgeformer.runtimes.tensorrt.state import (
    RUNTIMES,
    SCRIPTS,
    Package,
    describe,
    jetson_capability,
    judge,
    require_runnable,
    why_engine_cannot_run,
)
from edgeformer.system import cuda_driver
from edgeformer.system.capability import Capability, ask_installed

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.manifest import ArtifactManifest
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Graph, Session

_PACKAGES: tuple[Package, ...] = ("tensorrt-rtx", "tensorrt", "torch-tensorrt")


class TensorRTRuntime(Runtime):
    name = "tensorrt"
    formats = tuple(RUNTIMES)
    distributions = _PACKAGES
    # torch-tensorrt's engine first, so that profile can compare it with TensorRT's.
    builders = (TorchTensorRTBuilder(), TensorRTBuilder())

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return why_engine_cannot_run(artifact)

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        """Engines run on the GPU that they were built for and ignore ``threads``. See :meth:`Runtime.open`."""
        if files.artifact.role in ("full", "exit") and not options.exits and options.early is None:
            require_runnable(files.file, files.artifact)
            from edgeformer.runtimes.tensorrt.session import TensorRTSession

            return TensorRTSession(
                files.file,
                RUNTIMES[files.artifact.format],
                files.artifact,
                repeated_shapes=options.repeated_shapes,
            )
        from edgeformer.runtimes.onnxruntime.roles import open_role

        return open_role(files, options, _opener(files, options))

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        """Keys and values stay on the GPU. See :meth:`Runtime.open_decoder`."""
        from edgeformer.runtimes.onnxruntime.roles import open_role_decoder

        return open_role_decoder(files, exits, _opener(files, options))

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        """A session's provider is its artifact's format."""
        return ProviderFacts(provider, "cuda") if provider in self.formats else None

    def load(self, artifact: ArtifactManifest) -> None:
        """Import the modules that run engines; TensorRT is imported with the first engine."""
        import edgeformer.runtimes.onnxruntime.decode
        import edgeformer.runtimes.tensorrt.session  # noqa: F401

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answers = ask_installed(SCRIPTS, timeout_s)
        driver, gpus = cuda_driver.problem(), cuda_driver.devices()
        return [
            *jetson_capability(),
            *(describe(judge(name, answers[name.replace("-", "_")], driver, gpus)) for name in _PACKAGES),
        ]

    def never_runs(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        """Engines run only on NVIDIA GPUs of the compute capability that they were built for."""
        if device.kind != "cuda":
            return f"{artifact.format} engines run on NVIDIA GPUs only"
        built_for = (artifact.built_for or {}).get("compute_capability")
        capability = device.compute_capability.value if device.compute_capability is not None else None
        if built_for is not None and capability is not None and built_for != capability:
            return f"the engine was built for compute capability {built_for}; {device.name!r} has {capability}"
        return None

    def estimable(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        """Estimates are based on the ONNX graph of the same precision; INT8 engines use a different graph."""
        if artifact.precision == "int8":
            return "INT8 engines are quantised in another way than the INT8 graphs that estimates are made from"
        return self.never_runs(artifact, device)

    def fuses(self, artifact: ArtifactManifest) -> bool:
        return True


def _opener(files: ArtifactFiles, options: OpenOptions) -> Callable[[Path], Graph]:
    def open_part(path: Path) -> Graph:
        require_runnable(path, files.artifact)
        from edgeformer.runtimes.tensorrt.session import TensorRTGraph

        return TensorRTGraph(
            path,
            RUNTIMES[files.artifact.format],
            files.artifact,
            files.max_positions,
            repeated_shapes=options.repeated_shapes,
        )

    return open_part


RUNTIME = TensorRTRuntime()
