"""Source of an export: a trained run, or the foreign graph of a bundle that ``import onnx`` made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.progress import Progress
from edgeformer.export.judging import Judge
from edgeformer.export.previous import PreviousBundle
from edgeformer.export.variants import ExportOptions
from edgeformer.runtimes import BuildJob


@dataclass(kw_only=True)
class ExportSource(ABC):
    """What is exported. An export calls the methods in this order, with the folder of the new bundle.

    Attributes:
        folder: the bundle's.
        notes: lines for the bundle's notes, which grow during the export.
        target: device profile that the source names.
        base: entries of graphs that are in the bundle before the export.
        names: files that stay, whatever the artifacts are.
        made_from: file of the run → sha256; None: everything is made of the only ``base``.
        exits: all loops after which the model answers.
        calibration_problem: why there are no training rows, which some builders need; None: there are.
        rounds: artifacts are also scored under providers that compute in fewer bits.
    """

    options: ExportOptions
    progress: Progress
    folder: Path
    notes: list[str] = field(default_factory=list)
    target: str | None = None
    base: tuple[ArtifactManifest, ...] = ()
    names: set[str] = field(default_factory=set)
    made_from: Mapping[str, str] | None = None
    exits: Collection[int] = ()
    calibration_problem: str | None = "an imported graph has no training rows"
    rounds: bool = False

    @abstractmethod
    def begin(self, new: Path) -> None:
        """Write or link everything beside the graphs. Raises ArtifactError."""

    @abstractmethod
    def make_graphs(self, folder: Path, previous: PreviousBundle) -> Iterator[ArtifactManifest]:
        """Write and judge the graphs of every requested precision."""

    @abstractmethod
    def build_job(self, folder: Path, graphs: tuple[ArtifactManifest, ...]) -> BuildJob:
        """Return what builders get."""

    @abstractmethod
    def judge(self, folder: Path, entry: ArtifactManifest) -> Judge:
        """Return the judge of artifacts of an entry's precision."""

    @abstractmethod
    def manifest(self, folder: Path, artifacts: Sequence[ArtifactManifest], previous: PreviousBundle) -> BundleManifest:
        """Complete the folder with what stays, and return its bundle.json."""
