"""ExecuTorch: writes whole-text models as .pte programs for XNNPACK's kernels, and runs them on the processor."""

from pathlib import Path
from typing import ClassVar

from edgeformer.runtimes.executorch.builder import ExecuTorchBuilder
from edgeformer.runtimes.executorch.session import EXECUTORCH, FORMAT, LIBRARY, ExecuTorchSession
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, OptionalRuntime, ProviderFacts
from edgeformer.runtimes.session import Graph


class ExecuTorchRuntime(OptionalRuntime):
    name = "executorch"
    formats = (FORMAT,)
    builders = (ExecuTorchBuilder(),)
    distributions = ("executorch",)
    packages = (EXECUTORCH,)
    facts: ClassVar = {FORMAT: ProviderFacts("ExecuTorch", "cpu", counts_threads=True)}
    experimental = True
    session_modules = ("torch", LIBRARY, "edgeformer.runtimes.executorch.session")

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        return ExecuTorchSession(path, files.artifact, options.threads, files.max_positions)


RUNTIME = ExecuTorchRuntime()
