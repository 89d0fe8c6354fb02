"""Predicted time of a training: from steps timed in a child process, or from a device's rates.

``python -m edgeformer.training.plan.duration RECIPE CACHE SECONDS`` times steps on the CPU: it prints one JSON object,
and writes encoded data into CACHE.
"""

import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np
import psutil
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.plan import PlannedTime
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import FitConfig, Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.prepare import data_findings
from edgeformer.data.tokenization import fitted_recipe
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.published import Setting, published_record
from edgeformer.estimate.roofline import WORK, rates_of, work_ms
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.blocks.segments import choose_attention
from edgeformer.report.sentences import published_sentence
from edgeformer.system import child
from edgeformer.system.memory import keep_heap
from edgeformer.tasks import get_task
from edgeformer.training.loop.checkpoint import Position
from edgeformer.training.loop.distributed import connect
from edgeformer.training.loop.frozen import FrozenStart
from edgeformer.training.loop.loop import FORWARD_SHARE
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.step import TF32_CAPABILITY, Stepper
from edgeformer.training.loop.teacher import Teacher, without_teacher

TIMED_S = 6.0
"""Seconds of training that are timed."""
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS = 3, 8, 200
SHARE_OF_PEAK = (0.04, 0.5)
"""Of a CPU's stated rate that training reaches: small models reach little of it. benchmarks/plan_time.py has the shares
of finished trainings."""
WITH_VALIDATION = 1.05
"""Time with validation as a multiple of the time of the steps, for the high end of estimates from rates. Validation
sets of the shipped recipes have at most an eighth of the rows, and a forward pass is a third of a step: 1 + 1/24."""
TIMED_RANGE = (0.7, 1.5)
"""Low and high end as multiples of the timed value: a host changes its speed within minutes."""
_TIMED_ITERATIONS = 10
_EXPECTED_ITERATIONS, _CANDIDATES = 80, 6
"""Iterations of a fit, and fits of ``regularization: auto``: 224 to 608 iterations in all on five sets."""
_UNKNOWN_ROWS = 1000
_MAX_READ_BYTES = 64 << 20
"""Largest data that is read and encoded: a plan shall take seconds."""
_OPTIMIZER_PASSES, _CLIPPING_PASSES = 7, 3
"""AdamW reads a weight, its gradient and two moments, and writes all but the gradient. Clipping reads the gradients for
their norm, and reads and writes them to scale them."""
_NO_KERNEL = {
    "_unsafe_view", "detach", "alias", "empty", "empty_like", "new_empty", "lift_fresh", "_local_scalar_dense",
}  # fmt: skip
"""Operations that launch no kernel."""
_ROWS_ONLY = ("embedding", "index_select", "gather", "scatter_add_", "index_add_", "index_put_")
"""Operations that access only the indexed rows of their largest tensor."""
_REDUCTIONS = ("softmax", "norm", "sum", "mean")
"""Operations, by a part of their name, at which a fused kernel ends."""


