"""train: a recipe becomes a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from edgeformer.families.network import Place
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.errors import InputError, InterruptedRun
from edgeformer.formats.manifest import MemoryUse, RunManifest
from edgeformer.formats.progress import SILENT, Progress
from edgeformer.formats.recipe import Recipe
from edgeformer.run import free_folder
from edgeformer.stages.training.checkpoints import Checkpoints
from edgeformer.stages.training.loop import TrainingLoop
from edgeformer.stages.training.memory import free_bytes, predict_peak
from edgeformer.stages.training.metrics_log import MetricsLog
from edgeformer.stages.training.objective import Objective
from edgeformer.stages.training.optimization import resolve_precision
from edgeformer.stages.training.plan import check_fits, context_of
from edgeformer.stages.training.run_folder import RunRecord, folder_to_resume, new_folder


@dataclass(frozen=True)
class TrainOptions:
    """Where and how a recipe is trained; nothing here changes what the recipe means.

    Attributes:
        as_device: cap a larger CUDA card to the memory that this profile leaves to a process.
        ignore_memory: train although the prediction says that it does not fit.
    """

    artifacts: Path
    name: str | None = None
    resume: bool = False
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    max_steps: int | None = None
    as_device: DeviceProfile | None = None
    ignore_memory: bool = False


def train(recipe: Recipe, options: TrainOptions, progress: Progress = SILENT) -> Path:
    """Train ``recipe`` and return the folder of its finished run.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or it will not fit into memory; nothing was written.
        InterruptedRun: Ctrl-C; the run can be resumed.
    """
    resumed = folder_to_resume(recipe, options.artifacts, options.name) if options.resume else None
    if resumed is None:
        free_folder(options.artifacts, options.name, recipe.name)
    accelerator, precision = _accelerator(recipe, options)
    memory = _memory(recipe, options, accelerator.device.type, precision)
    cache = options.artifacts / ".cache" / "tokens"
    objective = Objective(recipe, cache, Place(accelerator.device.type, precision), progress)
    loop = TrainingLoop(objective, accelerator)
    folder = resumed or new_folder(recipe, options.artifacts, options.name)
    loop.checkpoints = Checkpoints(folder)
    record = RunRecord(folder, objective, loop)
    if resumed is None:
        record.begin(precision, memory)
    else:
        record.resume(precision, progress)
    _announce(record.manifest, loop, progress)
    try:
        with _stop_on_interrupt() as stop, closing(MetricsLog(folder, loop.position)) as log:
            finished = loop.run(stop, log, progress, options.max_steps)
        step = loop.position.step
        if not finished:
            raise InterruptedRun(f"interrupted after step {step}; go on with --resume --name {folder.name}")
        cut = step == options.max_steps and step < loop.total_steps
        record.finish(f"stopped by --max-steps {step}" if cut else None, progress)
    except (KeyboardInterrupt, InterruptedRun) as error:
        record.stop("interrupted", "stopped by the user")
        hint = f"interrupted; go on from the last checkpoint with --resume --name {folder.name}"
        raise InterruptedRun(str(error) or hint) from None
    except BaseException as error:
        record.stop("failed", f"{type(error).__name__}: {error}")
        raise
    return folder


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """Turn the first SIGINT (or SIGTERM, where the system has it) into a flag that the loop looks at after each step.

    A second one stops at once. Outside the main thread signals cannot be caught; then the flag is never set.
    """
    request = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def on_signal(number: int, frame: object) -> None:
        if request.is_set():
            raise KeyboardInterrupt
        request.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
    return Accelerator(mixed_precision="no" if precision == "fp32" else precision, cpu=use_cpu), precision


def _memory(recipe: Recipe, options: TrainOptions, device_type: str, precision: str) -> MemoryUse:
    """Predict the peak and refuse what cannot fit; with ``as_device``, cap the allocator to that profile first."""
    kind: Literal["cpu", "cuda"] = "cuda" if device_type == "cuda" else "cpu"
    free, what = free_bytes(kind)
    if options.as_device is not None:
        free, what = _cap(options.as_device, device_type, free)
    if device_type == "cuda":  # a process's resident peak only ever grows
        torch.cuda.reset_peak_memory_stats()
    if options.ignore_memory:
        breakdown = predict_peak(recipe, device_kind=kind, precision=precision)
    else:
        breakdown = check_fits(recipe, device_kind=kind, precision=precision, free_bytes=free, what=what)
    return MemoryUse(device=device_type, predicted_peak_bytes=breakdown.peak_bytes, budget_bytes=free)


def _cap(device: DeviceProfile, device_type: str, free: int) -> tuple[int, str]:
    if device_type != "cuda":
        raise InputError("--as-device caps the memory of a CUDA card; this run trains on the CPU")
    usable = device.usable_memory_bytes or device.memory_bytes
    if usable is None:
        raise InputError(f"--as-device {device.name}: its profile says nothing about memory; name a GPU's profile")
    total = torch.cuda.get_device_properties(0).total_memory
    context, less = context_of(device)
    # The fraction caps what the allocator takes; on the smaller card the context would have taken its part before.
    torch.cuda.set_per_process_memory_fraction(min(1.0, (usable.value - context) / total))
    return min(free, usable.value - context), f"what {device.name} leaves to a process{less}"


def _announce(manifest: RunManifest, loop: TrainingLoop, progress: Progress) -> None:
    rows = ", ".join(f"{name} {count:,}" for name, count in manifest.data.rows.items())
    progress.message(f"run {manifest.run}: {manifest.parameters:,} parameters, {manifest.precision}, {rows}")
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
    for name, rows_cut in manifest.data.truncated_rows.items():
        if rows_cut:
            progress.message(f"{name}: {rows_cut:,} texts were cut to the recipe's length")
    if loop.position.step:
        progress.message(f"resuming after step {loop.position.step} of {loop.total_steps}")
