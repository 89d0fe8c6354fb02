"""A second runtime, complete: ONNX's reference evaluator. Slow, and as different from ONNX Runtime as a runtime can be.

This folder is what a package brings that adds a runtime to edgeformer: a module with a ``RUNTIME``, and its entry point
(in the ``dist-info`` folder beside it). Put the folder that holds both on the path to install it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import InputError, MissingDependencyError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import ArtifactManifest, Parity
from edgeformer.runtimes.runtime import (
    ENGINES_FOLDER,
    ArtifactFiles,
    Builder,
    BuildJob,
    OpenOptions,
    ProviderFacts,
    Runtime,
    Target,
    Unavailable,
)
from edgeformer.runtimes.session import Session
from edgeformer.system.capability import Capability, ask_installed, describe_package, installed_version
from edgeformer.tasks.metric import TOLERANCES

FORMAT = "onnx-reference"
_REMEDY = "pip install onnx"
_NOT_YET = "not compared while it was exported; run: edgeformer verify"
_SCRIPTS = {"onnx": "import onnx, onnx.reference\nsay(version=onnx.__version__)\n"}


class ReferenceBuilder(Builder):
    """The FP32 graphs for whole texts, weights inside."""

    name = "reference"
    formats = (FORMAT,)

    def plan(self, device: DeviceProfile | None) -> Target | Unavailable:
        """It is built for no device in particular."""
        return Target(FORMAT) if installed_version("onnx") else Unavailable(FORMAT, f"onnx is missing: {_REMEDY}")

    def build(self, target: Target, job: BuildJob) -> Iterator[ArtifactManifest]:
        import onnx

        kind, tolerance = TOLERANCES["fp32"]
        graphs = [graph for graph in job.graphs if graph.role in ("full", "exit") and not graph.trimmed]
        for graph in (graph for graph in graphs if graph.precision == "fp32"):
            assert graph.file is not None
            file = f"{ENGINES_FOLDER}/{Path(graph.file).stem}.reference.onnx"
            onnx.save(onnx.load(str(job.bundle / graph.file)), str(job.bundle / file))
            yield ArtifactManifest(
                id=graph.id.replace("onnx", FORMAT, 1), file=file, role=graph.role, exit=graph.exit, format=FORMAT,
                precision="fp32", status="built", size_bytes=(job.bundle / file).stat().st_size,
                sha256=sha256_of(job.bundle / file), inputs=graph.inputs, outputs=graph.outputs,
                parity=Parity(status="unavailable", tolerance=tolerance, tolerance_kind=kind, reason=_NOT_YET),
            )  # fmt: skip


class ReferenceRuntime(Runtime):
    """See this module."""

    name = "reference"
    formats = (FORMAT,)
    distributions = ("onnx",)
    builders = (ReferenceBuilder(),)

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        return None if installed_version("onnx") else f"package: not installed ({_REMEDY})"

    def open(self, files: ArtifactFiles, options: OpenOptions) -> Session:
        refusal = self.cannot_run(files.artifact)
        if refusal is not None:
            raise MissingDependencyError(f"{files.file}: {refusal}")
        if options.provider not in (None, FORMAT):
            raise InputError(f"provider {options.provider!r} is not available: the reference evaluator has no choice")
        if options.early is not None:
            raise InputError(f"artifact {files.artifact.id!r} always runs all loops")
        from edgeformer_reference.session import ReferenceSession

        return ReferenceSession(files.file, files.max_positions)

    def provider_facts(self, provider: str) -> ProviderFacts | None:
        """numpy computes, on the CPU, in threads of its own."""
        return ProviderFacts("reference", "cpu") if provider == FORMAT else None

    def load(self, artifact: ArtifactManifest) -> None:
        """Import the evaluator."""
        import edgeformer_reference.session  # noqa: F401

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        """Whether the onnx package works."""
        return [describe_package("onnx", ask_installed(_SCRIPTS, timeout_s)["onnx"], _REMEDY)]


RUNTIME = ReferenceRuntime()
