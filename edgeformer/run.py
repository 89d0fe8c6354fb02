"""Run: a folder with a trained model; and what a RUN argument on the command line stands for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Self

from edgeformer.artifacts import workspace
from edgeformer.artifacts.errors import ArtifactError, did_you_mean
from edgeformer.artifacts.files import read_at_most, whole
from edgeformer.artifacts.manifest import RunManifest, RunStatus
from edgeformer.bundle import Bundle, bundle_around
from edgeformer.checkpoint_session import open_decoder, open_session
from edgeformer.system.leftovers import restore_folder
from edgeformer.system.lock import owned
from edgeformer.tasks import Task, TextReader, import_task_of, task_named

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection
    from edgeformer.artifacts.recipe import Recipe
    from edgeformer.models import ModelSpec
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Session
TORCH = "torch"
"""What the run's own weights are called where an artifact is asked for."""


class Run:
    """An opened run.

    Attributes:
        folder: where it lies.
        manifest: its run.json.
    """

    def __init__(self, folder: Path, manifest: RunManifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest of the run in ``folder``. Raises ArtifactError where it is missing or damaged."""
        import_task_of(folder / workspace.RUN_FILE)
        return cls(folder, workspace.read_manifest(RunManifest, folder / workspace.RUN_FILE))

    @property
    def name(self) -> str:
        """As it was trained, whatever its folder is called by now."""
        return self.manifest.run

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe: training it again is the same run. Raises RecipeError."""
        from edgeformer.models import read_recipe_of

        return read_recipe_of(self.folder)

    @cached_property
    def settled(self) -> Recipe:
        """The recipe with what its task decided on the validation set, unless that stands there. Raises RecipeError."""
        found = self.manifest.validation
        return self.recipe if found is None else cast("Recipe", self.task.settled(self.recipe, found))

    @property
    def task(self) -> Task:
        """What its model is for."""
        return task_named(self.manifest.task)

    @property
    def model_spec(self) -> ModelSpec:
        """The family of its model."""
        from edgeformer.models import model_spec_of

        return model_spec_of(self.recipe)

    @property
    def data(self) -> DataSection:
        """How to find its data again, and how to read its answers."""
        return self.settled.data

    @property
    def trained_on(self) -> Mapping[str, str]:
        """Set → fingerprint, as training recorded it."""
        return self.manifest.data.fingerprints

    @property
    def exits(self) -> tuple[int, ...]:
        """Loops that its weights can answer after, the last one last: those with a head, or all of one head."""
        model_spec, config = self.model_spec, self.recipe.model
        return model_spec.trained_exits(config) or tuple(range(1, model_spec.loops(config) + 1))

    @property
    def answers_with_losses(self) -> bool:
        """Its weights are scored by losses at every exit that was trained: the logits of all would not fit."""
        return bool(self.model_spec.trained_exits(self.recipe.model))

    @property
    def leaks(self) -> bool:
        """Whether its model sees what it is asked to predict: by the probe, or by its architecture."""
        return self.manifest.leaks or self.model_spec.leaks(self.recipe.model)

    @property
    def status(self) -> RunStatus:
        """As it is now: a run that says ``running`` and that no process trains was killed, which is interrupted."""
        said = self.manifest.status
        return "interrupted" if said == "running" and not owned(self.folder) else said

    def require_finished(self) -> None:
        """Raises ArtifactError for a run whose training has not ended well."""
        if self.status == "running":
            raise ArtifactError(f"{self.folder}: is being trained; wait for its end")
        if self.status != "finished":
            hint = f"go on with: {workspace.resume_command(self.folder)}"
            raise ArtifactError(f"{self.folder}: is {self.status}, not finished; {hint}")

    def reader(self) -> TextReader:
        """How its model reads text. Raises ArtifactError or DataError."""
        tokenizer = self.folder / workspace.MODEL_FOLDER / workspace.TOKENIZER_FILE
        if not tokenizer.is_file():
            raise ArtifactError(f"{self.folder}: holds no trained model ({tokenizer.name}); finish its training first")
        return self.task.reader(tokenizer, self.recipe.data, self.recipe.model.vocab_size)

    def session(self, *, every_exit: bool = False, provider: str | None = None) -> Session:
        """Open the weights in torch for scoring; raises as ``checkpoint_session.open_session`` does.

        Args:
            every_exit: answer with the logits of every exit, ``logits_exitN``; else as the family scores its models.
            provider: one of torch's; None: on a CUDA card where torch sees one.
        """
        return open_session(self.folder, self.recipe, self.exits if every_exit else (), provider)

    def decoder(self, provider: str | None = None) -> Decoder[Any]:
        """Open the weights in torch for generation; raises as ``checkpoint_session.open_decoder`` does."""
        return open_decoder(self.folder, self.recipe, provider)


@dataclass
class Location:
    """What a RUN argument stands for; at least one of ``run`` and ``bundle`` is set.

    Attributes:
        run: the run's folder.
        bundle: the bundle's folder.
        artifact: the id of the artifact whose file was named.
        opened: the bundle, where it was opened already.
    """

    run: Path | None
    bundle: Path | None
    artifact: str | None = None
    opened: Bundle | None = field(default=None, repr=False, compare=False)

    @cached_property
    def name(self) -> str:
        """The run's name, the same in every message and document, whatever its folder is called by now."""
        return self.open_run().name if self.run is not None else self.open_bundle().name

    @property
    def argument(self) -> str:
        """What the command line would find the run by; ``RUN`` where only a bundle is at hand."""
        return whole(self.run).name if self.run is not None else "RUN"

    @property
    def reports(self) -> Path:
        """The folder of its reports; it need not be there."""
        return (self.run or self.require_bundle()) / workspace.REPORTS_FOLDER

    def require_run(self) -> Path:
        """The run's folder. Raises ArtifactError for a bundle without its run."""
        if self.run is None:
            raise ArtifactError(f"{self.bundle}: is a bundle without its run; this command needs the run's folder")
        return self.run

    def require_bundle(self) -> Path:
        """The bundle's folder. Raises ArtifactError where nothing was exported yet."""
        if self.bundle is None:
            raise ArtifactError(f"{self.run}: has no bundle yet; make one with: edgeformer export {self.argument}")
        return self.bundle

    def open_run(self) -> Run:
        """The run, read anew. Raises ArtifactError where there is none, or a damaged one."""
        return Run.open(self.require_run())

    def open_bundle(self) -> Bundle:
        """The bundle, read once. Raises ArtifactError where there is none, or a damaged one."""
        if self.opened is None:
            self.opened = Bundle.open(self.require_bundle())
        return self.opened

    def open_model(self) -> Bundle | Run:
        """Open the bundle where there is one, else the run. Raises ArtifactError where that is damaged."""
        return self.open_bundle() if self.bundle is not None else self.open_run()


def bundle_in(run: Path) -> Path | None:
    """The bundle's folder in a run's; None before anything was exported.

    One that a killed export had moved aside is put back. Raises OSError where it cannot be.
    """
    folder = run / workspace.BUNDLE_FOLDER
    restore_folder(folder)
    return folder if (folder / workspace.BUNDLE_FILE).is_file() else None


def run_around(bundle: Path) -> Path | None:
    """The run's folder around a bundle's; None for a bundle that was copied without its run."""
    folder = bundle.resolve().parent
    return folder if (folder / workspace.RUN_FILE).is_file() else None


def run_folders(artifacts: Path) -> list[Path]:
    """Folders below ``artifacts`` that hold a run, oldest first."""

    def started(folder: Path) -> tuple[str, str]:
        try:
            return str(
                json.loads(read_at_most(folder / workspace.RUN_FILE, workspace.MOST_JSON_BYTES))["started"]
            ), folder.name
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "", folder.name

    found = [path.parent for path in artifacts.glob(f"*/{workspace.RUN_FILE}") if not path.parent.name.startswith(".")]
    return sorted(found, key=started)


def read_run(folder: Path) -> RunManifest:
    """The manifest of the run in ``folder``. Raises ArtifactError."""
    return Run.open(folder).manifest


def locate(argument: str | None, artifacts: Path) -> Location:
    """Resolve a RUN argument: a run name, a run folder, a bundle folder, an artifact file, or the newest finished run.

    Args:
        argument: as it was typed; None: the newest finished run.
        artifacts: the folder that holds the runs.

    Raises:
        ArtifactError: nothing there, or not an edgeformer run or bundle.
    """
    if argument is None:
        folders = run_folders(artifacts)
        for folder in reversed(folders):
            with suppress(ArtifactError):
                if read_run(folder).status == "finished":
                    return Location(folder, bundle_in(folder))
        have = f"{len(folders)} unfinished" if folders else "none"
        raise ArtifactError(f"no finished run in {artifacts} ({have}); train one: edgeformer train quickstart")
    for candidate in (Path(argument), artifacts / argument):
        if candidate.name == workspace.BUNDLE_FOLDER:
            restore_folder(candidate)
        if not is_there(candidate):
            continue
        if (candidate / workspace.RUN_FILE).is_file():
            return Location(candidate, bundle_in(candidate))
        if (candidate / workspace.BUNDLE_FILE).is_file():
            return Location(run_around(candidate), candidate)
        if candidate.is_file():
            return _of_file(candidate)
        if candidate.is_dir() and candidate.name == workspace.BUNDLE_FOLDER:
            raise ArtifactError(f"{candidate}: has no {workspace.BUNDLE_FILE}; it is not a bundle, or a damaged one")
    names = [folder.name for folder in run_folders(artifacts)]
    shown = f"{did_you_mean(argument, names)}runs in {artifacts}: {', '.join(names[-8:]) or 'none yet'}"
    raise ArtifactError(f"no run {argument!r}: not a run, bundle or artifact file; {shown}")


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder; not where it is no path at all: too long, or with a null character."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises for a name that is too long


def _of_file(file: Path) -> Location:
    resolved, folder = file.resolve(), bundle_around(file)
    if folder is None:
        hint = f"; make one of it: edgeformer import onnx {file} -o BUNDLE" if file.suffix == ".onnx" else ""
        beside = f"no {workspace.BUNDLE_FILE} beside it or above it"
        raise ArtifactError(f"{file}: is not inside a bundle ({beside}){hint}")
    bundle, name = Bundle.open(folder), resolved.relative_to(folder).as_posix()
    for artifact in bundle.artifacts:
        if name in (artifact.file, *artifact.parts.values()):
            return Location(run_around(folder), folder, artifact.id, bundle)
    raise ArtifactError(f"{file}: lies in a bundle but is not listed in its {workspace.BUNDLE_FILE}")
