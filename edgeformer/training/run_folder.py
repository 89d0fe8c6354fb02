"""The folder of a run: find the one to resume, write recipe and manifest, finish with scores and the model."""

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
from edgeformer.models import read_run_recipe
from edgeformer.models.adapter import count_parameters
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.weights import MODEL_FOLDER, load_weights, save_model
from edgeformer.run import read_run, run_folders
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder, remove_abandoned
from edgeformer.training.checkpoint import Checkpoints, remove_path
from edgeformer.training.loop import TrainingLoop
from edgeformer.training.memory import measured_peak
from edgeformer.training.metrics import METRICS_FILE
from edgeformer.training.objective import Objective

_HEADER = "# The resolved recipe of this run; training it again is the same run.\n"


def folder_to_resume(recipe: Recipe, artifacts: Path, name: str | None) -> Path:
    """Return the unfinished run of ``recipe`` called ``name``, or the newest one.

    Raises:
        ArtifactError: there is none, it is finished, or it was started from a different recipe.
    """
    candidates = [artifacts / name] if name else list(reversed(run_folders(artifacts)))
    for folder in candidates:
        if not (folder / RUN_FILE).is_file():
            names = [run.name for run in run_folders(artifacts)]
            available = f"{did_you_mean(str(name), names)}runs there: {', '.join(names[-8:]) or 'none yet'}"
            raise ArtifactError(f"--resume: no run {name!r} in {artifacts}; {available}")
        try:
            manifest = read_run(folder)
        except ArtifactError:
            if name is None:  # a damaged run does not say which recipe it belongs to
                continue
            raise
        if name is None and (manifest.recipe != recipe.name or manifest.status == "finished"):
            continue
        if manifest.status == "finished":
            raise ArtifactError(f"--resume: {folder} is finished; train again under another --name")
        saved = read_run_recipe(folder)
        if recipe.tokenizer.kind == "trained" and saved.model.vocab_size < recipe.model.vocab_size:
            # The trained tokenizer was smaller, see fitted_recipe; training it again checks that.
            recipe = recipe.with_vocabulary(saved.model.vocab_size)
        if saved.fingerprint() != recipe.fingerprint():
            old, new = _flatten(saved.model_dump(mode="json")), _flatten(recipe.model_dump(mode="json"))
            differences = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            raise ArtifactError(
                f"--resume: {folder} was started from a recipe that differs in {', '.join(differences)}; "
                f"resume it with: {resume_command(folder)}"
            )
        return folder
    raise ArtifactError(f"--resume: no unfinished run of {recipe.name} in {artifacts}; train without --resume")


def _flatten(value: object, path: str = "") -> dict[str, object]:
    """Return the leaves of nested dicts by their dotted paths."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flatten(item, f"{path}.{key}".strip(".")).items()}
    return {path: value}


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes. The caller must hold the run's lock."""
    remove_abandoned(folder.parent, NEW_RUN)
    Checkpoints(folder).remove_leftovers()
    for name in (RUN_FILE, RECIPE_FILE, METRICS_FILE, EVALUATION_FILE, MODEL_FOLDER):
        for path in (*folder.glob(f".{name}.*.tmp*"), *folder.glob(f".{name}.*.old")):
            remove_path(path)


