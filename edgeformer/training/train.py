"""train: a recipe becomes a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from typing_extensions import Self

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import EdgeformerError, InputError, InterruptedRun, ToldElsewhere
from edgeformer.artifacts.manifest import MemoryUse
from edgeformer.artifacts.progress import SILENT, Lasting, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.workspace import free_folder, resume_command
from edgeformer.data.tokenization import fingerprint
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import Place
from edgeformer.system.lock import locked
from edgeformer.system.signals import catching
from edgeformer.training.checkpoint import Checkpoints
from edgeformer.training.distributed import Processes, connect
from edgeformer.training.loop import TrainingLoop
from edgeformer.training.memory import cap_allocator, check_data_fits, free_bytes, predict_peak, share_of, spills
from edgeformer.training.metrics import MetricsLog, NoLog
from edgeformer.training.objective import Objective
from edgeformer.training.plan import check_fits, context_of
from edgeformer.training.run_folder import RunRecord, folder_to_resume, remove_leftovers
from edgeformer.training.teacher import with_teacher

_SAME_SIGNAL_S = 2.0


@dataclass(frozen=True)
class TrainOptions:
    """Where and how a recipe is trained; nothing here changes what the recipe means.

    Attributes:
        as_device: cap a larger CUDA card to the memory that this profile leaves to a process.
        ignore_memory: train although the prediction says that it does not fit.
        sharded: where several processes train, spread weights and optimizer state over them instead of copying them.
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
        """Those of the command line that a run needs again to go on as it was started; a recipe holds the others."""
        said: dict[str, object] = {"--accelerator": self.accelerator if self.accelerator != "auto" else None}
        said |= {"--max-steps": self.max_steps, "--as-device": self.as_device and self.as_device.name}
        switches = {"--ignore-memory": self.ignore_memory, "--shard": self.sharded}
        pairs = [word for flag, value in said.items() if value is not None for word in (flag, str(value))]
        return [*pairs, *(flag for flag, given in switches.items() if given)]


def train(recipe: Recipe, options: TrainOptions, progress: Progress = SILENT) -> Path:
    """Train ``recipe`` and return the folder of its finished run.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or it will not fit into memory; nothing was written.
        ArtifactError: nothing can be resumed, or another process trains that run.
        InterruptedRun: Ctrl-C, SIGTERM or SIGHUP; the run can be resumed.
    """
    recipe = model_spec_of(recipe).adapter.pinned(with_teacher(recipe, options.artifacts))
    with StopSignals() as signals, ExitStack() as held:
        processes = connect(recipe, options.accelerator, sharded=options.sharded)
        signals.repeated = processes.count > 1
        progress = Lasting(progress) if processes.main else SILENT
        with processes.connected("start again when it is known why"):
            folder = _train(recipe, options, processes, signals, held, progress)
        processes.part()
    return folder


