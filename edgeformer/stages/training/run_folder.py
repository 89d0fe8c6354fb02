"""The folder of a run: making it, finding the one to resume, and what is written into it, and when."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from torch import nn

from edgeformer.backends import library_versions
from edgeformer.families import read_recipe_of
from edgeformer.families.card import write_model_card
from edgeformer.families.saving import MODEL_FOLDER, save_model
from edgeformer.families.weights import count_parameters
from edgeformer.formats.data_config import NAME_PATTERN
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import replacing_folder, write_json, write_text
from edgeformer.formats.manifest import MemoryUse, RunManifest
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.scores import Score, merge_rows
from edgeformer.formats.workspace import RECIPE_FILE, RUN_FILE
from edgeformer.machine.host import code_version, describe_host, now
from edgeformer.run import read_run, run_folders
from edgeformer.stages.training.checkpoints import Checkpoints, Position
from edgeformer.stages.training.loop import TrainingLoop
from edgeformer.stages.training.memory_here import measured_peak
from edgeformer.stages.training.objective import Objective


def new_folder(recipe: Recipe, artifacts: Path, name: str | None) -> Path:
    """A fresh folder: ``name``, or the recipe's name with the next free number.

    Raises:
        InputError: ``name`` is taken; a run is never overwritten.
    """
    artifacts.mkdir(parents=True, exist_ok=True)
    if name is not None:
        folder = artifacts / name
        try:
            folder.mkdir()
        except FileExistsError:
            raise _taken(artifacts, name) from None
        return folder
    for number in range(1, 10_000):
        folder = artifacts / f"{recipe.name}-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise InputError(f"{artifacts}: holds 9,999 runs of {recipe.name}; choose a --name")


def check_name(artifacts: Path, name: str) -> None:
    """Refuse a ``--name`` that cannot be a run's folder, before any work is done. Raises InputError."""
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InputError(f"--name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit")
    if (artifacts / name).exists():
        raise _taken(artifacts, name)


def _taken(artifacts: Path, name: str) -> InputError:
    return InputError(f"--name {name}: {artifacts / name} exists already; choose another name, or go on with --resume")


def folder_to_resume(recipe: Recipe, artifacts: Path, name: str | None) -> Path:
    """The unfinished run of this recipe: ``name``, or the newest one.

    Raises:
        ArtifactError: there is none, it is finished, or it was started from a different recipe.
    """
    candidates = [artifacts / name] if name else list(reversed(run_folders(artifacts)))
    for folder in candidates:
        if not (folder / RUN_FILE).is_file():
            raise ArtifactError(f"--resume: no run {name!r} in {artifacts}")
        manifest = read_run(folder)
        if name is None and (manifest.recipe != recipe.name or manifest.status == "finished"):
            continue
        if manifest.status == "finished":
            raise ArtifactError(f"--resume: {folder} is finished; train again under another --name")
        saved = read_recipe_of(folder)
        if saved.fingerprint() != recipe.fingerprint():
            raise ArtifactError(
                f"--resume: {folder} was started from a recipe that differs in "
                f"{', '.join(_differences(saved, recipe))}; "
                f"resume it with: edgeformer train {folder / RECIPE_FILE} --resume --name {folder.name}"
            )
        return folder
    raise ArtifactError(f"--resume: no unfinished run of {recipe.name} in {artifacts}; train without --resume")


def _differences(one: Recipe, other: Recipe) -> list[str]:
    left, right = _flat(one.model_dump(mode="json")), _flat(other.model_dump(mode="json"))
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def _flat(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}.{key}".strip(".")).items()}
    return {path: value}


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """recipe.yaml: the resolved recipe."""
    header = "# The resolved recipe of this run; training it again is the same run.\n"
    write_text(folder / RECIPE_FILE, header + recipe.to_yaml())


def write_run(folder: Path, manifest: RunManifest) -> None:
    """run.json."""
    write_json(folder / RUN_FILE, manifest)


def precision_of(accelerator: Accelerator) -> str:
    """fp32, bf16 or fp16."""
    return "fp32" if accelerator.mixed_precision == "no" else str(accelerator.mixed_precision)


def _per_second(position: Position) -> float | None:
    """Training rows per second of training; validation is no part of it."""
    seconds = position.training_seconds or position.seconds  # a run that an earlier version began knows the sum only
    return round(position.samples / seconds, 2) if seconds else None


