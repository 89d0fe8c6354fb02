"""Predicted time of a training: from steps timed in a child process, or from a device's stated rates.

``python -m edgeformer.training.duration RECIPE CACHE SECONDS auto|cpu`` times steps: it prints one JSON object, and
writes encoded data into CACHE. This module imports torch only to time steps and to count their kernels.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from edgeformer.artifacts.command_results import PlannedTime
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import DataError, EdgeformerError, InputError, MissingDependencyError
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.tokenization import fitted_recipe
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.system.memory import keep_heap
from edgeformer.tasks import get_task

TIMED_S = 6.0
"""Seconds of training that are timed."""
WARM_UP_STEPS, MIN_STEPS, MAX_STEPS = 3, 8, 200
_FORWARD_SHARE = 1 / 3
"""Share of the forward pass in the products of a step; a teacher adds one forward pass."""
SHARE_OF_PEAK = (0.04, 0.5)
"""Of a CPU's stated rate that training reaches: small models reach little of it. benchmarks/plan_time.py has the shares
of finished trainings."""
WITH_VALIDATION = 1.05
"""Time with validation as a multiple of the time of the steps, for the high end of estimates from rates. Validation
sets of the shipped recipes have at most an eighth of the rows, and a forward pass is a third of a step: 1 + 1/24."""
_TIMED_RANGE = (0.7, 1.5)
"""Low and high end as multiples of the timed value: a host changes its speed within minutes."""
_UNKNOWN_ROWS = 1000
_MAX_READ_BYTES = 64 << 20
"""Largest data that is read and encoded: a plan shall take seconds."""

# Time on a CUDA card, from the kernels of a step and the card's stated rates. Never checked on a card.

_TILE = 128
"""Rows and columns of a product's output that one multiprocessor computes at a time."""
_OPTIMIZER_PASSES = 7
"""AdamW reads a weight, its gradient and two moments, and writes all but the gradient."""
_CLIPPING_PASSES = 3
"""Clipping reads the gradients for their norm, and reads and writes them to scale them."""
_ACCUMULATING_PASSES = 3
"""Each further micro-batch reads the gradients so far and its own, and writes their sum."""
_NO_KERNEL = {
    "_unsafe_view", "detach", "alias", "empty", "empty_like", "new_empty", "lift_fresh", "_local_scalar_dense",
}  # fmt: skip
"""Operations that launch no kernel."""
_ROWS_ONLY = ("embedding", "index_select", "gather", "scatter_add_", "index_add_", "index_put_")
"""Operations that access only the indexed rows of their largest tensor."""


@dataclass(frozen=True)
class Kernel:
    """One operation of a step as torch launches it."""

    operations: int  # of a product, multiplication and addition counted separately; 0: not a product
    size_bytes: int  # read and written
    half: bool = False  # a product of 16-bit numbers
    attention: bool = False  # the fused attention kernel
    tiles: int = 0  # of a product's output, distributed over the multiprocessors


@dataclass(frozen=True)
class Efficiency:
    """Assumptions of one end of the range."""

    of_peak: float  # share of the card's rate that products reach while every multiprocessor has a tile
    of_attention: float  # share that the fused attention kernel reaches, whose softmax is no product
    of_bandwidth: float  # share of the stated bandwidth that kernels without reuse reach
    from_cache: float  # share of a kernel's traffic served by the cache, if the cache holds all of its tensors
    launches: float  # time from one kernel to the next as a multiple of the launch overhead, Python included


FAST = Efficiency(of_peak=0.85, of_attention=0.60, of_bandwidth=0.90, from_cache=0.5, launches=1.0)
"""Assumed, never measured: expected of large products, fused attention and streaming kernels. Of tensors that fit into
the cache, a kernel reads the output of its predecessor from it, and writes its own output to memory."""
SLOW = Efficiency(of_peak=0.75, of_attention=0.35, of_bandwidth=0.75, from_cache=0.0, launches=3.0)
"""Assumed, never measured: products of the sizes of small models, whose inner loops are short. Nothing is cached."""


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


