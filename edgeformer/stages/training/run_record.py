"""What is written into a run's folder, and when: manifest, evaluation, model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from torch import nn

from edgeformer.backends import library_versions
from edgeformer.families.encoder.model import count_parameters
from edgeformer.formats.errors import InputError
from edgeformer.formats.evaluation import merge_rows, rows_of
from edgeformer.formats.files import replacing_folder
from edgeformer.formats.manifest import MemoryUse, RunManifest
from edgeformer.formats.progress import Progress
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.scores import ClassificationScore, LanguageScore
from edgeformer.formats.workspace import read_run
from edgeformer.machine.host import code_version, describe_host, now
from edgeformer.stages.training.checkpoints import Checkpoints
from edgeformer.stages.training.job import Job
from edgeformer.stages.training.loop import TrainingLoop
from edgeformer.stages.training.measured_memory import measured_peak
from edgeformer.stages.training.run_folder import write_recipe, write_run


def precision_of(accelerator: Accelerator) -> str:
    """fp32, bf16 or fp16."""
    return "fp32" if accelerator.mixed_precision == "no" else str(accelerator.mixed_precision)


class RunRecord:
    """The folder of one run, from its beginning to its end."""

    def __init__(self, folder: Path, recipe: AnyRecipe, job: Job, loop: TrainingLoop) -> None:
        self.folder, self._recipe, self._job, self._loop = folder, recipe, job, loop

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
        if old.data.fingerprint != self._job.data.fingerprint:
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
        recipe, job = self._recipe, self._job
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
            attention=job.attention,
            data=job.data,
            leaks=job.causality is not None and job.causality.leaks,
            causality=job.causality,
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
                "samples_per_second": round(position.samples / position.seconds, 2) if position.seconds else None,
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
        model, objective, position = self._loop.plain_model, self._job.objective, self._loop.position
        Checkpoints(self.folder).load_best(model)
        progress.start("Scoring", len(objective.tests), "sets")
        tests: dict[str, ClassificationScore | LanguageScore] = {}
        for name in objective.tests:
            tests[name] = objective.evaluate(model, name, device)
            progress.advance()
        progress.finish()
        self._write_model(model)
        kind = LanguageScore if self._recipe.task == "language-modeling" else ClassificationScore
        validation = kind.model_validate(position.validation)
        update = {
            "status": "finished",
            "finished": now(),
            "best_epoch": position.best_epoch,
            "validation": validation,
            "test": next(iter(tests.values()), None),
            "tests": tests,
        }
        final = trained.model_copy(update=update)
        scores = {"validation": validation, **tests}
        rows = [row for name, found in scores.items() for row in rows_of("torch", name, found, leaks=final.leaks)]
        merge_rows(self.folder, rows)
        write_run(self.folder, final)

    def _write_model(self, model: nn.Module) -> None:
        with replacing_folder(self.folder / "model") as folder:
            self._job.save(folder, model)