class RunRecord:
    """The folder of one run, from its beginning to its end."""

    def __init__(self, folder: Path, objective: Objective, loop: TrainingLoop) -> None:
        self.folder, self._recipe, self._objective, self._loop = folder, objective.recipe, objective, loop

    def begin(self, accelerator: Accelerator, memory: MemoryUse, *, resumed: bool) -> RunManifest:
        """Write recipe and manifest of a new run, or restore the state of a resumed one.

        Raises:
            InputError: data or precision are not those that the run began with.
        """
        if resumed:
            manifest = self._resume(accelerator)
        else:
            write_recipe(self.folder, self._recipe)
            manifest = self._fresh_manifest(accelerator, memory)
        write_run(self.folder, manifest)
        return manifest

    def _resume(self, accelerator: Accelerator) -> RunManifest:
        old = read_run(self.folder)
        if old.data.fingerprint != self._objective.prepared.summary.fingerprint:
            raise InputError(f"{self.folder}: the data changed since this run began; train again without --resume")
        precision = precision_of(accelerator)
        if old.precision != precision:
            raise InputError(
                f"{self.folder}: was trained in {old.precision}, this machine would go on in {precision}; "
                f"add --set training.precision={old.precision} and train anew, or resume where it began"
            )
        self._loop.resume()
        return old.model_copy(update={"status": "running", "reason": None})

    def _fresh_manifest(self, accelerator: Accelerator, memory: MemoryUse) -> RunManifest:
        recipe, objective = self._recipe, self._objective
        return RunManifest(
            run=self.folder.name,
            status="running",
            task=recipe.task,
            recipe=recipe.name,
            recipe_sha256=recipe.fingerprint(),
            started=now(),
            parameters=count_parameters(self._loop.plain_model),
            vocabulary=recipe.model.vocab_size,
            precision=precision_of(accelerator),
            attention=objective.attention,
            data=objective.prepared.summary,
            leaks=objective.causality is not None and objective.causality.leaks,
            causality=objective.causality,
            memory=memory,
            versions=library_versions(),
            code_version=code_version(),
            host={
                **describe_host(),
                "accelerator": str(accelerator.device),
                "threads": torch.get_num_threads(),
            },
        )

    def _progressed(self, manifest: RunManifest) -> RunManifest:
        position = self._loop.position
        memory = manifest.memory
        if memory is not None:
            peak, what = measured_peak(memory.device)
            memory = memory.model_copy(update={"measured_peak_bytes": peak, "measured_as": what})
        return manifest.model_copy(
            update={
                "seconds": round(position.seconds, 3),
                "steps": position.step,
                "epochs": position.epoch,
                "batch_size": position.batch_size,
                "samples_per_second": _per_second(position),
                "memory": memory,
            }
        )

    def stop(self, manifest: RunManifest, status: Literal["interrupted", "failed"], reason: str) -> None:
        """Record that the run did not finish."""
        update = {"status": status, "reason": reason, "finished": now()}
        write_run(self.folder, self._progressed(manifest).model_copy(update=update))

    def finish(self, manifest: RunManifest, device: torch.device, progress: Progress) -> None:
        """Score the best weights on every test set and write the model."""
        trained = self._progressed(manifest)  # before scoring adds to the peak
        model, objective, position = self._loop.plain_model, self._objective, self._loop.position
        Checkpoints(self.folder).load_best(model)
        progress.start("Scoring", len(objective.tests), "sets")
        tests: dict[str, Score] = {}
        for name in objective.tests:
            tests[name] = objective.evaluate(model, name, device)
            progress.advance()
        progress.finish()
        validation = objective.task.score_type.model_validate(position.validation)
        update = {
            "status": "finished",
            "finished": now(),
            "best_epoch": position.best_epoch,
            "validation": validation,
            "test": next(iter(tests.values()), None),
            "tests": tests,
        }
        final = trained.model_copy(update=update)
        self._write_model(model, final)
        scores = {"validation": validation, **tests}
        rows = [
            row
            for name, found in scores.items()
            for row in objective.task.rows("torch", name, found, leaks=final.leaks)
        ]
        merge_rows(self.folder, rows)
        write_run(self.folder, final)

    def _write_model(self, model: nn.Module, manifest: RunManifest) -> None:
        with replacing_folder(self.folder / MODEL_FOLDER) as folder:
            save_model(folder, model, self._recipe, self._objective.prepared)
            write_model_card(folder, manifest, self._recipe)