def _train(
    recipe: Recipe,
    options: TrainOptions,
    processes: Processes,
    signals: StopSignals,
    held: ExitStack,
    progress: Progress,
) -> Path:
    """``held`` keeps the lock of the run's folder."""
    resumed = processes.on_main(lambda: _take(recipe, options, held))
    with processes.agreeing():
        with bar(progress, "Predicting the peak memory", None, ""):
            memory = _memory(recipe, options, processes)
        place = Place(processes.device.type, processes.precision)
    with processes.agreeing(), processes.one_first():
        cache = options.artifacts / ".cache" / "tokens"
        goes_on = resumed is not None and Checkpoints(resumed).any
        objective = Objective(recipe, cache, place, progress, goes_on=goes_on)
    processes.compare(
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
    if resumed is None:
        record.is_in(processes.on_main(lambda: _begin(record, options, memory, held)))
    else:
        record.resume(resumed, progress)
    if processes.main:
        _announce(record, loop, progress)
    _run(record, loop, signals, progress, options)
    return record.folder


def _take(recipe: Recipe, options: TrainOptions, held: ExitStack) -> Path | None:
    """The folder of the run to resume, now this process's; None: a new one, whose name is free."""
    if not options.resume:
        free_folder(options.artifacts, options.name, recipe.name)
        return None
    folder = folder_to_resume(recipe, options.artifacts, options.name)
    held.enter_context(locked(folder, "is being trained"))
    remove_leftovers(folder)
    return folder


def _begin(record: RunRecord, options: TrainOptions, memory: MemoryUse, held: ExitStack) -> Path:
    record.begin(options.artifacts, options.name, memory)
    held.enter_context(locked(record.folder, "is being trained"))
    return record.folder


def _run(
    record: RunRecord, loop: TrainingLoop, signals: StopSignals, progress: Progress, options: TrainOptions
) -> None:
    """Train to the end, and write down how it ended."""
    folder, processes, max_steps = record.folder, loop.processes, options.max_steps
    again = resume_command(folder, options.flags)
    try:
        then = f"the run goes on from its last checkpoint with: {again}"
        written = closing(MetricsLog(folder, loop.position, progress.message) if processes.main else NoLog())
        with signals.deferred() as stop, processes.connected(then), written as log:
            finished = loop.run(stop, log, progress, max_steps)
        step = loop.position.step
        if not finished:
            raise InterruptedRun(f"interrupted after step {step}; go on with: {again}")
        if not processes.main:  # one is enough to score it
            return
        cut = step == max_steps and step < loop.total_steps
        record.finish(f"stopped by --max-steps {step}" if cut else None, progress)
    except (KeyboardInterrupt, InterruptedRun) as error:
        record.stop("interrupted", "stopped by the user")
        if not processes.main:
            raise ToldElsewhere(str(error), InterruptedRun.exit_code) from None
        hint = f"interrupted; go on from the last checkpoint with: {again}"
        raise InterruptedRun(str(error) or hint) from None
    except BaseException as error:
        if not folder.is_dir():
            raise EdgeformerError(f"{folder}: was removed while it was being trained; nothing is left of it") from error
        if isinstance(error, OSError) and error.filename is None:  # the system names no file when a disk is full
            error.filename = str(folder)
        record.stop("failed", f"{type(error).__name__}: {error}")
        raise


class StopSignals:
    """Ctrl-C, and what systems send to a process that shall end or whose terminal is gone, end training cleanly.

    They stop at once (KeyboardInterrupt), but while :meth:`deferred` the first one is a flag that the loop looks at
    after each step. Those that are ignored stay so: see :func:`~edgeformer.system.signals.catching`.
    """

    repeated = False
    """A launcher sends on what the terminal has sent already: within two seconds it is the same signal."""

    def __init__(self) -> None:
        self._stop: threading.Event | None = None
        self._first = 0.0
        self._catching = catching(("SIGINT", "SIGTERM", "SIGHUP"), self._on_signal)

    def __enter__(self) -> Self:
        self._catching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._catching.__exit__(*error)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.repeated and self._stop is not None and time.monotonic() - self._first < _SAME_SIGNAL_S:
            return
        if self._stop is None or self._stop.is_set():
            raise KeyboardInterrupt
        self._first = time.monotonic()
        self._stop.set()

    @contextmanager
    def deferred(self) -> Iterator[threading.Event]:
        """Within, the first signal sets the event, and only a second one stops at once."""
        self._stop = threading.Event()
        try:
            yield self._stop
        finally:
            self._stop = None


def _memory(recipe: Recipe, options: TrainOptions, processes: Processes) -> MemoryUse:
    """Predict the peak and refuse what cannot fit.

    With ``as_device``, the allocator is capped to that profile first; under Windows' WDDM to what is free on the card.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if processes.device.type == "cuda" else "cpu"
    free, what = free_bytes(kind)
    if kind == "cpu" and processes.here > 1:
        free, what = free // processes.here, f"a {processes.here}th of what is {what}"
    if options.as_device is not None:
        free, what = _cap(options.as_device, kind, free)
    elif kind == "cuda" and spills():
        cap_allocator(free + torch.cuda.memory_reserved())
    if kind == "cuda":  # a process's resident peak only ever grows
        torch.cuda.reset_peak_memory_stats()
    share, precision = share_of(recipe, processes.count), processes.precision
    count, sharded = processes.count, processes.sharded
    if options.ignore_memory:
        breakdown = predict_peak(share, device_kind=kind, precision=precision, processes=count, sharded=sharded)
    else:
        check_data_fits(recipe.data, processes.here)
        breakdown = check_fits(
            share, device_kind=kind, precision=precision, free=(free, what), processes=count, sharded=sharded
        )
    return MemoryUse(
        device=kind,
        predicted_peak_bytes=breakdown.peak_bytes,
        predicted_reserve_bytes=breakdown.reserve,
        budget_bytes=free,
    )


def _cap(device: DeviceProfile, device_type: str, free: int) -> tuple[int, str]:
    if device_type != "cuda":
        raise InputError("--as-device caps the memory of a CUDA card; this run trains on the CPU")
    usable = device.usable_memory_bytes or device.memory_bytes
    if usable is None:
        raise InputError(f"--as-device {device.name}: its profile says nothing about memory; name a GPU's profile")
    context, less = context_of(device)
    limit = usable.value - context  # on the smaller card the context would have taken its part before
    cap_allocator(min(free + torch.cuda.memory_reserved(), limit) if spills() else limit)
    return min(free, limit), f"what {device.name} leaves to a process{less}"


def _announce(record: RunRecord, loop: TrainingLoop, progress: Progress) -> None:
    manifest = record.manifest
    rows = ", ".join(f"{name} {count:,}" for name, count in manifest.data.rows.items())
    progress.message(f"run {manifest.run}: {manifest.parameters:,} parameters, {manifest.precision}, {rows}")
    if loop.processes.count > 1:
        what = "a part of the model" if loop.processes.sharded else "a copy of the model"
        progress.message(f"{loop.processes.count} processes train it together, each with {what}")
    if manifest.leaks:
        progress.message("LEAKS FUTURE TOKENS: the model sees what it is asked to predict; its scores mean nothing")
    if manifest.data.synthetic:
        progress.message("data: SYNTHETIC reviews made by a generator, not real text")
    for overlap in manifest.data.overlap:
        if overlap.duplicates or overlap.contained:
            progress.message(
                f"split {manifest.data.split}: of {overlap.test_rows:,} texts in {overlap.test_set}, "
                f"{overlap.duplicates:,} are also training texts and {overlap.contained:,} more share a whole "
                "phrase with one; scores on it are flattered by that"
            )
    if (wrong_count := record.recipe.data.row_count_warning(manifest.data.rows["train"])) is not None:
        progress.message(wrong_count)
    for finding in manifest.data.findings:
        progress.message(finding.message)
    for name, rows_cut in manifest.data.truncated_rows.items():
        if rows_cut:
            progress.message(
                f"{name}: {rows_cut:,} {'text was' if rows_cut == 1 else 'texts were'} cut to the recipe's length"
            )
    for unused in loop.unused:
        progress.message(unused)
    if loop.position.step:
        progress.message(f"resuming after step {loop.position.step} of {loop.total_steps}")
