"""ExecuTorch: writes whole-text models as .pte programs for XNNPACK's kernels, and runs them on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.executorch.builder import ExecuTorchBuilder
from edgeformer.runtimes.executorch.session import EXTRA, FORMAT, LIBRARY, missing
from edgeformer.runtimes.runtime import ArtifactFiles, OpenOptions, ProviderFacts, Runtime
from edgeformer.system.capability import Capability, ask_installed, describe_extra, describe_package

if TYPE_CHECKING:
    from edgeformer.runtimes.session import Graph

_SCRIPT = f"""
import importlib, importlib.metadata, torch
names = importlib.import_module({LIBRARY!r})._get_registered_backend_names()
say(version=importlib.metadata.version("executorch"), devices=[name for name in names if "Xnnpack" in name])
"""


class ExecuTorchRuntime(Runtime):
    name = "executorch"
    formats = (FORMAT,)
    builders = (ExecuTorchBuilder(),)
    distributions = ("executorch",)
    facts: ClassVar = {FORMAT: ProviderFacts("ExecuTorch", "cpu", counts_threads=True)}
    session_modules = ("torch", LIBRARY, "edgeformer.runtimes.executorch.session")

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return super().cannot_run(artifact) or missing()

    def open_graph(self, path: Path, files: ArtifactFiles, options: OpenOptions) -> Graph:
        from edgeformer.runtimes.executorch.session import ExecuTorchSession

        return ExecuTorchSession(path, files.artifact, options.threads, files.max_positions)

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        answer = ask_installed({"executorch": _SCRIPT}, timeout_s)["executorch"]
        remedy = f"programs for phones, by export --executorch: {install_hint(EXTRA)}"
        return [describe_package("executorch", answer, remedy), describe_extra(EXTRA)]


RUNTIME = ExecuTorchRuntime()
