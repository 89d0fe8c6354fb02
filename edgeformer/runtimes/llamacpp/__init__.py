"""llama.cpp: writes language models as GGUF files and runs them on the processor, whole texts or token by token."""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self

from edgeformer.artifacts.errors import InputError
from edgeformer.runtimes.decoder import Decoder, LoopEngine
from edgeformer.runtimes.llamacpp.builder import FORMAT, GGUFBuilder
from edgeformer.runtimes.llamacpp.library import EXTRA, PROVIDER, XLLAMACPP, Llama
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, OptionalPackage, OptionalRuntime, ProviderFacts
from edgeformer.runtimes.session import Array, Session


class LlamaEngine(LoopEngine[Array]):
    """Loop engine on a GGUF file, in which every token runs through all loops; one text at a time.

    A state is the ids before the call [1, n], and the newest logits after it [1, V].
    """

    def __init__(self, llama: Llama, loops: int) -> None:
        self.session = self._llama = llama
        self.provider, self.max_positions, self.stops = PROVIDER, llama.max_positions, (loops,)
        llama.truncate(0)

    def fresh(self) -> Self:
        return type(self)(self._llama, *self.stops)

    def embed(self, ids: Array, start: int, *, keep: bool) -> Array:
        if len(ids) > 1:
            raise InputError(f"llama.cpp writes one text at a time here, not {len(ids)}; use a batch of 1")
        return ids

    def advance(self, stretch: int, states: Sequence[Array], *, keep: bool) -> Array:
        length = self._llama.length
        logits = self._llama.read(np.concatenate(states, axis=1)[0].tolist())
        if not keep:
            self._llama.truncate(length)
        return logits

    def readout(self, state: Array, loop: int) -> Array:
        return state


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
        return Llama(files.file, options.threads, files.max_positions, exact=exact)

    def open_decoder(self, files: ArtifactFiles, exits: Collection[int] | None, options: OpenOptions) -> Decoder[Any]:
        assert files.loops is not None
        return Decoder(LlamaEngine(Llama(files.file, options.threads, files.max_positions), files.loops))


RUNTIME = LlamaCppRuntime()