@dataclass
class StepWork:
    """Work of one micro-batch, forward and backward, with recomputation, in rows of full length."""

    kernels: list[NodeWork] = field(default_factory=list)
    parameters: int = 0  # trained ones

    @property
    def operations(self) -> float:
        """Operations of all products; a multiplication and an addition are two."""
        return sum(kernel.operations for kernel in self.kernels)


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of the operations in its blocks, on a CUDA card or on a CPU."""

    def __init__(self, work: StepWork, device_kind: Literal["cuda", "cpu"]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work, self._on_card = work, device_kind == "cuda"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if func.namespace not in ("aten", "torch_attn") or func.is_view or name in _NO_KERNEL:
            return out
        count_operations = flop_registry.get(func._overloadpacket)
        operations, is_attention = 0.0, "scaled_dot_product" in name
        # The processor's fused attention is not counted: rates measured in training there do not contain it either.
        if is_attention and (self._on_card or count_operations is not None):
            is_backward = "backward" in name
            query, key = args[1:3] if is_backward else args[:2]
            # Scores and mixed values; the backward pass computes the scores again, and four more products.
            operations = 2.0 * (5 if is_backward else 2) * math.prod(query.shape) * key.shape[-2]
        elif count_operations is not None:
            operations = float(count_operations(*args, **kwargs, out_val=out))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "copy_":  # its first argument is only written
            read = read[1:]
        elif name.startswith("new_") or name.endswith("_like") or name in ("fill_", "zero_"):
            read = []
        tensors = [*read, *(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if name in _ROWS_ONLY:
            largest = max(sizes)
            sizes = [size for size in sizes if size < largest] or [largest]
        cls: Any = "elementwise" if not operations else "attention" if is_attention else "gemm"
        reduces = not operations and any(part in name for part in _REDUCTIONS)
        self._work.kernels.append(NodeWork(cls, name, operations, 0.0, float(sum(sizes)), reduces=reduces))
        return out


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


def planned_data(
    recipe: Recipe, cache: Path, progress: Progress = SILENT, logits_cache: Path | None = None
) -> PlannedData:
    """Determine the length of a training from its data, or from ``data.expected_rows`` if the data is not read.

    Args:
        cache: folder of encoded data, for the process that times steps.
        logits_cache: folder of teachers' logits; None: the teacher's time is not predicted.
    """
    # 1. Read the data, if that is quick
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
    elif recipe.tokenizer.kind == "hub":
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

    # 2. Measure the rows
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
        has_logits = not task.can_write and getattr(training, "teacher", None) is not None
        if logits_cache is not None and has_logits:
            with bar(progress, "Timing the teacher", None, ""):
                teacher_s = Teacher(recipe, logits_cache).seconds(prepared)
        start_s, start_bytes = 0.0, 0
        if logits_cache is not None and has_frozen_start:
            with bar(progress, "Timing the encoder", None, ""):
                model = model_spec_of(fitted).adapter.build(fitted)
                model_spec_of(fitted).adapter.start(model, fitted)
                start = FrozenStart(model, fitted, prepared, logits_cache)
                start_s, start_bytes = start.seconds(), start.fit_bytes
        return PlannedData(
            fitted, len(batches) * epochs, rows * epochs, tokens, "data", text, notes=tuple(notes),
            teacher_s=teacher_s, start_s=start_s, start_bytes=start_bytes,
        )  # fmt: skip

    # 3. Take the number of rows from the recipe
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
    steps = None if isinstance(training, FitConfig) else training.steps(count) * epochs
    return PlannedData(recipe, steps, count * epochs, tokens, "recipe", text, notes=tuple(notes))


def planned_time(
    data: PlannedData, work: StepWork, device: DeviceProfile, precision: str, cache: Path, *, fits: bool,
    progress: Progress = SILENT,
) -> PlannedTime:  # fmt: skip
    """Estimate how long training takes on ``device`` in a resolved precision.

    A fit is timed on this host. If the device is this host, the data was read and the recipe fits into memory, some
    steps are timed. Otherwise the work of a step is divided by the rates of the profile.
    """
    # 1. Time a fit, or some steps, on this host
    recipe, steps, epochs = data.recipe, data.steps, 1 if data.steps is None else data.recipe.training.epochs
    try:
        if data.problem:
            raise InputError(data.problem)
        if isinstance(recipe.training, FitConfig):
            if data.rows_from != "data":
                raise InputError(f"the time is measured by fitting some rows, and the data was not read: {data.text}")
            with bar(progress, "Timing some iterations", None, ""):
                started, steps = time.perf_counter(), recipe.training.max_iterations
                has_teacher = getattr(recipe.training, "teacher", None) is not None
                objective = Objective(without_teacher(recipe) if has_teacher else recipe, cache, SILENT)
                adapter, training = cast(Any, objective.model_spec.adapter), cast(Any, objective.recipe.training)
                ends = list[float]()

                def advance(loss: float) -> bool:
                    ends.append(time.perf_counter())
                    return True

                adapter.fit(objective.model, objective.recipe, objective.prepared, _TIMED_ITERATIONS, advance)
                timed_s = time.perf_counter() - started
                expected = _EXPECTED_ITERATIONS * (_CANDIDATES if training.regularization == "auto" else 1)
                untimed = max(0, min(expected, training.max_iterations) - len(ends))
                total_s = timed_s + float(untimed) * (ends[-1] - ends[0]) / max(1, len(ends) - 1)
            timed = f"{_TIMED_ITERATIONS} iterations, timed on this host; "
        elif device.name == "host" and fits and data.rows_from == "data":
            with bar(progress, "Timing a few steps", None, ""):
                total_s, timed_steps = 0.0, 0
                if recipe.training.epochs:
                    # A temporary folder, because another command may time the same recipe at the same time.
                    with TemporaryDirectory() as folder:
                        path = Path(folder) / "recipe.yaml"
                        write_text(path, recipe.to_yaml())
                        arguments = (str(path), str(cache.absolute()), str(TIMED_S))
                        timing = child.run(
                            [sys.executable, "-m", "edgeformer.training.plan.duration", *arguments],
                            capture_output=True, text=True, check=False, env={"OMP_PROC_BIND": "true", **os.environ},
                        )  # fmt: skip
                    try:
                        answer = json.loads(timing.stdout.splitlines()[-1])
                    except (IndexError, ValueError):
                        lines = timing.stderr.strip().splitlines() or ["no answer"]
                        raise InputError(f"{recipe.name}: its steps cannot be timed: {lines[-1]}") from None
                    if "error" in answer:
                        raise InputError(str(answer["error"]))
                    total_s, timed_steps = answer["total_s"], answer["timed_steps"]
            timed = f"{timed_steps} steps timed on this host; " if timed_steps else ""
        elif not recipe.training.epochs:
            raise InputError("training.epochs: 0: the time of a frozen start is known for --device host only")
        else:
            # 2. Divide the work by the device's rates
            low_s, high_s, basis = _rated_seconds(data, work, device, precision)
            high_s *= WITH_VALIDATION
            return PlannedTime(
                status="estimated", low_s=low_s, high_s=high_s, steps=steps, rows=data.rows, epochs=epochs,
                rows_from=data.rows_from, basis=f"{data.text}; {basis}",
            )  # fmt: skip
    except EdgeformerError as error:
        return PlannedTime(status="unavailable", rows=_UNKNOWN_ROWS, basis=str(error))

    # 3. Add the teacher and a frozen start
    low_s, high_s = (share * (total_s + data.teacher_s + data.start_s) for share in TIMED_RANGE)
    parts = {"the teacher's logits": data.teacher_s, "the frozen encoder's vectors and the head": data.start_s}
    further = "".join(f"; {seconds:,.0f} s for {name}, by some texts" for name, seconds in parts.items() if seconds)
    return PlannedTime(
        status="estimated", low_s=low_s, high_s=high_s, steps=steps, rows=data.rows, epochs=epochs,
        rows_from=data.rows_from, basis=f"{timed}{data.text}{further}",
    )  # fmt: skip


def _rated_seconds(
    data: PlannedData, work: StepWork, device: DeviceProfile, precision: str
) -> tuple[float, float, str]:
    """Return the range of all steps from the device's rates, and its basis. Raises EdgeformerError for a missing rate.

    Work is taken to grow with the tokens of a row. Of a card, published times of inference say which share of its rates
    torch reaches; trainings of these processors reached :data:`SHARE_OF_PEAK` of theirs.
    """
    training: Any = data.recipe.training
    filled, micro_batches = data.tokens / data.recipe.data.tokens_at_once, data.rows / training.batch_size
    operations = micro_batches * filled * work.operations
    if device.kind == "cpu":
        # Products are summed in FP32 in every precision; a CPU that multiplies in bf16 is up to twice as fast.
        rates = device.peaks.of("fp32")
        if not rates:
            remedy = "measure them with edgeformer calibrate" if device.name == "host" else "its profile has none"
            raise InputError(f"the rates of {device.title} are unknown: {remedy}")
        rate, speedup, (least, most) = rates[0].value, 2.0 if precision == "bf16" else 1.0, SHARE_OF_PEAK
        shares = f"at {least:.0%} to {most:.0%} of {rate / 1e12:.3g} TFLOP/s ({rates[0].source})"
        fastest_s, slowest_s = operations / (rate * speedup * most), operations / (rate * least)
        return fastest_s, slowest_s, f"{operations:.2g} operations, {shares}"
    capability = device.compute_capability
    has_tf32 = training.tf32 and capability is not None and float(capability.value) >= TF32_CAPABILITY[0]
    computed = "fp16" if precision != "fp32" else "tf32" if has_tf32 else "fp32"
    passes = _OPTIMIZER_PASSES + (_CLIPPING_PASSES if training.clip_norm is not None else 0)
    optimizer = NodeWork("elementwise", "optimizer", 0.0, 0.0, passes * 4 * work.parameters / training.accumulation)
    is_compiled = training.compile is not None
    by_kind = work_ms([*work.kernels, optimizer], rates_of(device, computed), 0.0, fused=is_compiled)
    by_kind = tuple(ms if kind == "kernels" else filled * ms for kind, ms in zip(WORK, by_kind, strict=True))
    setting = Setting(device.kind, device.name, "torch.compile" if is_compiled else "torch", computed, "call")
    estimated = published_record().estimate_ms(setting, by_kind, filled * work.operations)
    return (
        micro_batches * estimated.low / 1000,
        micro_batches * estimated.high / 1000,
        f"{operations:.2g} operations; estimates of inference are {published_sentence(estimated.check)}; no training "
        "was compared",
    )


def time_steps(recipe: Recipe, cache: Path, seconds: float) -> tuple[float, int]:
    """Time steps of ``recipe``, drawn from all over an epoch; scoring a row is assumed to take a third of its step.

    Returns the seconds of the training (start of this process, steps and validation of all epochs, every test set), and
    the number of timed steps: at least eight, and more for ``seconds``.
    """
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
    starting_s = time.time() - psutil.Process().create_time()
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
    # A teacher whose states are compared adds one forward pass.
    runs_teacher = has_teacher and (objective.per_token or training.distillation.states)
    training_s = token_s * tokens.sum() * epochs * (1 + FORWARD_SHARE * bool(runs_teacher))
    scored = prepared.validation.lengths.sum() * epochs + sum(rows.lengths.sum() for rows in prepared.tests.values())
    return float(starting_s + training_s + FORWARD_SHARE * token_s * scored), steps


def main() -> None:
    """Time the recipe of the command line and print the result as JSON."""
    child.end_with_parent()
    try:
        recipe = load_recipe(sys.argv[1])
        with keep_heap(recipe.training.batch_size * recipe.data.tokens_at_once):
            total_s, timed_steps = time_steps(recipe, Path(sys.argv[2]), float(sys.argv[3]))
    except EdgeformerError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(error.exit_code)
    print(json.dumps({"total_s": total_s, "timed_steps": timed_steps}))


if __name__ == "__main__":
    main()
