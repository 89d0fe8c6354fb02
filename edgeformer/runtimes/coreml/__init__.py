"""Core ML: converts whole-text models on any system, and runs them on Apple devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.coreml.builder import CoreMLBuilder
from edgeformer.runtimes.coreml.session import EXTRA, FORMAT, NOT_APPLE, cannot_run_here
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, ProviderFacts, Runtime
from edgeformer.system.capability import Capability, ask_installed, describe_extra, describe_package

if TYPE_CHECKING:
    from edgeformer.artifacts.device import DeviceProfile
    from edgeformer.runtimes.session import Graph

# Its import takes 10 s and writes to stderr, and says nothing that its version does not say.
_SCRIPT = """
import importlib.metadata, sys
devices = ["Core ML"] if sys.platform == "darwin" else ["converts only"]
say(version=importlib.metadata.version("coremltools"), devices=devices)
"""


class CoreMLRuntime(Runtime):
    name = "coreml"
    formats = (FORMAT,)
    builders = (CoreMLBuilder(),)
    distributions = ("coremltools",)
    facts: ClassVar = {FORMAT: ProviderFacts("Core ML")}
    session_modules = ("coremltools", "edgeformer.runtimes.coreml.session")

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return super().cannot_run(artifact) or cannot_run_here()

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        from edgeformer.runtimes.coreml.session import CoreMLSession

        return CoreMLSession(path, files.artifact, files.max_positions)

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answer = ask_installed({"coremltools": _SCRIPT}, timeout_s)["coremltools"]
        remedy = f"models for Apple devices, by export --coreml: {install_hint(EXTRA)}"
        return [describe_package("coremltools", answer, remedy), describe_extra(EXTRA)]

    def never_runs(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        return NOT_APPLE if device.kind == "cuda" else None


RUNTIME = CoreMLRuntime()
