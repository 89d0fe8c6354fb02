"""Command train: a recipe becomes a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import Self

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import AlreadyReported, EdgeformerError, InputError, InterruptedRun
from edgeformer.artifacts.manifest import MemoryUse
from edgeformer.artifacts.progress import SILENT, Lasting, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import free_folder, resume_command
from edgeformer.data.tokenization import fingerprint
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import BuildTarget
from edgeformer.system.lock import lock_folder
from edgeformer.system.signals import handle_signals
from edgeformer.training.checkpoint import Checkpoints
from edgeformer.training.distributed import Processes, connect
from edgeformer.training.loop import TrainingLoop
from edgeformer.training.memory import (
    cap_allocator,
    check_data_fits,
    free_bytes,
    predict_peak,
    share_of,
    spills_to_system_memory,
)
from edgeformer.training.metrics import MetricsLog
from edgeformer.training.objective import Objective, with_teacher
from edgeformer.training.plan import check_fits, context_of
from edgeformer.training.run_folder import RunRecord, folder_to_resume, remove_leftovers

_REPEATED_SIGNAL_S = 2.0


@dataclass(frozen=True)
class TrainOptions:
    """Where and how a recipe is trained. No option changes the meaning of the recipe.

    Attributes:
        as_device: limit a larger CUDA card to the memory that this profile leaves to a process.
        ignore_memory: train although the predicted peak does not fit.
        sharded: several processes shard weights and optimizer state instead of copying them.
    """

    artifacts: Path
    name: str | None = None
    resume: bool = False
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    max_steps: int | None = None
    as_device: DeviceProfile | None = None
    ignore_memory: bool = False
    sharded: bool = False

    @property
    def flags(self) -> list[str]:
        """Command-line flags that a run needs to be resumed in the same way, beside its recipe."""
        values: dict[str, object] = {
            "--accelerator": self.accelerator if self.accelerator != "auto" else None,
            "--max-steps": self.max_steps,
            "--as-device": self.as_device and self.as_device.name,
        }
        switches = {"--ignore-memory": self.ignore_memory, "--shard": self.sharded}
        pairs = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
        return [*pairs, *(flag for flag, is_set in switches.items() if is_set)]


def train(recipe: Recipe, options: TrainOptions, progress: Progress = SILENT) -> Path:
    """Train ``recipe`` and return the folder of its finished run.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or it will not fit into memory; nothing was written.
        ArtifactError: no run can be resumed, or another process trains it.
        InterruptedRun: Ctrl-C, SIGTERM or SIGHUP; the run can be resumed.
    """
    recipe = model_spec_of(recipe).adapter.pinned(with_teacher(recipe, options.artifacts))
    with StopSignals() as signals, ExitStack() as run_lock:
        processes = connect(recipe, options.accelerator, sharded=options.sharded)
        signals.ignore_repeated = processes.count > 1
        progress = Lasting(progress) if processes.is_main else SILENT
        with processes.explaining_lost_connection("start again when it is known why"):
            # A function of its own, because the model must be freed before the processes disconnect.
            folder = _train(recipe, options, processes, signals, run_lock, progress)
        processes.disconnect()
    return folder


def _train(
    recipe: Recipe,
    options: TrainOptions,
    processes: Processes,
    signals: StopSignals,
    run_lock: ExitStack,
    progress: Progress,
) -> Path:
    """Train in connected processes. ``run_lock`` receives the lock of the run's folder."""

    def lock_resumed_run() -> Path | None:
        if not options.resume:
            free_folder(options.artifacts, options.name, recipe.name)  # refuses a name that is in use
            return None
        folder = folder_to_resume(recipe, options.artifacts, options.name)
        run_lock.enter_context(lock_folder(folder, "is being trained"))
        remove_leftovers(folder)
        return folder

    def create_run() -> Path:
        record.create(options.artifacts, options.name, memory)
        run_lock.enter_context(lock_folder(record.folder, "is being trained"))
        return record.folder

    resumed_folder = processes.on_main(lock_resumed_run)
    with processes.failing_together():
        with bar(progress, "Predicting the peak memory", None, ""):
            memory = _plan_memory(recipe, options, processes)
        place = BuildTarget(processes.device.type, processes.precision)
    with processes.failing_together(), processes.local_main_first():
        cache = options.artifacts / ".cache" / "tokens"
        has_checkpoint = resumed_folder is not None and Checkpoints(resumed_folder).any
        objective = Objective(recipe, cache, place, progress, is_resumed=has_checkpoint)
    processes.require_equal(
        {
            "the recipe's fingerprint": recipe.fingerprint(),
            "the data's fingerprint": objective.prepared.summary.fingerprint,
            "the tokenizer's fingerprint": fingerprint(objective.prepared.tokenizer),
            "the number format": processes.precision,
            "--max-steps": options.max_steps,
        }
    )
    loop = TrainingLoop(objective, processes)
    record = RunRecord(objective, loop)
    if resumed_folder is None:
        record.use_folder(processes.on_main(create_run))
    else:
        record.resume(resumed_folder, progress)
    if processes.is_main:
        _announce(record, loop, progress)
    _run_loop(record, loop, signals, progress, options)
    return record.folder