class RunRecord:
    """The folder of one run from start to end; only the main process writes into it."""

    manifest: RunManifest
    folder: Path

    def __init__(self, objective: Objective, loop: TrainingLoop) -> None:
        self.recipe, self._objective, self._loop = objective.recipe, objective, loop

    def use_folder(self, folder: Path) -> None:
        """Use ``folder``, which may have been created by another process."""
        self.folder, self._loop.checkpoints = folder, Checkpoints(folder)

    def _write(self, manifest: RunManifest) -> None:
        self.manifest = manifest
        if self._loop.processes.is_main:
            write_json(self.folder / RUN_FILE, manifest)

    def create(self, artifacts: Path, name: str | None, memory: MemoryUse) -> None:
        """Create the folder of a new run, see :func:`free_folder`. Raises InputError.

        It appears with recipe and manifest in it: a killed process leaves no empty folder that blocks a name.
        """

        def fill(folder: Path) -> None:
            recipe, objective, loop = self.recipe, self._objective, self._loop
            write_text(folder / RECIPE_FILE, _HEADER + recipe.to_yaml())
            self.manifest = RunManifest(
                run=folder.name,
                status="running",
                task=recipe.task,
                recipe=recipe.name,
                recipe_sha256=recipe.fingerprint(),
                started=now(),
                parameters=count_parameters(loop.plain_model),
                vocabulary=recipe.model.vocab_size,
                precision=loop.processes.precision,
                attention=objective.attention,
                data=objective.prepared.summary,
                tokenizer_fingerprint=fingerprint(objective.prepared.tokenizer),
                leaks=objective.causality is not None and objective.causality.leaks,
                causality=objective.causality,
                memory=memory,
                effective_batch=recipe.training.effective_batch,
                processes=loop.processes.count,
                versions=library_versions(),
                code_version=code_version(),
                host={**describe_host(), "accelerator": str(loop.device), "threads": torch.get_num_threads()},
            )
            write_json(folder / RUN_FILE, self.manifest)

        self.use_folder(new_folder(NEW_RUN, partial(free_folder, artifacts, name, self.recipe.name), fill))

    def resume(self, folder: Path, progress: Progress) -> None:
        """Restore the state of a resumed run.

        Raises:
            InputError: data, tokenizer or precision have changed.
            ArtifactError: its checkpoints are damaged.
        """
        self.use_folder(folder)
        count, precision = self._loop.processes.count, self._loop.processes.precision
        with self._loop.processes.failing_together():
            manifest, prepared = read_run(folder), self._objective.prepared
            if manifest.tokenizer_fingerprint not in (None, fingerprint(prepared.tokenizer)):
                tokenizer_file = getattr(self.recipe.tokenizer, "path", "the tokenizer that the recipe names")
                raise InputError(
                    f"{folder}: the tokenizer changed since this run began, or the version of edgeformer and its "
                    f"cleaning; restore {tokenizer_file}, or train again without --resume"
                )
            if manifest.data.fingerprint != prepared.summary.fingerprint:
                raise InputError(f"{folder}: the data changed since this run began; train again without --resume")
            if manifest.precision != precision:
                raise InputError(
                    f"{folder}: was trained in {manifest.precision}, this machine would go on in {precision}; "
                    f"add --set training.precision={manifest.precision} and train anew, or resume where it began"
                )
        if manifest.processes != count:
            progress.message(f"going on with {count} processes instead of {manifest.processes}; the steps are the same")
        self._loop.resume(progress)
        self._write(manifest.model_copy(update={"status": "running", "reason": None, "processes": count}))

    def _updated_manifest(self) -> RunManifest:
        """Return the manifest with time, steps and memory peak so far."""
        position, memory = self._loop.position, self.manifest.memory
        if memory is not None:
            peak, description = measured_peak(memory.device)
            memory = memory.model_copy(update={"measured_peak_bytes": peak, "measured_as": description})
        seconds = position.training_seconds
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
        """Record that the run did not finish, if that can be written. A removed folder is not created again."""
        update = {"status": status, "reason": reason, "finished": now()}
        with contextlib.suppress(OSError):  # the user must see what ended the run, not that the disk is full too
            if self._loop.processes.is_main and self.folder.is_dir():
                self._write(self._updated_manifest().model_copy(update=update))

    def finish(self, reason: str | None, progress: Progress) -> None:
        """Score the best weights on every test set and write the model. ``reason``: why training ended early."""
        manifest = self._updated_manifest()  # before scoring adds to the peak
        model, objective, position = self._loop.unsharded_model(), self._objective, self._loop.position
        if position.best_value is None:
            raise ArtifactError(f"{self._loop.checkpoints.best}: is not the checkpoint's; train again without --resume")
        load_weights(model, self._loop.checkpoints.best)
        validation = objective.task.score_type.model_validate(position.validation)
        # The task may choose values by the validation score; the run's recipe.yaml keeps the requested ones.
        objective.recipe = objective.task.settled(self.recipe, validation)
        tests: dict[str, Score] = {}
        names = list(objective.prepared.tests)
        with bar(progress, f"Scoring {', '.join(names)}", sum(map(objective.count_rows, names)), "rows"):
            for name in names:
                tests[name] = objective.evaluate(model, name, advance=progress.advance)
        rows = [
            row
            for name, score in {"validation": validation, **tests}.items()
            for row in objective.task.rows("torch", name, score, leaks=manifest.leaks)
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
        final = manifest.model_copy(update=update)
        with replacing_folder(self.folder / MODEL_FOLDER) as folder:
            save_model(folder, model, objective.recipe, objective.prepared)
            write_text(folder / CARD_FILE, model_card(final, objective.recipe))
        self._write(final)
