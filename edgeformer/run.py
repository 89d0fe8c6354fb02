"""Run: a folder with a trained model. Location: the run, bundle and artifact that a RUN argument names."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import Self

from edgeformer.artifacts import workspace
from edgeformer.artifacts.errors import ArtifactError, MissingDependencyError, did_you_mean, install_hint
from edgeformer.artifacts.files import read_at_most, whole
from edgeformer.artifacts.manifest import RunManifest, RunStatus
from edgeformer.bundle import Bundle, find_enclosing_bundle
from edgeformer.system.leftovers import restore_folder
from edgeformer.system.lock import has_live_owner
from edgeformer.tasks import Task, TextReader, get_task, import_task
from edgeformer.tasks.early_exit import exit_logits

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection
    from edgeformer.artifacts.recipe import Recipe
    from edgeformer.models import ModelSpec
    from edgeformer.models.adapter import ModelAdapter
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Session

TORCH = "torch"  # artifact id of a run's own weights


class Run:
    """An opened run."""

    def __init__(self, folder: Path, manifest: RunManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.name = manifest.run  # at training; independent of the folder's name
        self.trained_on: Mapping[str, str] = manifest.data.fingerprints  # set → fingerprint

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest of the run in ``folder``. Raises ArtifactError if it is missing or damaged."""
        import_task(folder / workspace.RUN_FILE)
        return cls(folder, workspace.read_manifest(RunManifest, folder / workspace.RUN_FILE))

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe, which reproduces the run. Raises RecipeError."""
        from edgeformer.models import read_run_recipe

        return read_run_recipe(self.folder)

    @cached_property
    def settled(self) -> Recipe:
        """The recipe, completed with values that the task derives from the validation score. Raises RecipeError."""
        score = self.manifest.validation
        return self.recipe if score is None else cast("Recipe", self.task.settled(self.recipe, score))

    @property
    def task(self) -> Task:
        """The model's task."""
        return get_task(self.manifest.task)

    @property
    def model_spec(self) -> ModelSpec:
        """Specification of the model."""
        from edgeformer.models import model_spec_of

        return model_spec_of(self.recipe)

    @property
    def data(self) -> DataSection:
        """The data section of the completed recipe."""
        return self.settled.data

    @property
    def exits(self) -> tuple[int, ...]:
        """Loops with an exit in ascending order: those with a head, or all if they share one."""
        model_spec, config = self.model_spec, self.recipe.model
        return model_spec.trained_exits(config) or tuple(range(1, model_spec.loops(config) + 1))

    @property
    def answers_with_losses(self) -> bool:
        """Whether its weights return the losses of all trained exits, because their logits do not fit into memory."""
        return bool(self.model_spec.trained_exits(self.recipe.model))

    @property
    def leaks(self) -> bool:
        """Whether the model sees the tokens that it predicts: by the probe, or by its architecture."""
        return self.manifest.leaks or self.model_spec.leaks(self.recipe.model)

    @property
    def status(self) -> RunStatus:
        """Current status: a run recorded as ``running`` without a live process was interrupted."""
        status = self.manifest.status
        return "interrupted" if status == "running" and not has_live_owner(self.folder) else status

    def require_finished(self) -> None:
        """Raise ArtifactError if training has not finished."""
        if self.status == "running":
            raise ArtifactError(f"{self.folder}: is being trained; wait until it has finished")
        if self.status != "finished":
            hint = f"continue with: {workspace.resume_command(self.folder)}"
            raise ArtifactError(f"{self.folder}: training is not finished (status: {self.status}); {hint}")

    def reader(self) -> TextReader:
        """Return the model's tokenizer with its limits. Raises ArtifactError or DataError."""
        tokenizer = self.folder / workspace.MODEL_FOLDER / workspace.TOKENIZER_FILE
        if not tokenizer.is_file():
            raise ArtifactError(f"{self.folder}: has no trained model ({tokenizer.name}); finish its training first")
        return self.task.rows.reader(tokenizer, self.recipe.data, self.recipe.model.vocab_size, self.tokenizer_config)

    def tokenizer_config(self) -> dict[str, Any]:
        """Return tokenizer_config.json, in which special tokens are texts. Raises ArtifactError if it is damaged."""
        return workspace.read_tokenizer_config(self.folder / workspace.MODEL_FOLDER / workspace.TOKENIZER_CONFIG)

    def session(self, *, every_exit: bool = False, provider: str | None = None) -> Session:
        """Open the weights in torch for scoring.

        Args:
            every_exit: return the logits of every exit, ``logits_exitN``; else the outputs that the model is scored by:
                ``logits``, or losses if logits do not fit into memory.
            provider: provider of torch; None: CUDA if torch finds a card, else the CPU.

        Raises:
            InputError: the provider is not available here.
            MissingDependencyError: torch is not installed.
            ArtifactError: the weights are missing or damaged.
        """
        model, adapter = self._load_weights("scoring", provider)
        from edgeformer.runtimes.torch.session import TorchSession

        if every_exit:
            from edgeformer.models.blocks.tracing import Exits

            names = self.task.input_names(self.recipe.model)
            return TorchSession(Exits(model), names, outputs=tuple(map(exit_logits, self.exits)))
        scorer: Any = adapter.scorer(model)
        return TorchSession(scorer, scorer.inputs, scorer.optional)

    def decoder(self, provider: str | None = None) -> Decoder[Any]:
        """Open the weights in torch to generate text token by token, with ``provider`` as in :meth:`session`.

        Raises the same errors, and InputError if the model cannot generate text.
        """
        model, adapter = self._load_weights("writing with", provider)
        from edgeformer.runtimes.decoder import Decoder
        from edgeformer.runtimes.torch.session import TorchEngine

        return Decoder(TorchEngine(adapter.decoder(model)))

    def _load_weights(self, purpose: str, provider: str | None) -> tuple[Any, ModelAdapter]:
        from edgeformer.runtimes.torch import RUNTIME

        try:
            from edgeformer.models.weights import load_model

            device = RUNTIME.device(provider)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"{purpose} the run's own weights needs {error.name}, which is not installed: "
                f"{install_hint('train')}; or export the run where it is installed (edgeformer export "
                f"{self.folder.name}), and choose an artifact of the bundle with --artifact"
            ) from None
        return load_model(self.folder).to(device), self.model_spec.adapter


