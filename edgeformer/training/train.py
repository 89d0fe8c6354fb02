"""Command train: a recipe becomes a run, a folder with recipe, manifest, checkpoints, metrics, scores and the model."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import (
    AlreadyReported,
    ArtifactError,
    EdgeformerError,
    InputError,
    InterruptedRun,
    did_you_mean,
)
from edgeformer.artifacts.files import replacing_folder, write_json, write_text
from edgeformer.artifacts.manifest import MemoryUse, RunManifest
from edgeformer.artifacts.progress import SILENT, Lasting, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.scores import EVALUATION_FILE, merge_rows
from edgeformer.artifacts.units import format_bytes
from edgeformer.artifacts.workspace import MODEL_FOLDER, NEW_RUN, RECIPE_FILE, RUN_FILE, free_folder, resume_command
from edgeformer.data.batching import describe_lengths
from edgeformer.data.tokenization import fingerprint
from edgeformer.models import model_spec_of, read_run_recipe
from edgeformer.models.adapter import FittedAdapter, count_parameters
from edgeformer.models.blocks.segments import choose_attention
from edgeformer.models.card import CARD_FILE, model_card
from edgeformer.models.weights import load_weights, save_model
from edgeformer.report.sentences import text_lengths
from edgeformer.run import read_run, run_folders
from edgeformer.runtimes import library_versions
from edgeformer.system import nvidia
from edgeformer.system.host import code_version, describe_host, now
from edgeformer.system.leftovers import new_folder, remove_abandoned
from edgeformer.system.lock import lock_folder
from edgeformer.system.memory import host_free_bytes
from edgeformer.system.signals import handle_signals
from edgeformer.training.loop.checkpoint import CHECKPOINTS_FOLDER, Checkpoints
from edgeformer.training.loop.distributed import Processes, connect
from edgeformer.training.loop.loop import METRICS_FILE, SCORING_S, Fit, MetricsLog, Training, TrainingLoop
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.optimizer import resolve_precision
from edgeformer.training.loop.teacher import with_teacher
from edgeformer.training.plan.memory import check_data_fits, measured_peak, predict_fit, predict_peak
from edgeformer.training.plan.plan import context_of, suggest

_REPEATED_SIGNAL_S = 2.0
_HEADER = "# The resolved recipe of this run; training it again is the same run.\n"


@dataclass(frozen=True)
class TrainOptions:
    """Where and how a recipe is trained. No option changes the meaning of the recipe.

    Attributes:
        artifacts: folder of the runs.
        name: name of the run; None: the recipe's name and a number.
        resume: continue the interrupted run of this name and recipe.
        accelerator: ``auto``: CUDA if torch has a card, else the CPU.
        max_steps: stop after this many optimizer steps; None: the epochs of the recipe.
        as_device: limit a larger CUDA card to the memory that this profile leaves to a process.
        ignore_memory: train although the predicted peak does not fit.
        sharded: several processes shard weights and optimizer state instead of copying them.
        max_s: begin no epoch after so many seconds.
    """

    artifacts: Path
    name: str | None = None
    resume: bool = False
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    max_steps: int | None = None
    as_device: DeviceProfile | None = None
    ignore_memory: bool = False
    sharded: bool = False
    max_s: float = math.inf

    @property
    def flags(self) -> list[str]:
        """Command-line flags that a run needs to be resumed in the same way, beside its recipe."""
        flags = ["--accelerator", self.accelerator] if self.accelerator != "auto" else []
        flags += ["--max-steps", str(self.max_steps)] if self.max_steps is not None else []
        flags += ["--as-device", self.as_device.name] if self.as_device is not None else []
        flags += ["--ignore-memory"] if self.ignore_memory else []
        return [*flags, "--shard"] if self.sharded else flags


def train(recipe: Recipe, options: TrainOptions, progress: Progress = SILENT) -> Path:
    """Train ``recipe`` and return the folder of its finished run.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or it will not fit into memory; nothing was written.
        ArtifactError: no run can be resumed, or another process trains it.
        InterruptedRun: Ctrl-C, SIGTERM or SIGHUP; the run can be resumed.
    """
    adapter, accelerator = model_spec_of(recipe).adapter, options.accelerator
    recipe = adapter.pinned(with_teacher(recipe, options.artifacts))
    if isinstance(adapter, FittedAdapter):
        if accelerator == "cuda":
            raise InputError(f"--accelerator cuda: {recipe.name} is fitted on the CPU; leave it out")
        accelerator = "cpu"
    with StopSignals() as signals, ExitStack() as run_lock:
        processes = connect(recipe, accelerator, sharded=options.sharded)
        signals.ignore_repeated = processes.count > 1
        progress = Lasting(progress) if processes.is_main else SILENT
        with processes.explaining_lost_connection("start again after you have removed the cause"):
            # A function of its own, because the model must be freed before the processes disconnect.
            folder = _train(recipe, options, processes, signals, run_lock, progress)
        # DDP's reducer frees its group while it holds Python's lock, for which a thread of that group may be waiting:
        # the group must outlive the model.
        if processes.count > 1:
            processes.accelerator.free_memory()
            processes.accelerator.end_training()
    return folder


def _train(
    recipe: Recipe, options: TrainOptions, processes: Processes, signals: StopSignals, run_lock: ExitStack,
    progress: Progress,
) -> Path:  # fmt: skip
    """Train in connected processes. ``run_lock`` receives the lock of the run's folder."""

    # 1. Find the run to resume
    def lock_resumed_run() -> Path | None:
        if not options.resume:
            free_folder(options.artifacts, options.name, recipe.name)  # refuses a name that is in use
            return None
        folder = folder_to_resume(recipe, options.artifacts, options.name)
        run_lock.enter_context(lock_folder(folder, "is being trained"))
        remove_abandoned(folder.parent, NEW_RUN)
        # Temporary files of killed processes.
        names = [f"{name}." for name in (RUN_FILE, RECIPE_FILE, METRICS_FILE, EVALUATION_FILE, MODEL_FOLDER)]
        for parent, stems in ((folder, names), (folder / CHECKPOINTS_FOLDER, [""])):
            for path in [path for stem in stems for end in ("tmp*", "old") for path in parent.glob(f".{stem}*.{end}")]:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        return folder

    resumed_folder = processes.on_main(lock_resumed_run)

    # 2. Predict the memory
    is_fitted = isinstance(model_spec_of(recipe).adapter, FittedAdapter)
    with processes.failing_together():
        attention = choose_attention(recipe, processes.device.type, processes.precision)
    if is_fitted:  # its memory depends on the data, which is read first
        if options.as_device is not None:
            raise InputError("--as-device caps the memory of a CUDA card; this run trains on the CPU")
        if not options.ignore_memory:
            check_data_fits(recipe.data)
    else:
        with processes.failing_together(), bar(progress, "Predicting the peak memory", None, ""):
            memory = _plan_memory(recipe, options, processes)

    # 3. Prepare model and data
    with processes.failing_together(), processes.local_main_first():
        has_checkpoint = resumed_folder is not None and any((resumed_folder / CHECKPOINTS_FOLDER).glob("[0-9]*-step-*"))
        cache = options.artifacts / ".cache" / "tokens"
        objective = Objective(recipe, cache, progress, is_resumed=has_checkpoint, device=processes.device)
        objective.attention = attention
    facts = {
        "the recipe's fingerprint": recipe.fingerprint(),
        "the data's fingerprint": objective.prepared.summary.fingerprint,
        "the tokenizer's fingerprint": fingerprint(objective.prepared.tokenizer),
        "the number format": processes.precision,
        "--max-steps": options.max_steps,
    }
    main_facts, *workers = processes.gather(facts)
    for rank, values in enumerate(workers, 1):
        for name in [name for name in facts if values[name] != main_facts[name]]:
            message = (
                f"process {rank} of {processes.count}: {name} is {values[name]}, but {main_facts[name]} in process 0; "
                "use the same recipe, files, options and number format in all processes"
            )
            raise InputError(message) if processes.is_main else AlreadyReported(message, InputError.exit_code)

    # 4. Create or restore the run
    if is_fitted:
        train_rows = objective.prepared.train
        rows = len(train_rows)
        _, breakdown = predict_fit(objective.recipe, rows, int(train_rows.sizes(np.arange(rows)).sum()))
        budget, source = host_free_bytes()
        if breakdown.peak_bytes > budget and not options.ignore_memory:
            raise InputError(
                f"{objective.recipe.name}: the fit would take {format_bytes(breakdown.peak_bytes)} at its peak "
                f"(predicted), and {format_bytes(budget)} are {source}; raise model.minimum_count, take fewer rows "
                "(data.rows), or fit anyway with --ignore-memory"
            )
        memory = MemoryUse(
            device="cpu", predicted_peak_bytes=breakdown.peak_bytes, predicted_reserve_bytes=breakdown.reserve,
            budget_bytes=budget,
        )  # fmt: skip
    loop: Training = Fit(objective, processes) if is_fitted else TrainingLoop(objective, processes)
    record = RunRecord(loop)
    if resumed_folder is None:
        record.create(options, memory, run_lock)
    else:
        record.resume(resumed_folder, progress)
    if processes.is_main:
        record.announce(progress)

    # 5. Train
    command = resume_command(record.folder, options.flags)
    try:
        remedy = f"the run continues from its last checkpoint with: {command}"
        log = closing(MetricsLog(record.folder, loop.position)) if processes.is_main else None
        with (
            signals.deferred() as stop,
            processes.explaining_lost_connection(remedy),
            log or nullcontext() as metrics_log,
        ):
            is_finished = loop.run(stop, metrics_log, progress, options.max_steps, options.max_s)
        step = loop.position.step
        if not is_finished:
            raise InterruptedRun(f"interrupted after step {step}; continue with: {command}")
        if processes.is_main:
            is_cut = step == options.max_steps and step < loop.total_steps
            record.finish(f"stopped by --max-steps {step}" if is_cut else None, progress)
    except (KeyboardInterrupt, InterruptedRun) as error:
        record.stop("interrupted", "stopped by the user")
        if not processes.is_main:
            raise AlreadyReported(str(error), InterruptedRun.exit_code) from None
        hint = f"interrupted; continue from the last checkpoint with: {command}"
        raise InterruptedRun(str(error) or hint) from None
    except BaseException as error:
        folder = record.folder
        if not folder.is_dir():
            raise EdgeformerError(f"{folder}: was removed during training, and nothing is left of the run") from error
        if isinstance(error, OSError) and error.filename is None:  # the system names no file when a disk is full
            error.filename = str(folder)
        record.stop("failed", f"{type(error).__name__}: {error}")
        raise
    return record.folder


