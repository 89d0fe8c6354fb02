"""The folder of a run: finding the one to resume, and what is written into it, and when."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from edgeformer.artifacts.errors import ArtifactError, InputError, did_you_mean
from edgeformer.artifacts.files import replacing_folder, write_json, write_text
from edgeformer.artifacts.manifest import MemoryUse, RunManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import EVALUATION_FILE, Score, merge_rows
from edgeformer.artifacts.workspace import NEW_RUN, RECIPE_FILE, RUN_FILE, free_folder, resume_command
from edgeformer.data.tokenization import fingerprint
from edgeformer.models import read_recipe_of
from edgeformer.models.adapter import count_parameters
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.weights import MODEL_FOLDER, load_weights, save_model
from edgeformer.run import read_run, run_folders
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder, remove_abandoned
from edgeformer.training.checkpoint import Checkpoints, remove
from edgeformer.training.loop import TrainingLoop
from edgeformer.training.memory import measured_peak
from edgeformer.training.metrics import METRICS_FILE
from edgeformer.training.objective import Objective

_HEADER = "# The resolved recipe of this run; training it again is the same run.\n"


def folder_to_resume(recipe: Recipe, artifacts: Path, name: str | None) -> Path:
    """The unfinished run of this recipe: ``name``, or the newest one.

    Raises:
        ArtifactError: there is none, it is finished, or it was started from a different recipe.
    """
    candidates = [artifacts / name] if name else list(reversed(run_folders(artifacts)))
    for folder in candidates:
        if not (folder / RUN_FILE).is_file():
            names = [run.name for run in run_folders(artifacts)]
            shown = f"{did_you_mean(str(name), names)}runs there: {', '.join(names[-8:]) or 'none yet'}"
            raise ArtifactError(f"--resume: no run {name!r} in {artifacts}; {shown}")
        try:
            manifest = read_run(folder)
        except ArtifactError:
            if name is None:  # a damaged run says of no recipe that it is its own
                continue
            raise
        if name is None and (manifest.recipe != recipe.name or manifest.status == "finished"):
            continue
        if manifest.status == "finished":
            raise ArtifactError(f"--resume: {folder} is finished; train again under another --name")
        saved = read_recipe_of(folder)
        if recipe.tokenizer.kind == "trained" and saved.model.vocab_size < recipe.model.vocab_size:
            # The tokenizer came out smaller, see fitted_recipe. That it does so again is checked when it is trained.
            recipe = recipe.with_vocabulary(saved.model.vocab_size)
        if saved.fingerprint() != recipe.fingerprint():
            old, new = _flat(saved.model_dump(mode="json")), _flat(recipe.model_dump(mode="json"))
            differences = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            raise ArtifactError(
                f"--resume: {folder} was started from a recipe that differs in {', '.join(differences)}; "
                f"resume it with: {resume_command(folder)}"
            )
        return folder
    raise ArtifactError(f"--resume: no unfinished run of {recipe.name} in {artifacts}; train without --resume")


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes began to write. Only whoever holds the run's lock may ask for it."""
    remove_abandoned(folder.parent, NEW_RUN)
    Checkpoints(folder).remove_leftovers()
    names = (RUN_FILE, RECIPE_FILE, METRICS_FILE, EVALUATION_FILE, MODEL_FOLDER)
    for path in [path for name in names for end in ("tmp*", "old") for path in folder.glob(f".{name}.*.{end}")]:
        remove(path)


def _flat(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}".strip(".")).items()}
    return {path: value}


