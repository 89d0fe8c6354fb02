"""Source of an export: a trained run, or the foreign graph of a bundle that ``import onnx`` made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.export.judging import Judge
from edgeformer.export.previous import PreviousBundle
from edgeformer.runtimes import BuildJob


class ExportSource(Protocol):
    """Interface of what is exported. An export calls the methods in this order, with the folder of the new bundle."""

    folder: Path
    notes: list[str]
    """Lines for the bundle's notes, which grow during the export."""

    @property
    def target(self) -> str | None:
        """Device profile that the source names; None: none."""

    @property
    def base(self) -> tuple[ArtifactManifest, ...]:
        """Entries of graphs that are in the bundle before the export."""

    @property
    def names(self) -> Collection[str]:
        """Files that stay, whatever the artifacts are."""

    @property
    def made_from(self) -> Mapping[str, str] | None:
        """File of the run → sha256; None: everything is made of the only ``base``."""

    @property
    def exits(self) -> Collection[int]:
        """All loops after which the model answers."""

    @property
    def can_calibrate(self) -> bool:
        """Whether there are training rows, so that builders may join that need them."""

    @property
    def rounds(self) -> bool:
        """Whether artifacts are also scored under providers that compute in fewer bits."""

    def begin(self, new: Path) -> None:
        """Write or link everything beside the graphs. Raises ArtifactError."""

    def make_graphs(self, folder: Path, previous: PreviousBundle) -> Iterator[ArtifactManifest]:
        """Write and judge the graphs of every requested precision."""

    def build_job(self, folder: Path, graphs: tuple[ArtifactManifest, ...]) -> BuildJob:
        """Return what builders get."""

    def judge(self, folder: Path, entry: ArtifactManifest) -> Judge:
        """Return the judge of artifacts of an entry's precision."""

    def manifest(self, folder: Path, artifacts: Sequence[ArtifactManifest], previous: PreviousBundle) -> BundleManifest:
        """Complete the folder with what stays, and return its bundle.json."""