class StopSignals(ExitStack):
    """Ctrl-C, SIGTERM and SIGHUP end training cleanly.

    They raise KeyboardInterrupt. Within :meth:`deferred` the first signal only sets an event, which the loop checks
    after each step. Ignored signals stay ignored: see :func:`~edgeformer.system.signals.catching`.
    """

    ignore_repeated = False
    """Ignore a second signal within two seconds: a launcher forwards what the terminal sends to all processes."""

    def __init__(self) -> None:
        super().__init__()
        self._stop: threading.Event | None = None
        self._first_signal_s = 0.0
        self.enter_context(handle_signals(("SIGINT", "SIGTERM", "SIGHUP"), self._on_signal))

    def _on_signal(self, number: int, frame: object) -> None:
        if self._stop is not None:
            if self.ignore_repeated and time.monotonic() - self._first_signal_s < _REPEATED_SIGNAL_S:
                return
            if not self._stop.is_set():
                self._first_signal_s = time.monotonic()
                self._stop.set()
                return
        raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[threading.Event]:
        """Within the block, the first signal sets the event, and only a second one raises KeyboardInterrupt."""
        self._stop = threading.Event()
        try:
            yield self._stop
        finally:
            self._stop = None


def _plan_memory(recipe: Recipe, options: TrainOptions, processes: Processes) -> MemoryUse:
    """Predict the peak of this process and refuse a recipe that does not fit.

    With ``as_device``, torch's allocator is limited to that profile first. Under Windows it is limited to what is free
    on the card: its driver moves what does not fit to system memory, which makes training many times slower.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if processes.device.type == "cuda" else "cpu"
    if kind == "cpu":
        budget, source = host_free_bytes()
        if options.as_device is not None:
            raise InputError(
                "--as-device limits the memory of a CUDA card, but this run trains on the CPU; leave it out"
            )
        if processes.local_count > 1:
            budget, source = budget // processes.local_count, f"{source}, shared by {processes.local_count} processes"
    else:
        budget, source = int(torch.cuda.mem_get_info()[0]), f"free on {torch.cuda.get_device_name()} now"
        torch.cuda.reset_peak_memory_stats()  # a process's resident peak cannot be reset
        card, limits = torch.cuda.get_device_properties(), []
        if nvidia.uses_wddm(f"GPU-{card.uuid}"):
            limits.append(budget + torch.cuda.memory_reserved())
        if (device := options.as_device) is not None:
            usable = device.usable_memory_bytes or device.memory_bytes
            if usable is None:
                raise InputError(f"--as-device {device.name}: this device profile has no memory size; use another one")
            context, context_note = context_of(device)
            limits.append(usable.value - context)
            budget, source = min(budget, limits[-1]), f"what {device.name} leaves to a process{context_note}"
        if limits:
            torch.cuda.set_per_process_memory_fraction(min(1.0, min(limits) / card.total_memory))
    if not options.ignore_memory:
        check_data_fits(recipe.data, processes.local_count)
    share = recipe.model_copy(update={"training": recipe.training.share(processes.count)})
    precision = processes.precision
    breakdown = predict_peak(
        share, device_kind=kind, precision=precision, processes=processes.count, sharded=processes.sharded
    )
    if breakdown.peak_bytes > budget and not options.ignore_memory:
        fast_precision = resolve_precision("auto", kind)
        suggestions = suggest(share, budget, device_kind=kind, precision=precision, fast_precision=fast_precision)
        remedy = "no change of batch, checkpointing, precision or length makes it fit; use a smaller model"
        if best := next((suggestion for suggestion in suggestions if suggestion.fits), None):
            flags = " ".join(f"--set {pair}" for pair in best.set)
            remedy = f"it fits ({format_bytes(best.peak_bytes)}) with {flags} ({best.note})"
        raise InputError(
            f"{recipe.name}: training needs {format_bytes(breakdown.peak_bytes)} at its peak (predicted), and "
            f"{format_bytes(budget)} are {source}; {remedy}, or train anyway with --ignore-memory"
        )
    return MemoryUse(
        device=kind, predicted_peak_bytes=breakdown.peak_bytes, predicted_reserve_bytes=breakdown.reserve,
        budget_bytes=budget,
    )  # fmt: skip


def folder_to_resume(recipe: Recipe, artifacts: Path, name: str | None) -> Path:
    """Return the unfinished run of ``recipe`` called ``name``, or the newest one. Raises ArtifactError."""
    runs = run_folders(artifacts)
    for folder in [artifacts / name] if name else list(reversed(runs)):
        if not (folder / RUN_FILE).is_file():
            names = [run.name for run in runs]
            available = f"{did_you_mean(str(name), names)}runs: {', '.join(names[-8:]) or 'none yet'}"
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
            raise ArtifactError(f"--resume: {folder} has already finished; train again with another --name")
        saved = read_run_recipe(folder)
        if recipe.tokenizer.kind == "trained" and saved.model.vocab_size < recipe.model.vocab_size:
            # The trained tokenizer was smaller, see fitted_recipe; training it again checks that.
            model = recipe.model.model_copy(update={"vocab_size": saved.model.vocab_size})
            recipe = recipe.model_copy(update={"model": model})
        if saved.fingerprint() != recipe.fingerprint():
            old, new = _flatten(saved.model_dump(mode="json")), _flatten(recipe.model_dump(mode="json"))
            differences = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            raise ArtifactError(
                f"--resume: the recipe of {folder} differs in {', '.join(differences)}; resume it with: "
                f"{resume_command(folder)}"
            )
        return folder
    raise ArtifactError(f"--resume: no unfinished run of {recipe.name} in {artifacts}; train without --resume")


def _flatten(value: object, path: str = "") -> dict[str, object]:
    """Return the leaves of nested dicts by their dotted paths."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flatten(item, f"{path}.{key}".strip(".")).items()}
    return {path: value}


