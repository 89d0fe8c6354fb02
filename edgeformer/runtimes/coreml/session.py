"""Run a Core ML model, on Apple devices only. The first session imports coremltools, not this module.

Untested: it follows the documentation of coremltools 9, which runs models on macOS only.
"""

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes.runtime import OptionalPackage
from edgeformer.runtimes.session import Array, Graph, InputType, reason_of, require_file

EXTRA = FORMAT = "coreml"
NOT_APPLE = "Core ML runs on Apple devices only"
PACKAGE = "model.mlpackage"
"""Folder in the zip file."""
# Its import takes 10 s and writes to stderr, and says nothing that its version does not say.
COREMLTOOLS = OptionalPackage(
    "coremltools", EXTRA, "models for Apple devices, by export --coreml", ("coremltools",),
    """import importlib.metadata, sys
devices = ["Core ML"] if sys.platform == "darwin" else ["converts only"]
say(version=importlib.metadata.version("coremltools"), devices=devices)
""",
)  # fmt: skip


class CoreMLSession(Graph):
    """A zipped .mlpackage, whose inputs are int64 [batch, sequence] up to the sizes in its manifest entry.

    Core ML chooses between processor, GPU and Neural Engine itself.
    """

    provider = FORMAT

    def __init__(self, path: Path, artifact: ArtifactManifest, max_positions: int | None = None) -> None:
        require_file(path)
        if sys.platform != "darwin":
            raise ArtifactError(f"{path}: {NOT_APPLE}")
        with COREMLTOOLS.importing():
            import coremltools

        assert artifact.engine is not None  # as the builder writes it
        self.path, self.max_positions = path, max_positions
        self._outputs: tuple[str, ...] = tuple(artifact.outputs) or ("logits",)
        axes = {name: [range(1, size + 1) for size in sizes[-1]] for name, sizes in artifact.engine.shapes.items()}
        self.inputs = {name: InputType("int64", ranges) for name, ranges in axes.items()}
        self._folder: Path = Path(tempfile.mkdtemp(prefix="edgeformer-coreml-"))
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(self._folder)
            self._model: Any = coremltools.models.MLModel(str(self._folder / PACKAGE))
        except Exception as error:  # errors of zipfile and Core ML share no base class
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ArtifactError(f"{path}: cannot be opened by Core ML ({reason_of(error)}); {REMEDY}") from None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = self.prepare_feed(self._model, inputs, same_shape=True)
        try:
            results = self._model.predict({name: array.astype(np.int32) for name, array in feed.items()})
        except Exception as error:
            raise self.refusal(feed, reason_of(error)) from None
        return {name: np.asarray(results[name], np.float32) for name in self._outputs}

    def close(self) -> None:
        self._model = None
        shutil.rmtree(self._folder, ignore_errors=True)
