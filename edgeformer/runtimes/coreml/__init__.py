"""Core ML: converts whole-text models on any system, and runs them on Apple devices."""

import sys
from pathlib import Path
from typing import ClassVar

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.coreml.builder import CoreMLBuilder
from edgeformer.runtimes.coreml.session import COREMLTOOLS, FORMAT, NOT_APPLE, CoreMLSession
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, OptionalRuntime, ProviderFacts, Runtime
from edgeformer.runtimes.session import Graph


class CoreMLRuntime(OptionalRuntime):
    name = "coreml"
    formats = (FORMAT,)
    builders = (CoreMLBuilder(),)
    distributions = ("coremltools",)
    packages = (COREMLTOOLS,)
    facts: ClassVar = {FORMAT: ProviderFacts("Core ML")}
    experimental = True
    session_modules = ("coremltools", "edgeformer.runtimes.coreml.session")

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        if sys.platform == "darwin":
            return super().cannot_run(artifact)
        return Runtime.cannot_run(self, artifact) or NOT_APPLE  # installing the package would not help

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        return CoreMLSession(path, files.artifact, files.max_positions)

    def never_runs(self, artifact: ArtifactManifest, device: DeviceProfile) -> str | None:
        return NOT_APPLE if device.kind == "cuda" else None


RUNTIME = CoreMLRuntime()