class RunRecord:
    """The folder of one run, from its beginning to its end; only the main process writes into it."""

    manifest: RunManifest
    folder: Path

    def __init__(self, objective: Objective, loop: TrainingLoop) -> None:
        self.recipe, self._objective, self._loop = objective.recipe, objective, loop

    def is_in(self, folder: Path) -> None:
        """The run is in ``folder``, which may be another process's work."""
        self.folder, self._loop.checkpoints = folder, Checkpoints(folder)

    def _write(self, manifest: RunManifest) -> None:
        self.manifest = manifest
        if self._loop.processes.main:
            write_json(self.folder / RUN_FILE, manifest)

    def begin(self, artifacts: Path, name: str | None, memory: MemoryUse) -> None:
        """Make the folder of a new run, see :func:`free_folder`. Raises InputError.

        It appears with recipe and manifest in it: a process that is killed leaves no name that is taken by nothing.
        """
        free = partial(free_folder, artifacts, name, self.recipe.name)
        self.is_in(new_folder(NEW_RUN, free, lambda folder: self._begin(folder, memory)))

    def _begin(self, folder: Path, memory: MemoryUse) -> None:
        recipe, objective = self.recipe, self._objective
        write_text(folder / RECIPE_FILE, _HEADER + recipe.to_yaml())
        self.manifest = RunManifest(
            run=folder.name,
            status="running",
            task=recipe.task,
            recipe=recipe.name,
            recipe_sha256=recipe.fingerprint(),
            started=now(),
            parameters=count_parameters(self._loop.plain_model),
            vocabulary=recipe.model.vocab_size,
            precision=self._loop.processes.precision,
            attention=objective.attention,
            data=objective.prepared.summary,
            tokenizer_fingerprint=fingerprint(objective.prepared.tokenizer),
            leaks=objective.causality is not None and objective.causality.leaks,
            causality=objective.causality,
            memory=memory,
            effective_batch=recipe.training.effective_batch,
            processes=self._loop.processes.count,
            versions=library_versions(),
            code_version=code_version(),
            host={**describe_host(), "accelerator": str(self._loop.device), "threads": torch.get_num_threads()},
        )
        write_json(folder / RUN_FILE, self.manifest)

    def resume(self, folder: Path, progress: Progress) -> None:
        """Restore the state of a run that goes on.

        Raises:
            InputError: data, tokenizer or precision have changed.
            ArtifactError: its checkpoints are damaged.
        """
        self.is_in(folder)
        with self._loop.processes.agreeing():
            old = self._resumable(folder)
        count = self._loop.processes.count
        if old.processes != count:
            progress.message(f"going on with {count} processes instead of {old.processes}; the steps are the same")
        self._loop.resume(progress)
        self._write(old.model_copy(update={"status": "running", "reason": None, "processes": count}))

    def _resumable(self, folder: Path) -> RunManifest:
        old = read_run(folder)
        known = old.tokenizer_fingerprint  # earlier versions recorded none
        if known is not None and known != fingerprint(self._objective.prepared.tokenizer):
            raise InputError(
                f"{folder}: the tokenizer changed since this run began, or the version of edgeformer and its cleaning; "
                f"restore {self._tokenizer_file()}, or train again without --resume"
            )
        if old.data.fingerprint != self._objective.prepared.summary.fingerprint:
            raise InputError(f"{self.folder}: the data changed since this run began; train again without --resume")
        precision = self._loop.processes.precision
        if old.precision != precision:
            raise InputError(
                f"{self.folder}: was trained in {old.precision}, this machine would go on in {precision}; "
                f"add --set training.precision={old.precision} and train anew, or resume where it began"
            )
        return old

    def _tokenizer_file(self) -> str:
        return str(getattr(self.recipe.tokenizer, "path", "the tokenizer that the recipe names"))

    def _progressed(self) -> RunManifest:
        position, memory = self._loop.position, self.manifest.memory
        if memory is not None:
            peak, what = measured_peak(memory.device)
            memory = memory.model_copy(update={"measured_peak_bytes": peak, "measured_as": what})
        # Validation is no part of it; but a run that an earlier version began knows the sum only.
        seconds = position.training_seconds or position.seconds
        update = {
            "seconds": round(position.seconds, 3),
            "steps": position.step,
            "epochs": position.epoch,
            "batch_size": position.batch_size,
            "skipped_steps": position.skipped,
            "samples_per_second": round(position.samples / seconds, 2) if seconds else None,
            "memory": memory,
        }
        return self.manifest.model_copy(update=update)

    def stop(self, status: Literal["interrupted", "failed"], reason: str) -> None:
        """Record that the run did not finish, where that can still be written."""
        update = {"status": status, "reason": reason, "finished": now()}
        # What ended the run is what the user must hear of: not that a full disk takes no note of it either.
        with contextlib.suppress(OSError):
            if (
                self._loop.processes.main and self.folder.is_dir()
            ):  # a folder that was removed must not come back without its checkpoints
                self._write(self._progressed().model_copy(update=update))

    def _settle(self, validation: Score) -> None:
        """Decide what the task decides on the validation set. recipe.yaml goes on saying what was asked for."""
        self._objective.recipe = self._objective.task.settled(self.recipe, validation)

    def finish(self, reason: str | None, progress: Progress) -> None:
        """Score the best weights on every test set and write the model. ``reason``: why training ended early."""
        trained = self._progressed()  # before scoring adds to the peak
        model, objective, position = self._loop.whole_model(), self._objective, self._loop.position
        if position.best_value is None:
            raise ArtifactError(f"{self._loop.checkpoints.best}: is not the checkpoint's; train again without --resume")
        load_weights(model, self._loop.checkpoints.best)
        validation = objective.task.score_type.model_validate(position.validation)
        self._settle(validation)
        tests: dict[str, Score] = {}
        names = list(objective.prepared.tests)
        with bar(progress, f"Scoring {', '.join(names)}", sum(map(objective.rows_of, names)), "rows"):
            for name in names:
                tests[name] = objective.evaluate(model, name, advance=progress.advance)
        rows = [
            row
            for name, found in {"validation": validation, **tests}.items()
            for row in objective.task.rows("torch", name, found, leaks=trained.leaks)
        ]
        merge_rows(self.folder, rows)
        update = {
            "status": "finished",
            "reason": reason,
            "finished": now(),
            "best_epoch": position.best_epoch,
            "validation": validation,
            "test": next(iter(tests.values()), None),
            "tests": tests,
        }
        final = trained.model_copy(update=update)
        with replacing_folder(self.folder / MODEL_FOLDER) as folder:
            save_model(folder, model, objective.recipe, objective.prepared)
            write_text(folder / CARD_FILE, model_card(final, objective.recipe))
        self._write(final)
