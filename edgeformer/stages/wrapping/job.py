"""One wrapping: a foreign graph, copied into a new bundle's folder, and run there for its golden answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeformer.backends import ArtifactFiles, OpenOptions, backend_of, default_provider, library_versions
from edgeformer.backends.session import Session
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.manifest import ONNX, ArtifactManifest, Sharing
from edgeformer.formats.progress import Progress
from edgeformer.formats.workspace import REMEDY
from edgeformer.stages.wrapping.drawing import Array
from edgeformer.stages.wrapping.foreign import ForeignGraph, copy_into, described
from edgeformer.stages.wrapping.options import WrapOptions
from edgeformer.tasks import Task

GRAPH = "onnx/model.onnx"
"""What the file is called in the bundle: there clients of Hugging Face repositories look for a graph."""
_LIBRARIES = ("onnxruntime", "numpy")


@dataclass(frozen=True)
class Wrapping:
    """A graph on its way into a bundle.

    Attributes:
        graph: as it was given.
        folder: of the new bundle.
        entry: its artifact, before anything was run.
    """

    graph: ForeignGraph
    folder: Path
    task: Task
    options: WrapOptions
    progress: Progress
    entry: ArtifactManifest

    def session(self) -> Session:
        """The graph on the CPU. Raises ArtifactError, said of the file that was given."""
        files = ArtifactFiles(self.entry, self.folder / GRAPH)
        try:
            return backend_of(self.entry).open(files, OpenOptions(default_provider("cpu")))
        except ArtifactError as error:
            text = str(error).replace(str(self.folder / GRAPH), str(self.graph.path))
            raise ArtifactError(text.removesuffix(f"; {REMEDY}")) from None

    def run(self, session: Session, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One call. Raises InputError where the graph refuses it."""
        try:
            return {name: np.asarray(array) for name, array in session.run(inputs).items()}
        except InputError as error:
            raise InputError(f"{self.graph.path}: {error}; other sizes or numbers may work: --shape, --range") from None


def begin(graph: ForeignGraph, folder: Path, task: Task, options: WrapOptions, progress: Progress) -> Wrapping:
    """Copy the graph into ``folder``, bit for bit, and describe it."""
    outline, weights, versions = graph.outline, copy_into(graph, folder, GRAPH), library_versions()
    entry = ArtifactManifest(
        id=f"{ONNX}-{graph.precision}",
        file=GRAPH,
        format=ONNX,
        precision=graph.precision,
        status="built",
        weights_file=next(iter(weights)) if len(weights) == 1 else None,
        size_bytes=(folder / GRAPH).stat().st_size + sum(path.stat().st_size for path in weights.values()),
        sha256=sha256_of(folder / GRAPH),
        inputs=described(outline.inputs),
        outputs=described(outline.outputs),
        opset=outline.opsets.get(""),
        sharing=Sharing(
            unique_parameters=outline.parameters,
            stored_parameters=outline.parameters,
            weight_bytes=outline.weight_bytes,
        ),
        built_with={name: versions[name] for name in _LIBRARIES if name in versions},
    )
    return Wrapping(graph, folder, task, options, progress, entry)
