"""Run: a folder with a trained model; and what a RUN argument on the command line stands for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.bundle import read_bundle
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import RunManifest
from edgeformer.formats.workspace import BUNDLE_FILE, RUN_FILE, read_manifest
from edgeformer.tasks import all_tasks


@dataclass(frozen=True)
class Location:
    """What a RUN argument stands for; at least one of ``run`` and ``bundle`` is set."""

    run: Path | None
    bundle: Path | None
    artifact: str | None = None

    @property
    def name(self) -> str:
        """The folder's name, for messages."""
        folder = self.run or self.bundle
        assert folder is not None
        return folder.name

    def require_run(self) -> Path:
        """The run's folder. Raises ArtifactError for a bundle without its run."""
        if self.run is None:
            raise ArtifactError(f"{self.bundle}: is a bundle without its run; this command needs the run's folder")
        return self.run

    def require_bundle(self) -> Path:
        """The bundle's folder. Raises ArtifactError where nothing was exported yet."""
        if self.bundle is None:
            raise ArtifactError(f"{self.run}: has no bundle yet; make one with: edgeformer export {self.name}")
        return self.bundle


def run_folders(artifacts: Path) -> list[Path]:
    """Folders below ``artifacts`` that hold a run, oldest first."""
    found = [path.parent for path in artifacts.glob(f"*/{RUN_FILE}") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda folder: (_started(folder), folder.name))


def _started(folder: Path) -> str:
    try:
        document: Any = json.loads((folder / RUN_FILE).read_bytes())
        return str(document["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def read_run(folder: Path) -> RunManifest:
    """The manifest of the run in ``folder``. Raises ArtifactError."""
    all_tasks()  # a manifest's scores are recognised by the tasks that are loaded
    return read_manifest(RunManifest, folder / RUN_FILE)


def locate(argument: str | None, artifacts: Path) -> Location:
    """Resolve a RUN argument: a run name, a run folder, a bundle folder, an artifact file, or the newest finished run.

    Raises:
        ArtifactError: nothing there, or not an edgeformer run or bundle.
    """
    if argument is None:
        return _of_run(_newest_finished(artifacts))
    for candidate in (Path(argument), artifacts / argument):
        if not _exists(candidate):
            continue
        if (candidate / RUN_FILE).is_file():
            return _of_run(candidate)
        if (candidate / BUNDLE_FILE).is_file():
            return _of_bundle(candidate)
        if candidate.is_file():
            return _of_file(candidate)
        if candidate.is_dir() and candidate.name == "bundle":
            raise ArtifactError(f"{candidate}: has no {BUNDLE_FILE}; it is not a bundle, or a damaged one")
    names = ", ".join(folder.name for folder in run_folders(artifacts)[-8:]) or "none yet"
    raise ArtifactError(f"no run {argument!r}: not a run, bundle or artifact file; runs in {artifacts}: {names}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than a file name may be, or with a null character: no path at all
        return False


def _newest_finished(artifacts: Path) -> Path:
    folders = run_folders(artifacts)
    for folder in reversed(folders):
        try:
            if read_run(folder).status == "finished":
                return folder
        except ArtifactError:
            continue
    have = f"{len(folders)} unfinished" if folders else "none"
    raise ArtifactError(f"no finished run in {artifacts} ({have}); train one: edgeformer train quickstart")


def _of_run(folder: Path) -> Location:
    bundle = folder / "bundle"
    return Location(folder, bundle if (bundle / BUNDLE_FILE).is_file() else None)


def _of_bundle(folder: Path) -> Location:
    run = folder.resolve().parent
    return Location(run if (run / RUN_FILE).is_file() else None, folder)


def _of_file(file: Path) -> Location:
    for folder in list(file.resolve().parents)[:3]:
        if (folder / BUNDLE_FILE).is_file():
            relative = file.resolve().relative_to(folder.resolve()).as_posix()
            for artifact in read_bundle(folder).artifacts:
                if relative == artifact.file or relative in artifact.parts.values():
                    location = _of_bundle(folder)
                    return Location(location.run, location.bundle, artifact.id)
            raise ArtifactError(f"{file}: lies in a bundle but is not listed in its {BUNDLE_FILE}")
    raise ArtifactError(f"{file}: is not inside a bundle (no {BUNDLE_FILE} beside it or above it)")
