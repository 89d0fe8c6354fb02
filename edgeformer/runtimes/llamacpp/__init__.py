"""llama.cpp: writes language models as GGUF files and runs them on the processor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.llamacpp.builder import FORMAT, GGUFBuilder
from edgeformer.runtimes.llamacpp.library import EXTRA, missing
from edgeformer.runtimes.llamacpp.session import PROVIDER, LlamaEngine, LlamaSession
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, ProviderFacts, Runtime
from edgeformer.runtimes.session import Session
from edgeformer.system.capability import Capability, ask_installed, describe_extra, describe_package

_SCRIPTS = {
    "xllamacpp": 'import importlib.metadata\nsay(version=importlib.metadata.version("xllamacpp"))\n',
    "gguf": 'import importlib.metadata\nsay(version=importlib.metadata.version("gguf"))\n',
}


class LlamaCppRuntime(Runtime):
    name = "llamacpp"
    formats = (FORMAT,)
    builders = (GGUFBuilder(),)
    distributions = ("xllamacpp", "gguf")
    facts: ClassVar = {PROVIDER: ProviderFacts(PROVIDER, "cpu", counts_threads=True)}

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return super().cannot_run(artifact) or missing()

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        return LlamaSession(Path(files.file), options.threads, files.max_positions)

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        assert files.loops is not None
        return Decoder(LlamaEngine(LlamaSession(Path(files.file), options.threads, files.max_positions), files.loops))

    def provider(self, artifact: ArtifactManifest, requested: str | None = None, kind: str | None = None) -> str:
        return PROVIDER

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answers = ask_installed(_SCRIPTS, timeout_s)
        hint = install_hint(EXTRA)
        return [
            describe_package("xllamacpp", answers["xllamacpp"], f"llama.cpp, which runs GGUF files: {hint}"),
            describe_package("gguf", answers["gguf"], f"GGUF files, by export --gguf: {hint}"),
            describe_extra(EXTRA),
        ]


RUNTIME = LlamaCppRuntime()
