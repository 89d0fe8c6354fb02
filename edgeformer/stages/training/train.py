"""train: a recipe becomes a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import nn

from edgeformer.data.prepare import PreparedData, prepare
from edgeformer.models.build import build_encoder
from edgeformer.models.encoder import count_parameters
from edgeformer.schema.errors import InputError, InterruptedRun
from edgeformer.schema.evaluation import merge_rows, row_of
from edgeformer.schema.files import replacing_folder
from edgeformer.schema.host import code_version, describe_host, library_versions, now
from edgeformer.schema.manifest import AttentionUse, ClassificationScore, RunManifest
from edgeformer.schema.progress import Progress, Silent
from edgeformer.schema.recipe import Recipe
from edgeformer.schema.workspace import read_run
from edgeformer.stages.training.checkpoints import Checkpoints
from edgeformer.stages.training.interrupt import stop_on_interrupt
from edgeformer.stages.training.loop import TrainingLoop, evaluate
from edgeformer.stages.training.metrics_log import MetricsLog
from edgeformer.stages.training.model_folder import write_model
from edgeformer.stages.training.precision import resolve_precision
from edgeformer.stages.training.run_folder import check_name, folder_to_resume, new_folder, write_recipe, write_run


@dataclass(frozen=True)
class TrainOptions:
    """Where and how a recipe is trained; nothing here changes what the recipe means."""

    artifacts: Path
    name: str | None = None
    resume: bool = False
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    max_steps: int | None = None


def train(recipe: Recipe, options: TrainOptions, progress: Progress | None = None) -> Path:
    """Train ``recipe`` and return the folder of its finished run.

    Raises:
        InputError: recipe, data or tokenizer cannot be used; nothing was written.
        InterruptedRun: Ctrl-C; the run can be resumed.
    """
    progress = progress or Silent()
    resumed = folder_to_resume(recipe, options.artifacts, options.name) if options.resume else None
    if resumed is None and options.name is not None:
        check_name(options.artifacts, options.name)
    accelerator, precision = _accelerator(recipe, options)
    data = prepare(recipe, options.artifacts / ".cache" / "tokens", progress)
    set_seed(recipe.seed)
    model, why_not_flash = build_encoder(
        recipe.model, recipe.classes, device_type=accelerator.device.type, precision=precision
    )
    if why_not_flash:
        progress.message(f"model.attention: flash is not used, torch SDPA instead: {why_not_flash}")
    loop = TrainingLoop(recipe, data, model, accelerator)
    folder = resumed or new_folder(recipe, options.artifacts, options.name)
    loop.checkpoints = Checkpoints(folder)
    run = _Run(folder, recipe, data, loop)
    manifest = run.begin(accelerator, why_not_flash, resumed is not None)
    _announce(manifest, loop, progress)
    try:
        with stop_on_interrupt() as stop, MetricsLog(run.folder, loop.position.step) as log:
            outcome = loop.run(stop, log, progress, options.max_steps)
        if outcome.interrupted:
            raise InterruptedRun(
                f"interrupted after step {outcome.position.step}; go on with --resume --name {run.folder.name}"
            )
        if options.max_steps is not None and outcome.position.step == options.max_steps < loop.total_steps:
            manifest = manifest.model_copy(update={"reason": f"stopped by --max-steps {options.max_steps}"})
        run.finish(manifest, accelerator.device, progress)
    except (KeyboardInterrupt, InterruptedRun) as error:
        run.stop(manifest, "interrupted", "stopped by the user")
        raise InterruptedRun(str(error) or _how_to_go_on(run.folder)) from None
    except BaseException as error:
        run.stop(manifest, "failed", f"{type(error).__name__}: {error}")
        raise
    return run.folder


def _accelerator(recipe: Recipe, options: TrainOptions) -> tuple[Accelerator, str]:
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--accelerator cuda: torch sees no CUDA card here; run edgeformer doctor, or use --accelerator cpu"
        )
    use_cpu = options.accelerator == "cpu" or not torch.cuda.is_available()
    precision = resolve_precision(recipe.training.precision, "cpu" if use_cpu else "cuda")
    # Accelerate keeps its settings for the life of the process and refuses others; each run brings its own.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        gradient_accumulation_steps=recipe.training.accumulation,
        cpu=use_cpu,
    )
    return accelerator, precision


def _announce(manifest: RunManifest, loop: TrainingLoop, progress: Progress) -> None:
    rows = ", ".join(f"{name} {count:,}" for name, count in manifest.data.rows.items())
    progress.message(f"run {manifest.run}: {manifest.parameters:,} parameters, {manifest.precision}, {rows}")
    if manifest.data.synthetic:
        progress.message("data: SYNTHETIC reviews made by a generator, not real text")
    for overlap in manifest.data.overlap:
        if overlap.duplicates or overlap.contained:
            progress.message(
                f"split {manifest.data.split}: of {overlap.test_rows:,} texts in {overlap.test_set}, "
                f"{overlap.duplicates:,} are also training texts and {overlap.contained:,} more share a whole "
                "phrase with one; scores on it are flattered by that"
            )
    for name, rows_cut in manifest.data.truncated_rows.items():
        if rows_cut:
            progress.message(f"{name}: {rows_cut:,} texts were cut to data.max_length")
    if loop.position.step:
        progress.message(f"resuming after step {loop.position.step} of {loop.total_steps}")


def _how_to_go_on(folder: Path) -> str:
    if (folder / "checkpoints" / "last").is_dir():
        return f"interrupted; go on from the last checkpoint with --resume --name {folder.name}"
    return f"interrupted before the first checkpoint; nothing in {folder} can be resumed"


def _precision(accelerator: Accelerator) -> str:
    return "fp32" if accelerator.mixed_precision == "no" else str(accelerator.mixed_precision)


class _Run:
    """What is written into the run's folder, and when."""

    def __init__(self, folder: Path, recipe: Recipe, data: PreparedData, loop: TrainingLoop) -> None:
        self.folder, self._recipe, self._data, self._loop = folder, recipe, data, loop

    def begin(self, accelerator: Accelerator, why_not_flash: str | None, resumed: bool) -> RunManifest:
        """Write recipe and manifest of a new run, or restore the state of a resumed one."""
        if resumed:
            old = read_run(self.folder)
            if old.data.fingerprint != self._data.summary.fingerprint:
                raise InputError(f"{self.folder}: the data changed since this run began; train again without --resume")
            precision = _precision(accelerator)
            if old.precision != precision:
                raise InputError(
                    f"{self.folder}: was trained in {old.precision}, this machine would go on in {precision}; "
                    f"add --set training.precision={old.precision} and train anew, or resume where it began"
                )
            self._loop.resume()
            manifest = old.model_copy(update={"status": "running", "reason": None})
        else:
            write_recipe(self.folder, self._recipe)
            manifest = self._fresh_manifest(accelerator, why_not_flash)
        write_run(self.folder, manifest)
        return manifest

    def _fresh_manifest(self, accelerator: Accelerator, why_not_flash: str | None) -> RunManifest:
        recipe = self._recipe
        requested = recipe.model.attention
        return RunManifest(
            run=self.folder.name,
            status="running",
            task=recipe.task,
            recipe=recipe.name,
            recipe_sha256=recipe.fingerprint(),
            started=now(),
            parameters=count_parameters(self._loop.plain_model),
            vocabulary=recipe.model.vocab_size,
            precision=_precision(accelerator),
            attention=AttentionUse(
                requested=requested, used="sdpa" if why_not_flash else requested, reason=why_not_flash
            ),
            data=self._data.summary,
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
        return manifest.model_copy(
            update={
                "seconds": round(position.seconds, 3),
                "steps": position.step,
                "epochs": position.epoch,
                "samples_per_second": round(position.samples / position.seconds, 2) if position.seconds else None,
            }
        )

    def stop(self, manifest: RunManifest, status: Literal["interrupted", "failed"], reason: str) -> None:
        """Record that the run did not finish."""
        update = {"status": status, "reason": reason, "finished": now()}
        write_run(self.folder, self._progressed(manifest).model_copy(update=update))

    def finish(self, manifest: RunManifest, device: torch.device, progress: Progress) -> None:
        """Score the best weights on every test set and write the model."""
        model = self._loop.plain_model
        Checkpoints(self.folder).load_best(model)
        pad = self._data.special.pad
        progress.start("Scoring", len(self._data.tests), "sets")
        tests: dict[str, ClassificationScore] = {}
        for name, encoded in self._data.tests.items():
            tests[name] = evaluate(model, encoded, pad, device)
            progress.advance()
        progress.finish()
        self._write_model(model)
        position = self._loop.position
        update = {
            "status": "finished",
            "finished": now(),
            "best_epoch": position.best_epoch,
            "validation": ClassificationScore(**position.validation),
            "test": next(iter(tests.values())),
            "tests": tests,
        }
        final = self._progressed(manifest).model_copy(update=update)
        scores = {"validation": final.validation, **tests}
        merge_rows(self.folder, [row_of("torch", name, found) for name, found in scores.items() if found])
        write_run(self.folder, final)

    def _write_model(self, model: nn.Module) -> None:
        with replacing_folder(self.folder / "model") as folder:
            write_model(folder, model, self._recipe, self._data)
