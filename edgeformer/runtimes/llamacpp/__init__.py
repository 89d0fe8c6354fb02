"""llama.cpp: writes language models as GGUF files and runs them on the processor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from edgeformer.runtimes.decoder import Decoder
from edgeformer.runtimes.llamacpp.builder import FORMAT, GGUFBuilder
from edgeformer.runtimes.llamacpp.library import EXTRA, XLLAMACPP
from edgeformer.runtimes.llamacpp.session import PROVIDER, LlamaEngine, LlamaSession
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, OptionalPackage, OptionalRuntime, ProviderFacts
from edgeformer.runtimes.session import Session


class LlamaCppRuntime(OptionalRuntime):
    name = "llamacpp"
    formats = (FORMAT,)
    builders = (GGUFBuilder(),)
    distributions = ("xllamacpp", "gguf")
    packages = (XLLAMACPP, OptionalPackage("gguf", EXTRA, "GGUF files, by export --gguf", ("gguf",)))
    facts: ClassVar = {PROVIDER: ProviderFacts(PROVIDER, "cpu", counts_threads=True)}

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        # Files in fewer bits round activations anyway, and are judged with the settings that users run.
        exact = options.exact and files.artifact.precision == "fp32"
        return LlamaSession(files.file, options.threads, files.max_positions, exact=exact)

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        assert files.loops is not None
        return Decoder(LlamaEngine(LlamaSession(files.file, options.threads, files.max_positions), files.loops))


RUNTIME = LlamaCppRuntime()
