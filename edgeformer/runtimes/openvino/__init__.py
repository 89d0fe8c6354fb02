"""OpenVINO: runs a bundle's ONNX graphs on the processor in FP32 or bfloat16, and INT8 graphs quantised by NNCF."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeformer.artifacts.errors import InputError, MissingDependencyError, install_hint
from edgeformer.artifacts.manifest import ONNX
from edgeformer.runtimes.openvino.quantize import FORMAT, Int8Builder
from edgeformer.runtimes.openvino.session import CPU, CPU_BF16, EXTRA, HINTS, missing
from edgeformer.runtimes.runtime import ArtifactFiles, Kind, OpenOptions, ProviderFacts, Runtime
from edgeformer.system.capability import Capability, ask_installed, describe_extra, describe_package

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.artifacts.manifest import ArtifactManifest
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.openvino.session import OpenVINOSession
    from edgeformer.runtimes.session import Session

# As session.without_telemetry, for child processes.
_SILENT = "import sys\nsys.modules['openvino_telemetry'] = None\n"
_SCRIPTS = {
    "openvino": f"""{_SILENT}
import openvino
core = openvino.Core()
bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
more = ["CPU in bfloat16"] if bf16 else []
say(version=openvino.__version__.partition("-")[0], devices=core.available_devices + more)
""",
    "nncf": f"""{_SILENT}
import importlib.metadata
say(version=importlib.metadata.version("nncf"))
""",
}
_FACTS = {
    CPU: ProviderFacts("OpenVINO", "cpu", counts_threads=True),
    CPU_BF16: ProviderFacts("OpenVINO bf16", "cpu", counts_threads=True, rounds_to="bf16"),
}


class OpenVINORuntime(Runtime):
    name = "openvino"
    formats = (FORMAT,)
    builders = (Int8Builder(),)
    reads = (ONNX,)
    distributions = ("openvino", "nncf")

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return super().cannot_run(artifact) or missing()

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        from edgeformer.runtimes.onnxruntime.roles import open_role

        _require(files)
        return open_role(files, options, _opener(files, options))

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        from edgeformer.runtimes.onnxruntime.roles import open_role_decoder

        _require(files)
        return open_role_decoder(files, exits, _opener(files, options))

    def providers(self) -> tuple[str, ...]:
        """Return both providers if the package is installed; opening checks whether the processor has bfloat16."""
        return () if missing() else tuple(HINTS)

    def offers(self, artifact: ArtifactManifest) -> tuple[str, ...]:
        """FP32 graphs, and OpenVINO's INT8 graphs with their FP32 nodes, are also offered in bfloat16.

        4-bit tables are not supported. Export's INT8 graphs are slow in OpenVINO, so they are offered in FP32 only.
        """
        if artifact.precision == "int4":
            return ()
        return tuple(HINTS) if artifact.precision == "fp32" or artifact.format == FORMAT else (CPU,)

    def provider(self, artifact: ArtifactManifest, requested: str | None = None, kind: Kind | None = None) -> str:
        return requested if requested in HINTS else CPU

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        return _FACTS.get(provider)

    def load(self, artifact: ArtifactManifest) -> None:
        import edgeformer.runtimes.openvino.session  # noqa: F401
        from edgeformer.runtimes.openvino.session import core

        core()  # imports the package; its CPU plugin is loaded with the first graph

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answers = ask_installed(_SCRIPTS, timeout_s)
        hint = install_hint(EXTRA)
        return [
            describe_package("openvino", answers["openvino"], f"another runtime for processors: {hint}"),
            describe_package("nncf", answers["nncf"], f"INT8 for OpenVINO, by export --int8: {hint}"),
            describe_extra(EXTRA),
        ]

    def estimable(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        return "what OpenVINO fuses is not known without running it; profile on the device itself"


def _require(files: ArtifactFiles) -> None:
    problem = missing()
    if problem is not None:
        raise MissingDependencyError(f"{files.file}: {problem}")


def _opener(files: ArtifactFiles, options: OpenOptions) -> Callable[[Path], OpenVINOSession]:
    def open_part(path: Path) -> OpenVINOSession:
        from edgeformer.runtimes.openvino.session import OpenVINOSession

        if options.provider not in (None, *HINTS):
            raise InputError(f"provider {options.provider!r} is none of OpenVINO's; there are: {', '.join(HINTS)}")
        return OpenVINOSession(path, options.provider or CPU, options.threads, files.max_positions)

    return open_part


RUNTIME = OpenVINORuntime()
