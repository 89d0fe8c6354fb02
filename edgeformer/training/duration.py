"""Predicted time of a training: from steps timed in a child process, or from a device's stated rates.

``python -m edgeformer.training.duration RECIPE CACHE SECONDS`` times steps on the CPU: it prints one JSON object, and
writes encoded data into CACHE. This module imports torch only to time steps.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np

from edgeformer.artifacts.command_results import PlannedTime
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.prepare import data_findings
from edgeformer.data.tokenization import fitted_recipe
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.system import child
from edgeformer.system.memory import keep_heap
from edgeformer.tasks import get_task
from edgeformer.tasks.tokens import TokenTask

TIMED_S = 6.0
"""Seconds of training that are timed."""
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS = 3, 8, 200
_FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the products of a step; a teacher whose states are compared adds one forward pass."""
SHARE_OF_PEAK = (0.04, 0.5)
"""Of a CPU's stated rate that training reaches: small models reach little of it. benchmarks/plan_time.py has the shares
of finished trainings."""
WITH_VALIDATION = 1.05
"""Time with validation as a multiple of the time of the steps, for the high end of estimates from rates. Validation
sets of the shipped recipes have at most an eighth of the rows, and a forward pass is a third of a step: 1 + 1/24."""
TIMED_RANGE = (0.7, 1.5)
"""Low and high end as multiples of the timed value: a host changes its speed within minutes."""
_UNKNOWN_ROWS = 1000
_MAX_READ_BYTES = 64 << 20
"""Largest data that is read and encoded: a plan shall take seconds."""

# Time on a CUDA card, from the work of a step and the card's stated rates. Never checked on a card.

_OPTIMIZER_PASSES = 7
"""AdamW reads a weight, its gradient and two moments, and writes all but the gradient."""
_CLIPPING_PASSES = 3
"""Clipping reads the gradients for their norm, and reads and writes them to scale them."""


@dataclass
class StepWork:
    """Work of one micro-batch, forward and backward, with recomputation, in rows of full length."""

    operations: int = 0  # of all products; a multiplication and an addition are two
    other_bytes: int = 0  # read and written by all kernels but products
    kernels: int = 0
    parameters: int = 0  # trained ones


class Efficiency(NamedTuple):
    """Assumptions of one end of the range; never measured."""

    of_peak: float  # share of the card's rate that products reach
    of_bandwidth: float  # share of the stated bandwidth that other kernels reach; above 1 with help of the cache
    launches: float  # time from one kernel to the next as a multiple of the launch overhead, Python included


FAST = Efficiency(of_peak=0.75, of_bandwidth=1.2, launches=1.0)
"""Large products. A kernel reads the output of its predecessor from the cache."""
SLOW = Efficiency(of_peak=0.6, of_bandwidth=0.75, launches=3.0)
"""Products of small models, whose inner loops are short and which leave multiprocessors idle. Nothing is cached."""


@dataclass(frozen=True)
class PlannedData:
    """A recipe and the steps and rows of its training."""

    recipe: Recipe  # with the vocabulary size of its tokenizer
    steps: int | None = None  # of all epochs; None: the number of rows is unknown
    rows: int = _UNKNOWN_ROWS  # of all epochs; 1,000 if their number is unknown
    tokens: int = 0  # per row of a batch, padding included
    rows_from: Literal["data", "recipe", "unknown"] = "unknown"
    text: str = ""  # description for people
    problem: str = ""  # why the data, which is on this host, cannot be used
    notes: tuple[str, ...] = ()  # warnings about recipe and data
    teacher_s: float = 0.0  # of this host for the teacher's logits; 0: there are none to compute, or it is unknown
    start_s: float = 0.0  # of this host for a frozen start, and for scoring its head if there are no epochs
    start_bytes: int = 0  # of a frozen start

    @property
    def teacher_text(self) -> str:
        """Description of ``teacher_s`` and ``start_s`` for people."""
        parts = {"the teacher's logits": self.teacher_s, "the frozen encoder's vectors and the head": self.start_s}
        return "".join(f"; {seconds:,.0f} s for {name}, by some texts" for name, seconds in parts.items() if seconds)