def is_torch_provider(runtime: str) -> bool:
    """Return whether ``--runtime`` names a provider of torch, which a run's own weights need."""
    from edgeformer.runtimes.torch import RUNTIME

    return RUNTIME.provider_facts(runtime) is not None


@dataclass
class Location:
    """The folders that a RUN argument names; at least one of ``run`` and ``bundle`` is set."""

    run: Path | None
    bundle: Path | None
    artifact: str | None = None  # id, if its file was named
    opened: Bundle | None = field(default=None, repr=False, compare=False)  # once it is open

    @cached_property
    def name(self) -> str:
        """Name of the run in messages and documents; independent of the folder's name."""
        return self.open_run().name if self.run is not None else self.open_bundle().name

    @property
    def argument(self) -> str:
        """RUN argument that names the run, or the bundle without its run: a name, or a path outside of artifacts/."""
        folder = whole(self.run if self.run is not None else self.require_bundle())
        is_named = folder.parent == whole(Path("artifacts"))
        return folder.name if is_named else shlex.quote(str(self.run or self.bundle))

    @property
    def run_argument(self) -> str:
        """As ``argument``, for commands that need a run: ``RUN`` for a bundle without its run."""
        return self.argument if self.run is not None else "RUN"

    @property
    def step_command(self) -> str:
        """Command that adds step artifacts, which can exit early, to the bundle."""
        return f"edgeformer export {self.run_argument} --exit all"

    @property
    def reports(self) -> Path:
        """The folder of its reports, which may not exist yet."""
        return (self.run or self.require_bundle()) / workspace.REPORTS_FOLDER

    def require_run(self) -> Path:
        """Return the run's folder. Raises ArtifactError for a bundle without its run."""
        if self.run is None:
            raise ArtifactError(f"{self.bundle}: is a bundle without its run; this command needs the folder of the run")
        return self.run

    def require_bundle(self) -> Path:
        """Return the bundle's folder. Raises ArtifactError if the run was not exported yet."""
        if self.bundle is None:
            raise ArtifactError(f"{self.run}: has no bundle yet; make one: edgeformer export {self.run_argument}")
        return self.bundle

    def open_run(self) -> Run:
        """Read the run. Raises ArtifactError if there is none, or if it is damaged."""
        return Run.open(self.require_run())

    def open_bundle(self) -> Bundle:
        """Return the bundle, which is read once. Raises ArtifactError if there is none, or if it is damaged."""
        if self.opened is None:
            self.opened = Bundle.open(self.require_bundle())
        return self.opened

    def open_model(self) -> Bundle | Run:
        """Open the bundle if there is one, else the run. Raises ArtifactError if that is damaged."""
        return self.open_bundle() if self.bundle is not None else self.open_run()