def planned_data(recipe: Recipe, cache: Path, progress: Progress = SILENT) -> PlannedData:
    """Determine the length of a training from its data, or from ``data.expected_rows`` if the data is not read.

    Args:
        cache: folder of encoded data, for the process that times steps.
    """
    data, training, epochs = recipe.data, recipe.training, recipe.training.epochs
    sources = [source for part in data.parts.values() for source in part]
    files = [Path(source.path) for source in sources if source.kind == "file"]
    missing = [path for path in files if not path.is_file()]
    is_small = not missing and sum(path.stat().st_size for path in files) <= _MAX_READ_BYTES
    tokenizer = recipe.model_dump(include={"tokenizer"})["tokenizer"]
    epochs_text = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    reason = None
    if any(source.kind == "hub" for source in sources):
        reason = "the data is on the hub; --data DIR plans with files"
    elif tokenizer.get("kind") == "hub":
        reason = "the tokenizer is on the hub; --tokenizer FILE plans with a file"
    elif data.stream:
        reason = "the data is streamed"
    elif missing:
        reason = f"{missing[0]} does not exist"
    elif not is_small:
        reason = f"the data is larger than {_MAX_READ_BYTES >> 20} MiB"
    problem = ""
    if reason is None:
        try:
            prepared = get_task(recipe.task).prepare(recipe, cache, progress)
        except EdgeformerError as error:
            problem = str(error)
    if reason is not None or problem:
        data_warnings: tuple[str, ...] = ()
        if is_small and len(files) == len(sources):
            try:
                data_warnings = tuple(finding.message for finding in get_task(recipe.task).findings(data))
            except (DataError, MissingDependencyError) as error:
                data_warnings = (f"training would refuse its data: {error}",)
        up_to, count = "" if getattr(data, "mode", None) == "packed" else "up to ", data.expected_rows
        tokens_text = f"{up_to}{data.tokens_at_once:,} tokens"
        text = f"rows of {tokens_text}; the number of rows is not known: {reason}"
        result = PlannedData(recipe, None, tokens=data.tokens_at_once, text=text, problem=problem, notes=data_warnings)
        if count is None or problem:
            return result
        length = f"{epochs_text} of {count:,} rows of {tokens_text}"
        text = f"{length}; rows as the recipe states them, not counted: {reason}"
        steps = -(-count // training.effective_batch) * epochs
        return replace(result, steps=steps, rows=count * epochs, rows_from="recipe", text=text)
    notes: list[str] = []
    fitted = fitted_recipe(recipe, prepared.tokenizer, notes.append)
    sizes = prepared.train.sizes(np.arange(len(prepared.train)))
    rows = len(sizes)
    if (row_count_warning := data.row_count_warning(rows)) is not None:
        notes.append(row_count_warning)
    bucketed = training.batching == "bucketed"
    batches = plan_batches(prepared.train, training.effective_batch, seed=recipe.seed, epoch=0, bucketed=bucketed)
    padded = sum(len(batch) * int(sizes[batch].max(initial=1)) for batch in batches)
    tokens = data.tokens_at_once if getattr(training, "score_padding", False) else math.ceil(padded / rows)
    text = f"{epochs_text} of {rows:,} rows of {tokens:,} tokens, padding included"
    notes.extend(finding.message for finding in prepared.summary.findings)
    return PlannedData(fitted, len(batches) * epochs, rows * epochs, tokens, "data", text, notes=tuple(notes))


def planned_time(
    data: PlannedData, device: DeviceProfile, precision: str, cache: Path, *, fits: bool, progress: Progress = SILENT
) -> PlannedTime:
    """Estimate how long training takes on ``device``.

    If the device is this host and the data was read, some steps are timed. Otherwise the work of a step is counted, on
    tensors without data, and divided by the rates of the profile.

    Args:
        data: from :func:`planned_data`.
        precision: of training on the device, resolved.
        cache: as for :func:`planned_data`.
        fits: whether the recipe fits into memory; otherwise no step is timed.
    """
    recipe = data.recipe
    try:
        if data.problem:
            raise InputError(data.problem)
        if device.name == "host" and fits and data.rows_from == "data":
            with bar(progress, "Timing some steps", None, ""):
                timing = time_steps(recipe, cache, accelerator="cpu")  # the host's profile describes its CPU
            low, high = (share * timing.total_s for share in _TIMED_RANGE)
            return _estimated(data, low_s=low, high_s=high, basis=f"{timing.timed_steps} steps timed here; {data.text}")
        with bar(progress, "Counting the work of a step", None, ""):
            if device.kind == "cuda":
                return gpu_time(data, device, precision)
            # Products are summed in FP32 in every precision; a CPU that multiplies in bf16 is up to twice as fast.
            rates = device.peaks.of("fp32")
            if not rates:
                remedy = "its profile has none"
                if device.name == "host":
                    remedy = "measure them with edgeformer calibrate"
                raise InputError(f"the rates of {device.title} are not known: {remedy}")
            rate, speedup = rates[0].value, 2.0 if precision == "bf16" else 1.0
            operations = step_operations(recipe, data.tokens) * data.rows / recipe.training.batch_size
            basis = (
                f"{data.text}. {operations:.2g} operations, at {SHARE_OF_PEAK[0]:.0%} to {SHARE_OF_PEAK[1]:.0%} of "
                f"{rate / 1e12:.3g} TFLOP/s ({rates[0].source})"
            )
            low = operations / (rate * speedup * SHARE_OF_PEAK[1])
            high = operations / (rate * SHARE_OF_PEAK[0]) * WITH_VALIDATION
            return _estimated(data, low_s=low, high_s=high, basis=basis)
    except EdgeformerError as error:
        return PlannedTime(status="unavailable", rows=_UNKNOWN_ROWS, basis=str(error))


def _estimated(data: PlannedData, **fields: Any) -> PlannedTime:
    epochs = 1 if data.steps is None else data.recipe.training.epochs
    return PlannedTime(
        status="estimated", steps=data.steps, rows=data.rows, epochs=epochs, rows_from=data.rows_from, **fields
    )


def step_operations(recipe: Recipe, tokens: int) -> int:
    """Count the operations of all products in one micro-batch of rows of ``tokens`` tokens on a CPU."""
    kernels, _ = count_kernels(recipe, tokens, "fp32", on_cuda=False)
    return sum(kernel.operations * count for kernel, count in kernels.items())


def count_kernels(recipe: Recipe, tokens: int, precision: str, *, on_cuda: bool = True) -> tuple[Counter[Kernel], int]:
    """Count the kernels of one micro-batch, forward and backward, with recomputation, on tensors without data.

    Args:
        tokens: per row.
        precision: of products, resolved.

    Returns:
        The kernels, and the number of trained parameters.

    Raises:
        InputError: the model cannot be built.
    """
    import torch
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    from edgeformer.models.adapter import BuildTarget
    from edgeformer.training.memory import HALF_FORMATS, example_tensors, use_cuda_dropout

    kernels: Counter[Kernel] = Counter()

    def kernel_of(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Kernel:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if name == "copy_":  # its first argument is only written
            read = read[1:]
        elif name.startswith("new_") or name.endswith("_like") or name in ("fill_", "zero_"):
            read = []
        sizes = [tensor.numel() * tensor.element_size() for tensor in (*read, *written)]
        if name in _ROWS_ONLY:
            largest = max(sizes)
            sizes = [size for size in sizes if size < largest] or [largest]
        halves = HALF_FORMATS.values()
        # The processor's fused attention is not counted: rates measured in training there do not contain it either.
        if "scaled_dot_product" in name and (on_cuda or func._overloadpacket in flop_registry):
            is_backward = "backward" in name
            query, key = args[1:3] if is_backward else args[:2]
            # Scores and mixed values; the backward pass computes the scores again, and four more products.
            products = 5 if is_backward else 2
            operations = 2 * products * math.prod(query.shape) * key.shape[-2]
            return Kernel(operations, sum(sizes), query.dtype in halves, attention=True)
        count_operations = flop_registry.get(func._overloadpacket)
        if count_operations is None:
            return Kernel(0, sum(sizes))
        *batch, rows, columns = written[0].shape if written[0].ndim > 1 else (1, *written[0].shape)
        tiles = math.prod(batch) * -(-rows // _TILE) * -(-columns // _TILE)
        operations = int(count_operations(*args, **kwargs, out_val=out))
        return Kernel(operations, sum(sizes), written[0].dtype in halves, tiles=tiles)

    class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func._schema.name.partition("::")[2]
            if func.namespace == "aten" and not func.is_view and name not in _NO_KERNEL:
                kernels[kernel_of(func, name, args, kwargs or {}, out)] += 1
            return out

    task, adapter, half = get_task(recipe.task), model_spec_of(recipe).adapter, HALF_FORMATS.get(precision)
    data = recipe.data.model_copy(update={recipe.data.length_key: tokens})
    with FakeTensorMode():
        model, _ = adapter.build(recipe, BuildTarget(for_export=True))
        if on_cuda:
            adapter.match_cuda_memory(model)
            use_cuda_dropout(model)
        loss = adapter.loss(model.train(), recipe, None)
        example = task.example(recipe.model_copy(update={"data": data}), recipe.training.batch_size)
        batch = example_tensors(example)
        with KernelCounter():  # type: ignore[no-untyped-call]
            with contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
                total = loss(model, batch).total
            total.backward()  # type: ignore[no-untyped-call]
    return kernels, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def gpu_time(data: PlannedData, device: DeviceProfile, precision: str) -> PlannedTime:
    """Estimate how long a CUDA card takes.

    A kernel takes the longer of its arithmetic and its traffic, and a step at least the launches of its kernels. The
    low end assumes the card's highest power limit, the high end its lowest.

    Raises:
        EdgeformerError: the profile lacks a required rate.
    """
    recipe, peaks, is_half = data.recipe, device.peaks, precision != "fp32"
    required = {
        "peaks.fp32": peaks.fp32,
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        **({"peaks.fp16": next(iter(peaks.of("fp16")), None)} if is_half else {}),
    }
    missing = [name for name, fact in required.items() if fact is None]
    if missing or peaks.fp32 is None or device.bandwidth_bytes_per_s is None:
        raise EdgeformerError(f"device profile {device.name!r} does not say {', '.join(missing)}")
    fp32_rate = peaks.fp32.value
    if recipe.training.tf32 and peaks.fp16_fp32_accumulate is not None:  # tensor cores compute TF32 at half that rate
        fp32_rate = max(fp32_rate, peaks.fp16_fp32_accumulate.value / 2)
    peak_rate = peaks.of("fp16")[0].value if is_half else fp32_rate
    bandwidth = device.bandwidth_bytes_per_s.value
    cache_bytes = float(device.cache_bytes.value) if device.cache_bytes is not None else 0.0
    cores = device.cores.value if device.cores is not None else 0
    launch_s = device.launch_overhead_us.value * 1e-6 if device.launch_overhead_us is not None else 0.0
    limits = {"low": ("", 1.0), "high": ("", 1.0)}  # description of the power limit, clock relative to the stated rates
    if device.clocks_hz is not None and device.power is not None:
        clocks, power = device.clocks_hz.value, device.power.value
        for end, watts, clock_hz in (("low", power.high_w, clocks.at_high_w), ("high", power.low_w, clocks.at_low_w)):
            limits[end] = f"{watts:.0f} W, boost {clock_hz / 1e6:.0f} MHz: ", clock_hz / clocks.at_peaks

    kernels, parameters = count_kernels(recipe, data.tokens, precision)
    training, launches = recipe.training, kernels.total()
    micro_batches = data.rows / training.batch_size
    operations = micro_batches * sum(kernel.operations * count for kernel, count in kernels.items())
    passes = _OPTIMIZER_PASSES + (_CLIPPING_PASSES if training.clip_norm is not None else 0)
    passes += _ACCUMULATING_PASSES * (training.accumulation - 1)
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for end, efficiency in {"low": FAST, "high": SLOW}.items():
        watts_text, clock = limits[end]
        is_fused = training.compile is not None and efficiency is FAST
        product_s = other_s = 0.0
        for kernel, count in kernels.items():
            cached = efficiency.from_cache if kernel.size_bytes <= cache_bytes else 0.0
            traffic_s = kernel.size_bytes * (1 - cached) / (bandwidth * efficiency.of_bandwidth)
            if not kernel.operations:
                other_s += 0.0 if is_fused else traffic_s * count
                continue
            rate = (peak_rate if kernel.half or not is_half else fp32_rate) * clock
            waves = -(-kernel.tiles // cores) * cores if cores else 0
            busy = kernel.tiles / waves if waves and efficiency is SLOW else 1.0
            share = efficiency.of_attention if kernel.attention else efficiency.of_peak * busy
            product_s += max(kernel.operations / (rate * share), traffic_s) * count
        weights_s = passes * 4 * parameters / (bandwidth * efficiency.of_bandwidth) / training.accumulation
        launches_s = launches * launch_s * efficiency.launches * (1.0 if training.compile is None else 0.0)
        computing_s = product_s + other_s + weights_s
        seconds[end] = max(computing_s, launches_s) * micro_batches * (1.0 if efficiency is FAST else WITH_VALIDATION)
        is_cached = efficiency.from_cache and cache_bytes
        reasons[end] = (
            f"{watts_text}products {product_s / computing_s:.0%} of the time, at up to {efficiency.of_peak:.0%} of "
            f"{peak_rate * clock / 1e12:.1f} TFLOP/s; memory traffic of all other kernels "
            f"{(other_s + weights_s) / computing_s:.0%}, at {efficiency.of_bandwidth:.0%} of {bandwidth / 1e9:.0f} GB/s"
            + (f", {efficiency.from_cache:.0%} of it from the cache where it fits" if is_cached else "")
            + ("; torch.compile fuses the other kernels away" if is_fused else "")
            + (f"; launching {launches:,} kernels takes longer than computing them" if launches_s > computing_s else "")
        )
    low_share, high_share = operations / (seconds["high"] * peak_rate), operations / (seconds["low"] * peak_rate)
    basis = (
        f"{data.text}. {operations:.2g} operations; {low_share:.0%} to {high_share:.0%} of {peak_rate / 1e12:.3g} "
        "TFLOP/s, from the work of each kernel and assumed efficiencies; never checked on a GPU"
    )
    return _estimated(
        data, low_s=seconds["low"], high_s=seconds["high"], basis=basis, low_reason=reasons["low"],
        high_reason=reasons["high"], share_of_peak=(low_share, high_share),
    )  # fmt: skip


@dataclass(frozen=True)
class TrainingTime:
    """Estimated time of a training."""

    training_s: float  # all steps of all epochs
    scoring_s: float  # validation after each epoch, and every test set once
    starting_s: float  # imports, reading data, building the model
    steps: int  # of all epochs
    timed_steps: int

    @property
    def total_s(self) -> float:
        """Seconds of the command ``train``."""
        return self.starting_s + self.training_s + self.scoring_s


def time_steps(
    recipe: Recipe,
    cache: Path,
    environment: Mapping[str, str] = os.environ,
    accelerator: Literal["auto", "cpu"] = "auto",
) -> TrainingTime:
    """Time some steps of ``recipe`` in a child process with these environment variables. Encodes data into ``cache``.

    Raises:
        InputError: recipe, data or tokenizer cannot be used, or the child died; with its message.
    """
    # A temporary folder, because another command may time the same recipe at the same time.
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        write_text(path, recipe.to_yaml())
        arguments = [str(path), str(cache.absolute()), str(TIMED_S), accelerator]
        child = subprocess.run(
            [sys.executable, "-m", "edgeformer.training.duration", *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={"OMP_PROC_BIND": "true", **environment},
        )  # fmt: skip
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = child.stderr.strip().splitlines() or ["no answer"]
        raise InputError(f"{recipe.name}: its steps cannot be timed: {lines[-1]}") from None
    if "error" in answer:
        raise InputError(str(answer["error"]))
    return TrainingTime(**answer)


def probe(recipe: Recipe, cache: Path, seconds: float, started: float, *, use_cpu: bool = False) -> TrainingTime:
    """Time steps of ``recipe``, drawn from all over an epoch, and the scoring of its smallest set.

    A step counts by the tokens of its batch, padding included: batches of similar length differ in size.

    Args:
        seconds: limit of the timed steps; eight steps are always taken.
        started: ``time.monotonic()`` at the start of the process.
    """
    # Only the child process imports torch.
    from edgeformer.models.adapter import BuildTarget
    from edgeformer.training.checkpoint import Position
    from edgeformer.training.distributed import connect
    from edgeformer.training.objective import Objective, without_teacher
    from edgeformer.training.step import Stepper

    has_teacher = getattr(recipe.training, "teacher", None) is not None
    recipe = model_spec_of(recipe).adapter.pinned(without_teacher(recipe) if has_teacher else recipe)
    # A training compiles once, which takes as long as all timed steps.
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"compile": None})})
    processes = connect(recipe, "cpu" if use_cpu else "auto", sharded=False)
    objective = Objective(recipe, cache, BuildTarget(processes.device.type, processes.precision), SILENT)
    epochs, plan, prepared = recipe.training.epochs, objective.steps(0), objective.prepared
    stepper = Stepper(objective, processes, len(plan) * epochs)
    starting_s = time.monotonic() - started
    order = np.random.default_rng(recipe.seed).permutation(len(plan))
    lengths = [prepared.train.sizes(plan[int(step)]) for step in order]
    tokens = np.array([float(len(rows) * rows.max(initial=1)) for rows in lengths], dtype=np.float64)
    position, steps, steps_s = Position(batch_size=recipe.training.batch_size), 0, 0.0
    stepper.model.train()
    for number, step in enumerate(np.resize(order, WARM_UP_STEPS + MAX_STEPS)):
        if number == WARM_UP_STEPS:
            steps, steps_s = 0, 0.0
        if number >= WARM_UP_STEPS + MIN_STEPS and steps_s > seconds:
            break
        mark = time.perf_counter()
        stepper.take(plan[int(step)], position)
        steps, steps_s = steps + 1, steps_s + time.perf_counter() - mark
    timed_tokens = np.resize(tokens, WARM_UP_STEPS + steps)[WARM_UP_STEPS:].sum()
    training_s = steps_s / timed_tokens * tokens.sum() * epochs * (1 + _FORWARD_SHARE * has_teacher)
    sets = {"validation": prepared.validation, **prepared.tests}
    set_tokens = {name: float(rows.lengths.sum()) for name, rows in sets.items()}
    smallest = min(set_tokens, key=lambda name: set_tokens[name])
    mark = time.perf_counter()
    objective.evaluate(objective.model, smallest)
    token_s = (time.perf_counter() - mark) / max(1.0, set_tokens[smallest])
    scoring_s = token_s * (set_tokens["validation"] * (epochs - 1) + sum(set_tokens.values()))
    return TrainingTime(training_s, scoring_s, starting_s, len(plan) * epochs, steps)


def main() -> None:
    """Time the recipe of the command line and print the result as JSON."""
    started = time.monotonic()
    path, cache, seconds, accelerator = sys.argv[1:5]
    try:
        recipe = load_recipe(path)
        with keep_heap(recipe.training.batch_size * recipe.data.tokens_at_once):
            result = probe(recipe, Path(cache), float(seconds), started, use_cpu=accelerator == "cpu")
    except EdgeformerError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(error.exit_code)
    print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
