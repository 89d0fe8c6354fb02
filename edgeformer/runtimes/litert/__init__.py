"""LiteRT: converts text encoders to .tflite files and runs them on the processor with XNNPACK."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.litert.builder import FORMAT, PACKAGES, LiteRTBuilder
from edgeformer.runtimes.litert.session import EXTRA, PROVIDER, LiteRTSession, load_library, missing
from edgeformer.runtimes.runtime import ArtifactFiles, Kind, OpenOptions, ProviderFacts, Runtime
from edgeformer.system.capability import Capability, ask_installed, describe_extra, describe_package

if TYPE_CHECKING:
    from edgeformer.runtimes.session import Graph

_SCRIPTS = {
    "ai_edge_litert": """
import importlib.metadata
from ai_edge_litert.compiled_model import CompiledModel
say(version=importlib.metadata.version("ai-edge-litert"))
""",
    # Importing the converter imports torch and JAX.
    "litert_torch": 'import importlib.metadata\nsay(version=importlib.metadata.version("litert-torch"))\n',
}


class LiteRTRuntime(Runtime):
    name = "litert"
    formats = (FORMAT,)
    builders = (LiteRTBuilder(),)
    distributions = PACKAGES
    facts: ClassVar = {PROVIDER: ProviderFacts("LiteRT", "cpu", counts_threads=True)}

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return super().cannot_run(artifact) or missing()

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        return LiteRTSession(path, options.threads, files.max_positions, files.artifact.size_bytes)

    def provider(self, artifact: ArtifactManifest, requested: str | None = None, kind: Kind | None = None) -> str:
        return PROVIDER

    def load(self, artifact: ArtifactManifest) -> None:
        load_library()

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answers = ask_installed(_SCRIPTS, timeout_s)
        hint = install_hint(EXTRA)
        return [
            describe_package("ai-edge-litert", answers["ai_edge_litert"], f"LiteRT, which runs .tflite files: {hint}"),
            describe_package("litert-torch", answers["litert_torch"], f".tflite files, by export --litert: {hint}"),
            describe_extra(EXTRA),
        ]


RUNTIME = LiteRTRuntime()