class RunRecord:
    """The folder of one run from start to end; only the main process writes into it."""

    manifest: RunManifest
    folder: Path

    def __init__(self, loop: Training) -> None:
        self.loop, self.recipe = loop, loop.objective.recipe

    def _write(self, manifest: RunManifest) -> None:
        self.manifest = manifest
        if self.loop.processes.is_main:
            write_json(self.folder / RUN_FILE, manifest)

    def create(self, options: TrainOptions, memory: MemoryUse, run_lock: ExitStack) -> None:
        """Create and lock the folder of a new run, see :func:`free_folder`. Raises InputError.

        It appears with recipe and manifest in it: a killed process leaves no empty folder that blocks a name.
        """
        recipe, objective, loop = self.recipe, self.loop.objective, self.loop

        def fill(folder: Path) -> None:
            write_text(folder / RECIPE_FILE, _HEADER + recipe.to_yaml())
            host = {**describe_host(), "accelerator": str(loop.device), "threads": torch.get_num_threads()}
            if loop.device.type == "cuda":
                host["gpu"] = torch.cuda.get_device_name(loop.device)
            self.manifest = RunManifest(
                run=folder.name, status="running", task=recipe.task, recipe=recipe.name,
                recipe_sha256=recipe.fingerprint(), started=now(), parameters=count_parameters(loop.plain_model),
                vocabulary=recipe.model.vocab_size, precision=loop.processes.precision, attention=objective.attention,
                data=objective.prepared.summary, tokenizer_fingerprint=fingerprint(objective.prepared.tokenizer),
                leaks=objective.causality is not None and objective.causality.leaks, causality=objective.causality,
                memory=memory, effective_batch=loop.effective_batch, processes=loop.processes.count,
                versions=library_versions(), code_version=code_version(), host=host,
            )  # fmt: skip
            write_json(folder / RUN_FILE, self.manifest)

        free = partial(free_folder, options.artifacts, options.name, recipe.name)
        self.folder = loop.processes.on_main(partial(new_folder, NEW_RUN, free, fill))
        loop.checkpoints = Checkpoints(self.folder)
        if loop.processes.is_main:
            run_lock.enter_context(lock_folder(self.folder, "is being trained"))

    def resume(self, folder: Path, progress: Progress) -> None:
        """Restore the state of a resumed run.

        Raises InputError if data, tokenizer or precision have changed, ArtifactError if its checkpoints are damaged.
        """
        self.folder, self.loop.checkpoints = folder, Checkpoints(folder)
        count, precision = self.loop.processes.count, self.loop.processes.precision
        with self.loop.processes.failing_together():
            manifest, prepared = read_run(folder), self.loop.objective.prepared
            tokenizer = fingerprint(prepared.tokenizer)
            facts = {  # at the beginning, and now
                "tokenizer": (manifest.tokenizer_fingerprint or tokenizer, tokenizer),
                "data": (manifest.data.fingerprint, prepared.summary.fingerprint),
                "number format": (manifest.precision, precision),
            }
            for name, (original, current) in facts.items():
                if current != original:
                    raise InputError(
                        f"{folder}: the {name} changed since this run began (from {original[:12]} to {current[:12]}); "
                        "resume it with the original one, or train again without --resume"
                    )
        if manifest.processes != count:
            progress.message(
                f"continuing with {count} processes instead of {manifest.processes}; the optimizer steps stay the same"
            )
        self.loop.resume(progress)
        update = {"status": "running", "reason": None, "processes": count, "attention": self.loop.objective.attention}
        self._write(manifest.model_copy(update=update))

    def announce(self, progress: Progress) -> None:
        """Report size, precision and rows of the run, and all warnings about its data."""
        manifest, loop, processes, config = self.manifest, self.loop, self.loop.processes, self.recipe.data
        data = manifest.data
        rows = ", ".join(f"{name} {count:,}" for name, count in data.rows.items())
        progress.message(f"run {manifest.run}: {manifest.parameters:,} parameters, {manifest.precision}, {rows}")
        if processes.count > 1:
            portion = "a part of the model" if processes.sharded else "a copy of the model"
            progress.message(f"{processes.count} processes train it together; each has {portion}")
        if manifest.leaks:
            progress.message("LEAKS FUTURE TOKENS: the model sees the tokens that it predicts; its scores are void")
        if data.synthetic:
            progress.message("SYNTHETIC data: reviews made by a generator, not real text")
        for overlap in data.overlap:
            if overlap.duplicates or overlap.contained:
                progress.message(
                    f"{overlap.test_set}: of {overlap.test_rows:,} texts, {overlap.duplicates:,} are also training "
                    f"texts and {overlap.contained:,} more share a whole phrase with one, so its scores are too good"
                )
        for warning in (config.row_count_warning(data.rows["train"]), *(finding.message for finding in data.findings)):
            if warning is not None:
                progress.message(warning)
        if loop.effective_batch is not None and "train" in data.text_words and not config.stream:
            training, words = self.recipe.training, text_lengths(data.text_words["train"], "words")
            encoded, bucketed = loop.objective.prepared.train, training.batching == "bucketed"
            tokens = describe_lengths(encoded, training.batch_size, bucketed=bucketed, max_length=config.tokens_at_once)
            progress.message(f"train: texts of {words}; {tokens}")
        for name, count in data.truncated_rows.items():
            if count:
                texts = "text was" if count == 1 else "texts were"
                progress.message(
                    f"{name}: {count:,} {texts} cut to data.{config.length_key} ({config.tokens_at_once} tokens)"
                )
        for line in loop.unused:
            progress.message(line)
        if loop.position.step:
            progress.message(f"resuming after step {loop.position.step} of {loop.total_steps}")

    def _updated_manifest(self) -> RunManifest:
        position, memory = self.loop.position, self.manifest.memory
        if memory is not None:
            peak, description = measured_peak(memory.device)
            memory = memory.model_copy(update={"measured_peak_bytes": peak, "measured_as": description})
        seconds = position.training_seconds
        update = {
            "seconds": round(position.seconds, 3), "steps": position.step, "epochs": position.epoch,
            "batch_size": position.batch_size or None, "skipped_steps": position.skipped, "memory": memory,
            "chosen": self.loop.chosen,
            "samples_per_second": round(position.samples / seconds, 2) if seconds else None,
        }  # fmt: skip
        return self.manifest.model_copy(update=update)

    def stop(self, status: Literal["interrupted", "failed"], reason: str) -> None:
        """Record that the run did not finish, if that can be written. A removed folder is not created again."""
        update = {"status": status, "reason": reason, "finished": now()}
        with contextlib.suppress(OSError):  # the user must see what ended the run, not that the disk is full too
            if self.loop.processes.is_main and self.folder.is_dir():
                self._write(self._updated_manifest().model_copy(update=update))

    def finish(self, reason: str | None, progress: Progress) -> None:
        """Score the best weights on every test set and write the model. ``reason``: why training ended early."""
        manifest = self._updated_manifest()  # before scoring adds to the peak
        objective, processes, position = self.loop.objective, self.loop.processes, self.loop.position
        # Shards cannot load a checkpoint's weights.
        model = self.loop.plain_model
        if processes.sharded:
            model = objective.model_spec.adapter.build(objective.recipe).to(processes.device)
        if position.best_value is None:
            raise ArtifactError(
                f"{self.loop.checkpoints.best}: does not belong to the checkpoint; train again without --resume"
            )
        load_weights(model, self.loop.checkpoints.best)
        validation = objective.task.score_type.model_validate(position.validation)
        # The task may choose values by the validation score; the run's recipe.yaml keeps the requested ones.
        objective.recipe = objective.task.settled(objective.recipe, validation)
        sets, max_s = objective.prepared.tests, SCORING_S if reason is not None and not position.epoch else math.inf
        with bar(progress, f"Scoring {', '.join(sets)}", sum(map(len, sets.values())), "rows"):
            tests = {name: objective.evaluate(model, name, progress=progress, max_s=max_s) for name in sets}
        rows = [
            row
            for name, score in {"validation": validation, **tests}.items()
            for row in objective.task.evaluation_rows("torch", name, score, leaks=manifest.leaks)
        ]
        merge_rows(self.folder, rows)
        update = {
            "status": "finished", "reason": reason, "finished": now(), "best_epoch": position.best_epoch,
            "validation": validation, "test": next(iter(tests.values()), None), "tests": tests,
        }  # fmt: skip
        final = manifest.model_copy(update=update)
        with replacing_folder(self.folder / MODEL_FOLDER) as folder:
            save_model(folder, model, objective.recipe, objective.prepared)
            write_text(folder / CARD_FILE, model_card(final, objective.recipe))
        self._write(final)