def find_bundle(run: Path) -> Path | None:
    """Return the bundle's folder inside a run's folder; None: not exported yet.

    A bundle that an interrupted export has moved aside is restored first. Raises OSError if that fails.
    """
    folder = run / workspace.BUNDLE_FOLDER
    restore_folder(folder)
    return folder if (folder / workspace.BUNDLE_FILE).is_file() else None


def find_enclosing_run(bundle: Path) -> Path | None:
    """Return the run's folder that contains a bundle; None: the bundle was copied without its run."""
    folder = bundle.resolve().parent
    return folder if (folder / workspace.RUN_FILE).is_file() else None


def run_folders(artifacts: Path) -> list[Path]:
    """Return the folders in ``artifacts`` that hold a run, oldest first."""
    started: dict[Path, str] = {}
    for path in artifacts.glob(f"*/{workspace.RUN_FILE}"):
        if not path.parent.name.startswith("."):
            started[path.parent] = ""
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                started[path.parent] = str(json.loads(read_at_most(path, workspace.MOST_JSON_BYTES))["started"])
    return sorted(started, key=lambda folder: (started[folder], folder.name))


def read_run(folder: Path) -> RunManifest:
    """Return the manifest of the run in ``folder``. Raises ArtifactError."""
    return Run.open(folder).manifest


def locate(argument: str | None, artifacts: Path) -> Location:
    """Resolve a RUN argument: a run name, a run folder, a bundle folder, or an artifact file; None: the newest run.

    Raises ArtifactError: neither ``artifacts`` nor that path holds a finished run or a bundle.
    """
    if argument is None:
        folders = run_folders(artifacts)
        for folder in reversed(folders):
            with suppress(ArtifactError):
                if read_run(folder).status == "finished":
                    return Location(folder, find_bundle(folder))
        count = f"{len(folders)} unfinished" if folders else "none"
        raise ArtifactError(f"no finished run in {artifacts} ({count}); train one: edgeformer train quickstart")
    for candidate in (Path(argument), artifacts / argument):
        if candidate.name == workspace.BUNDLE_FOLDER:
            restore_folder(candidate)
        if not os.path.exists(candidate):  # noqa: PTH110 - Path.exists raises for a name that is too long
            continue
        if (candidate / workspace.RUN_FILE).is_file():
            return Location(candidate, find_bundle(candidate))
        if (candidate / workspace.BUNDLE_FILE).is_file():
            return Location(find_enclosing_run(candidate), candidate)
        if candidate.is_file():
            bundle_folder = find_enclosing_bundle(candidate)
            if bundle_folder is None:
                import_ = f"edgeformer import onnx {candidate} -o BUNDLE"
                hint = f"; make one: {import_}" if candidate.suffix == ".onnx" else ""
                reason = f"no {workspace.BUNDLE_FILE} in its folder or a parent folder"
                raise ArtifactError(f"{candidate}: not in a bundle ({reason}){hint}")
            bundle, name = Bundle.open(bundle_folder), candidate.resolve().relative_to(bundle_folder).as_posix()
            for artifact in bundle.artifacts:
                if name in (artifact.file, *artifact.parts.values()):
                    return Location(find_enclosing_run(bundle_folder), bundle_folder, artifact.id, bundle)
            raise ArtifactError(
                f"{candidate}: is in a bundle but not listed in its {workspace.BUNDLE_FILE}; use a listed artifact"
            )
        if candidate.is_dir() and candidate.name == workspace.BUNDLE_FOLDER:
            raise ArtifactError(
                f"{candidate}: has no {workspace.BUNDLE_FILE}, so it is not a bundle or damaged; export the run again"
            )
    names = [folder.name for folder in run_folders(artifacts)]
    hint = f"{did_you_mean(argument, names)}runs in {artifacts}: {', '.join(names[-8:]) or 'none yet'}"
    raise ArtifactError(f"no run {argument!r}: not a run, bundle or artifact file; {hint}")