def _run_loop(
    record: RunRecord, loop: TrainingLoop, signals: StopSignals, progress: Progress, options: TrainOptions
) -> None:
    """Train to the end, and record in the manifest how training ended."""
    folder, processes, max_steps = record.folder, loop.processes, options.max_steps
    command = resume_command(folder, options.flags)
    try:
        remedy = f"the run goes on from its last checkpoint with: {command}"
        log = closing(MetricsLog(folder, loop.position, progress.message)) if processes.is_main else nullcontext()
        with signals.deferred() as stop, processes.explaining_lost_connection(remedy), log as metrics_log:
            is_finished = loop.run(stop, metrics_log, progress, max_steps)
        step = loop.position.step
        if not is_finished:
            raise InterruptedRun(f"interrupted after step {step}; go on with: {command}")
        if processes.is_main:
            is_cut = step == max_steps and step < loop.total_steps
            record.finish(f"stopped by --max-steps {step}" if is_cut else None, progress)
    except (KeyboardInterrupt, InterruptedRun) as error:
        record.stop("interrupted", "stopped by the user")
        if not processes.is_main:
            raise AlreadyReported(str(error), InterruptedRun.exit_code) from None
        hint = f"interrupted; go on from the last checkpoint with: {command}"
        raise InterruptedRun(str(error) or hint) from None
    except BaseException as error:
        if not folder.is_dir():
            raise EdgeformerError(f"{folder}: was removed while it was being trained; nothing is left of it") from error
        if isinstance(error, OSError) and error.filename is None:  # the system names no file when a disk is full
            error.filename = str(folder)
        record.stop("failed", f"{type(error).__name__}: {error}")
        raise


class StopSignals:
    """Ctrl-C, SIGTERM and SIGHUP end training cleanly.

    They raise KeyboardInterrupt. Within :meth:`deferred` the first signal only sets an event, which the loop checks
    after each step. Ignored signals stay ignored: see :func:`~edgeformer.system.signals.catching`.
    """

    ignore_repeated = False
    """Ignore a second signal within two seconds: a launcher forwards what the terminal sends to all processes."""

    def __init__(self) -> None:
        self._stop: threading.Event | None = None
        self._first_signal_s = 0.0
        self._catching = handle_signals(("SIGINT", "SIGTERM", "SIGHUP"), self._on_signal)

    def __enter__(self) -> Self:
        self._catching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._catching.__exit__(*error)

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

    With ``as_device``, torch's allocator is limited to that profile first; under Windows, to what is free on the card.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if processes.device.type == "cuda" else "cpu"
    budget, source = free_bytes(kind)
    if kind == "cpu" and processes.local_count > 1:
        budget, source = budget // processes.local_count, f"a {processes.local_count}th of what is {source}"
    if options.as_device is not None:
        budget, source = _limit_to_profile(options.as_device, kind, budget)
    elif kind == "cuda" and spills_to_system_memory():
        cap_allocator(budget + torch.cuda.memory_reserved())
    if kind == "cuda":  # a process's resident peak cannot be reset
        torch.cuda.reset_peak_memory_stats()
    share, count = share_of(recipe, processes.count), processes.count
    precision, sharded = processes.precision, processes.sharded
    if options.ignore_memory:
        breakdown = predict_peak(share, device_kind=kind, precision=precision, processes=count, sharded=sharded)
    else:
        check_data_fits(recipe.data, processes.local_count)
        breakdown = check_fits(
            share, device_kind=kind, precision=precision, free=(budget, source), processes=count, sharded=sharded
        )
    return MemoryUse(
        device=kind,
        predicted_peak_bytes=breakdown.peak_bytes,
        predicted_reserve_bytes=breakdown.reserve,
        budget_bytes=budget,
    )


def _limit_to_profile(device: DeviceProfile, device_type: str, free: int) -> tuple[int, str]:
    """Limit torch's allocator to a profile's usable memory; return the budget in bytes and its description."""
    if device_type != "cuda":
        raise InputError("--as-device caps the memory of a CUDA card; this run trains on the CPU")
    usable = device.usable_memory_bytes or device.memory_bytes
    if usable is None:
        raise InputError(f"--as-device {device.name}: its profile says nothing about memory; name a GPU's profile")
    context, context_note = context_of(device)
    limit = usable.value - context
    cap_allocator(min(free + torch.cuda.memory_reserved(), limit) if spills_to_system_memory() else limit)
    return min(free, limit), f"what {device.name} leaves to a process{context_note}"


def _announce(record: RunRecord, loop: TrainingLoop, progress: Progress) -> None:
    """Report size, precision and rows of the run, and all warnings about its data."""
    manifest = record.manifest
    data = manifest.data
    rows = ", ".join(f"{name} {count:,}" for name, count in data.rows.items())
    progress.message(f"run {manifest.run}: {manifest.parameters:,} parameters, {manifest.precision}, {rows}")
    if loop.processes.count > 1:
        portion = "a part of the model" if loop.processes.sharded else "a copy of the model"
        progress.message(f"{loop.processes.count} processes train it together, each with {portion}")
    if manifest.leaks:
        progress.message("LEAKS FUTURE TOKENS: the model sees the tokens that it predicts; its scores mean nothing")
    if data.synthetic:
        progress.message("data: SYNTHETIC reviews made by a generator, not real text")
    for overlap in data.overlap:
        if overlap.duplicates or overlap.contained:
            progress.message(
                f"split {data.split}: of {overlap.test_rows:,} texts in {overlap.test_set}, "
                f"{overlap.duplicates:,} are also training texts and {overlap.contained:,} more share a whole "
                "phrase with one; scores on it are flattered by that"
            )
    if (row_count_warning := record.recipe.data.row_count_warning(data.rows["train"])) is not None:
        progress.message(row_count_warning)
    for warning in data.findings:
        progress.message(warning.message)
    for name, count in data.truncated_rows.items():
        if count:
            progress.message(
                f"{name}: {count:,} {'text was' if count == 1 else 'texts were'} cut to the recipe's length"
            )
    for message in loop.unused_options:
        progress.message(message)
    if loop.position.step:
        progress.message(f"resuming after step {loop.position.step} of {loop.total_steps}")