def planned_data(
    recipe: Recipe, cache: Path, progress: Progress = SILENT, logits_cache: Path | None = None
) -> PlannedData:
    """Determine the length of a training from its data, or from ``data.expected_rows`` if the data is not read.

    Args:
        cache: folder of encoded data, for the process that times steps.
        logits_cache: folder of teachers' logits; None: the teacher's time is not predicted.
    """
    data, training, epochs, task = recipe.data, recipe.training, recipe.training.epochs, get_task(recipe.task)
    sources = data.sources
    files = [Path(source.path) for source in sources if source.kind == "file"]
    missing = [path for path in files if not path.is_file()]
    is_small = not missing and sum(path.stat().st_size for path in files) <= _MAX_READ_BYTES
    epochs_text = "1 epoch" if epochs == 1 else f"{epochs} epochs" if epochs else "vectors and head"
    has_frozen_start = getattr(training, "start", "source") == "frozen"
    if training.early_stopping is not None:
        epochs_text += " (fewer if early stopping ends training)"
    reason, problem = None, ""
    if any(source.kind == "hub" for source in sources):
        reason = "the data is on the hub; --data DIR plans with local files"
    elif getattr(recipe.tokenizer, "kind", None) == "hub":
        reason = "the tokenizer is on the hub; --tokenizer FILE plans with a local file"
    elif data.stream:
        reason = "the data is streamed"
    elif missing:
        reason = f"{missing[0]} does not exist"
    elif not is_small:
        reason = f"the data is larger than {_MAX_READ_BYTES >> 20} MiB"
    else:
        try:
            prepared = task.rows.prepare(recipe, cache, progress)
        except EdgeformerError as error:
            problem = str(error)
    notes: list[str] = []
    if reason is None and not problem:
        fitted = fitted_recipe(recipe, prepared.tokenizer, notes.append)
        sizes = prepared.train.sizes(np.arange(len(prepared.train)))
        rows, is_bucketed = len(sizes), training.batching == "bucketed"
        batches = plan_batches(
            prepared.train, training.effective_batch, seed=recipe.seed, epoch=0, bucketed=is_bucketed
        )
        padded = sum(len(batch) * int(sizes[batch].max(initial=1)) for batch in batches)
        tokens = data.tokens_at_once if getattr(training, "score_padding", False) else math.ceil(padded / rows)
        text = f"{epochs_text} of {rows:,} rows of {tokens:,} tokens, padding included"
        notes += [warning for warning in (data.row_count_warning(rows),) if warning is not None]
        notes += [finding.message for finding in prepared.summary.findings]
        teacher_s = 0.0
        has_logits = not isinstance(task, TokenTask) and getattr(training, "teacher", None) is not None
        if logits_cache is not None and has_logits:
            from edgeformer.training.teacher import Teacher  # which imports torch

            with bar(progress, "Timing the teacher", None, ""):
                teacher_s = Teacher(recipe).seconds(prepared, logits_cache)
        start_s, start_bytes = 0.0, 0
        if logits_cache is not None and has_frozen_start:
            from edgeformer.training.frozen import FrozenStart  # which imports torch

            with bar(progress, "Timing the encoder", None, ""):
                model = model_spec_of(fitted).adapter.build(fitted)
                model_spec_of(fitted).adapter.start(model, fitted)
                start = FrozenStart(model, fitted, prepared, logits_cache)
                start_s, start_bytes = start.seconds(), start.fit_bytes
        return PlannedData(
            fitted, len(batches) * epochs, rows * epochs, tokens, "data", text, notes=tuple(notes),
            teacher_s=teacher_s, start_s=start_s, start_bytes=start_bytes,
        )  # fmt: skip
    if is_small and len(files) == len(sources):
        try:
            notes = [finding.message for finding in data_findings(data)]
        except (DataError, MissingDependencyError) as error:
            notes = [f"training would refuse this data: {error}"]
    count, tokens = data.expected_rows, data.tokens_at_once
    row_text = f"rows of {'' if getattr(data, 'mode', None) == 'packed' else 'up to '}{tokens:,} tokens"
    if count is None or problem:
        text = f"{row_text}; the number of rows is unknown: {reason}"
        return PlannedData(recipe, tokens=tokens, text=text, problem=problem, notes=tuple(notes))
    text = f"{epochs_text} of {count:,} {row_text}; number of rows as in data.expected_rows: {reason}"
    steps = -(-count // training.effective_batch) * epochs
    return PlannedData(recipe, steps, count * epochs, tokens, "recipe", text, notes=tuple(notes))


def planned_time(
    data: PlannedData,
    work: StepWork,
    device: DeviceProfile,
    precision: str,
    cache: Path,
    *,
    fits: bool,
    progress: Progress = SILENT,
) -> PlannedTime:
    """Estimate how long training takes on ``device`` in a resolved precision.

    If the device is this host, the data was read and the recipe fits into memory, some steps are timed. Otherwise the
    work of a step is divided by the rates of the profile.
    """
    recipe = data.recipe
    try:
        if data.problem:
            raise InputError(data.problem)
        if device.name == "host" and fits and data.rows_from == "data":
            with bar(progress, "Timing a few steps", None, ""):
                total_s, timed_steps = _time_steps(recipe, cache) if recipe.training.epochs else (0.0, 0)
            total_s += data.teacher_s + data.start_s
            low, high = (share * total_s for share in TIMED_RANGE)
            fields: dict[str, Any] = {"low_s": low, "high_s": high}
            timed = f"{timed_steps} steps timed on this host; " if timed_steps else ""
            fields["basis"] = f"{timed}{data.text}{data.teacher_text}"
        elif not recipe.training.epochs:
            raise InputError("training.epochs: 0: the time of a frozen start is known for --device host only")
        elif device.kind == "cuda":
            fields = gpu_time(data, work, device, precision)
        else:
            # Products are summed in FP32 in every precision; a CPU that multiplies in bf16 is up to twice as fast.
            rates = device.peaks.of("fp32")
            if not rates:
                remedy = "measure them with edgeformer calibrate" if device.name == "host" else "its profile has none"
                raise InputError(f"the rates of {device.title} are unknown: {remedy}")
            rate, speedup = rates[0].value, 2.0 if precision == "bf16" else 1.0
            filled = data.tokens / recipe.data.tokens_at_once
            operations = filled * work.operations * data.rows / recipe.training.batch_size
            fields = {
                "low_s": operations / (rate * speedup * SHARE_OF_PEAK[1]),
                "high_s": operations / (rate * SHARE_OF_PEAK[0]) * WITH_VALIDATION,
                "basis": (
                    f"{data.text}; {operations:.2g} operations, at {SHARE_OF_PEAK[0]:.0%} to {SHARE_OF_PEAK[1]:.0%} "
                    f"of {rate / 1e12:.3g} TFLOP/s ({rates[0].source})"
                ),
            }
    except EdgeformerError as error:
        return PlannedTime(status="unavailable", rows=_UNKNOWN_ROWS, basis=str(error))
    epochs = 1 if data.steps is None else recipe.training.epochs
    return PlannedTime(
        status="estimated", steps=data.steps, rows=data.rows, epochs=epochs, rows_from=data.rows_from, **fields
    )


def gpu_time(data: PlannedData, work: StepWork, device: DeviceProfile, precision: str) -> dict[str, Any]:
    """Estimate how long a CUDA card takes, as fields of PlannedTime. Raises EdgeformerError for a missing rate.

    Work is taken to grow with the tokens of a row. A step takes the time of its products and then of the traffic of all
    other kernels, and at least the launches of its kernels. The low end assumes the card's highest power limit, the
    high end its lowest.
    """
    training, peaks, is_fp32 = data.recipe.training, device.peaks, precision == "fp32"
    peak = peaks.fp32 if is_fp32 else next(iter(peaks.of("fp16")), None)
    if peak is None or device.bandwidth_bytes_per_s is None:
        key = "bandwidth_bytes_per_s" if peak is not None else "peaks.fp32" if is_fp32 else "peaks.fp16"
        raise EdgeformerError(f"device profile {device.name!r} has no {key}")
    peak_rate, bandwidth = peak.value, device.bandwidth_bytes_per_s.value
    if is_fp32 and training.tf32 and peaks.fp16_fp32_accumulate is not None:  # tensor cores compute TF32 at half that
        peak_rate = max(peak_rate, peaks.fp16_fp32_accumulate.value / 2)
    launch_s = device.launch_overhead_us.value * 1e-6 if device.launch_overhead_us is not None else 0.0
    filled = data.tokens / data.recipe.data.tokens_at_once
    micro_batches = data.rows / training.batch_size
    passes = _OPTIMIZER_PASSES + (_CLIPPING_PASSES if training.clip_norm is not None else 0)
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for end, efficiency in {"low": FAST, "high": SLOW}.items():
        is_low, watts_text, clock = end == "low", "", 1.0  # clock relative to the one of the stated rates
        if device.clocks_hz is not None and device.power is not None:
            clocks, power = device.clocks_hz.value, device.power.value
            watts, clock_hz = (power.high_w, clocks.at_high_w) if is_low else (power.low_w, clocks.at_low_w)
            watts_text, clock = f"{watts:.0f} W, boost {clock_hz / 1e6:.0f} MHz: ", clock_hz / clocks.at_peaks
        is_fused = training.compile is not None and is_low
        product_s = filled * work.operations / (peak_rate * clock * efficiency.of_peak)
        other_bytes = 0 if is_fused else filled * work.other_bytes
        other_bytes += passes * 4 * work.parameters / training.accumulation
        other_s = other_bytes / (bandwidth * efficiency.of_bandwidth)
        launches_s = work.kernels * launch_s * efficiency.launches if training.compile is None else 0.0
        step_s = max(product_s + other_s, launches_s)
        seconds[end] = step_s * micro_batches * (1.0 if is_low else WITH_VALIDATION)
        product_share = product_s / (product_s + other_s)
        reasons[end] = (
            f"{watts_text}products {product_share:.0%} of the time, at {efficiency.of_peak:.0%} of "
            f"{peak_rate * clock / 1e12:.1f} TFLOP/s; memory traffic of all other kernels {1 - product_share:.0%}, at "
            f"{efficiency.of_bandwidth:.0%} of {bandwidth / 1e9:.0f} GB/s"
            + ("; torch.compile fuses the other kernels away" if is_fused else "")
            + (f"; launching {work.kernels:,} kernels takes longer than computing them" if step_s == launches_s else "")
        )
    operations = micro_batches * filled * work.operations
    low_share, high_share = operations / (seconds["high"] * peak_rate), operations / (seconds["low"] * peak_rate)
    basis = (
        f"{data.text}; {operations:.2g} operations, at {low_share:.0%} to {high_share:.0%} of {peak_rate / 1e12:.3g} "
        "TFLOP/s, from the operations of a step and assumed efficiencies; never checked on a GPU"
    )
    return {
        "low_s": seconds["low"], "high_s": seconds["high"], "basis": basis, "low_reason": reasons["low"],
        "high_reason": reasons["high"], "share_of_peak": (low_share, high_share),
    }  # fmt: skip


def _time_steps(recipe: Recipe, cache: Path) -> tuple[float, int]:
    """Call :func:`time_steps` in a child process. Raises InputError with its message, also if it died."""
    # A temporary folder, because another command may time the same recipe at the same time.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        write_text(path, recipe.to_yaml())
        timing = child.run(
            [sys.executable, "-m", "edgeformer.training.duration", str(path), str(cache.absolute()), str(TIMED_S)],
            capture_output=True, text=True, check=False, env={"OMP_PROC_BIND": "true", **os.environ},
        )  # fmt: skip
    try:
        answer = json.loads(timing.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = timing.stderr.strip().splitlines() or ["no answer"]
        raise InputError(f"{recipe.name}: its steps cannot be timed: {lines[-1]}") from None
    if "error" in answer:
        raise InputError(str(answer["error"]))
    return answer["total_s"], answer["timed_steps"]


def time_steps(recipe: Recipe, cache: Path, seconds: float, started: float) -> tuple[float, int]:
    """Time steps of ``recipe``, drawn from all over an epoch; scoring a row is assumed to take a third of its step.

    Returns the seconds of the training from ``started`` on (start, steps and validation of all epochs, every test set),
    and the number of timed steps: at least eight, and more for ``seconds``.
    """
    # Only the child process imports torch.
    from edgeformer.models.segments import choose_attention
    from edgeformer.training.checkpoint import Position
    from edgeformer.training.distributed import connect
    from edgeformer.training.objective import Objective
    from edgeformer.training.step import Stepper
    from edgeformer.training.teacher import without_teacher

    training: Any = recipe.training
    has_teacher = getattr(training, "teacher", None) is not None
    recipe = model_spec_of(recipe).adapter.pinned(without_teacher(recipe) if has_teacher else recipe)
    # A training compiles once, which takes as long as all timed steps; a frozen start is timed alone.
    changes = {"compile": None, **({"start": "source"} if hasattr(training, "start") else {})}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
    processes = connect(recipe, "cpu", sharded=False)  # the host's profile describes its CPU
    objective = Objective(recipe, cache, SILENT)
    objective.attention = choose_attention(recipe, "cpu", processes.precision)
    epochs, plan, prepared = recipe.training.epochs, objective.steps(0), objective.prepared
    stepper = Stepper(objective, processes, len(plan) * epochs)
    starting_s = time.monotonic() - started
    order = np.random.default_rng(recipe.seed).permutation(len(plan))
    # Batches of similar length differ in size: a step counts by the tokens of its batch, padding included.
    lengths = [prepared.train.sizes(rows) for rows in plan]
    tokens = np.array([float(len(rows) * rows.max(initial=1)) for rows in lengths])
    position, steps, timed_s, timed_tokens = Position(batch_size=recipe.training.batch_size), 0, 0.0, 0.0
    stepper.model.train()
    for number, step in enumerate(np.resize(order, WARM_UP_STEPS + MAX_STEPS)):
        if steps >= MIN_STEPS and timed_s > seconds:
            break
        mark = time.perf_counter()
        stepper.take(plan[int(step)], position)
        if number >= WARM_UP_STEPS:
            timed_s, timed_tokens, steps = timed_s + time.perf_counter() - mark, timed_tokens + tokens[step], steps + 1
    token_s = timed_s / timed_tokens
    runs_teacher = has_teacher and (objective.per_token or training.distillation.states)
    training_s = token_s * tokens.sum() * epochs * (1 + _FORWARD_SHARE * bool(runs_teacher))
    scored = prepared.validation.lengths.sum() * epochs + sum(rows.lengths.sum() for rows in prepared.tests.values())
    return float(starting_s + training_s + _FORWARD_SHARE * token_s * scored), steps


def main() -> None:
    """Time the recipe of the command line and print the result as JSON."""
    child.end_with_parent()
    started = time.monotonic()
    try:
        recipe = load_recipe(sys.argv[1])
        with keep_heap(recipe.training.batch_size * recipe.data.tokens_at_once):
            total_s, timed_steps = time_steps(recipe, Path(sys.argv[2]), float(sys.argv[3]), started)
    except EdgeformerError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(error.exit_code)
    print(json.dumps({"total_s": total_s, "timed_steps": timed_steps}))


if __name__ == "__main__":
    main()
