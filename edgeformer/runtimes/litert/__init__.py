"""LiteRT: converts text encoders to .tflite files and runs them on the processor with XNNPACK."""

from pathlib import Path
from typing import ClassVar

from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.litert.builder import FORMAT, PACKAGES, LiteRTBuilder
from edgeformer.runtimes.litert.session import EXTRA, LITERT, PROVIDER, LiteRTSession, load_library
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, OptionalPackage, OptionalRuntime, ProviderFacts
from edgeformer.runtimes.session import Graph


class LiteRTRuntime(OptionalRuntime):
    name = "litert"
    formats = (FORMAT,)
    builders = (LiteRTBuilder(),)
    distributions = PACKAGES
    packages = (
        LITERT,
        # It is not imported: that imports torch and JAX.
        OptionalPackage("litert-torch", EXTRA, ".tflite files, by export --litert", ("litert_torch",)),
    )
    facts: ClassVar = {PROVIDER: ProviderFacts("LiteRT", "cpu", counts_threads=True)}

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        return LiteRTSession(path, options.threads, files.max_positions, files.artifact.size_bytes)

    def load(self, artifact: ArtifactManifest) -> None:
        load_library()


RUNTIME = LiteRTRuntime()
