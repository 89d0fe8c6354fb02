"""Memory of training: the peak predicted from a trace on tensors without data, and the peak measured."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgeformer.artifacts.base import first_problem
from edgeformer.artifacts.data_config import DataSection
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.plan import MemoryBreakdown
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes
from edgeformer.data.batching import concatenate
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import FitSize, run_scorer
from edgeformer.models.blocks.segments import SDPA, Segments, choose_attention
from edgeformer.system.memory import OWN_PAGES, host_free_bytes
from edgeformer.tasks import get_task
from edgeformer.training.loop.optimizer import (
    BF16_CAPABILITY,
    StaticGradientTable,
    allocate_state,
    build_optimizer,
    use_static_gradients,
)
from edgeformer.training.plan.duration import StepWork, WorkCounter

Kind = Literal["weights", "gradients", "optimizer", "activations", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DeviceKind = Literal["cuda", "cpu"]
HALF_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}

_MIB = 2**20
_TO_COPY = torch.ops.aten._to_copy.default
_DEVICE_OF = torch.ops.prim.device.default
_HEAP_GAPS, _HEAP_GAPS_HALF = 0.7, 1.2
"""Gaps in the heap as a share of the tensors that come and go in it: in float32, and in 16-bit formats."""
_FIT_RESERVE_BYTES = 96 << 20
"""Rows, tokenizer, and what SciPy copies: a fit of SST-2 took 194 MiB beyond the libraries, of which 106 predicted."""
_MEMORY_PER_FILE_BYTE = 2
"""Least bytes in memory per byte of a data file: text and tokens. Measured at commit 9a33755b: 2.2
for a classifier's rows of 1 KB cut to 256 tokens, 7 to 9 for a language model's."""


@dataclass
class Usage:
    """Bytes of each kind: now (``current``), and at the moment when their sum was largest (``worst``)."""

    current: Counter[Kind] = field(default_factory=Counter)
    worst: Counter[Kind] = field(default_factory=Counter)
    _total: int = 0
    _largest: int = 0

    def change(self, sizes: dict[Kind, int]) -> None:
        """Add bytes to the current ones; negative bytes are freed."""
        for kind, size in sizes.items():
            self.current[kind] += size
            self._total += size
        is_worst = self._total > self._largest
        if is_worst or (self._total == self._largest and len(sizes) > 1):  # the same bytes changed their kind
            self.worst, self._largest = self.current.copy(), self._total


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of each tensor storage but ``weights``, real or fake, from its allocation in the blocks on.

    Its totals are those of ``torch.distributed._tools.mem_tracker.MemTracker`` (a test compares them) in a quarter of
    the time. MemTracker cannot follow a model whose parts are called from outside its ``forward``, as the loss calls
    CRT's heads. A kernel's workspace is not counted.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all, self.heap = Usage(), Usage()  # of all storages, and of those too small for pages of their own
        self._kinds: dict[int, Kind] = {}  # by the address of a live storage; addresses are reused
        self._finalizers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._kind: Kind = "activations"

    @contextmanager
    def recording(self, kind: Kind) -> Iterator[None]:
        """Count storages allocated in the block as ``kind``."""
        self._kind = kind
        with self:
            yield

    def _change(self, storage_bytes: int, sizes: dict[Kind, int]) -> None:
        self.all.change(sizes)
        if storage_bytes < OWN_PAGES:
            self.heap.change(sizes)

    def mark_gradient(self, parameter: Tensor) -> None:
        """Count the storage of ``parameter.grad`` as a gradient from now on."""
        if parameter.grad is None:  # torch also calls the hook for a parameter that the loss does not use
            return
        storage = parameter.grad.untyped_storage()
        kind, size = self._kinds.get(storage._cdata, "gradients"), storage.nbytes()
        if kind != "gradients":
            self._kinds[storage._cdata] = "gradients"
            self._change(size, {kind: -size, "gradients": size})

    def add(self, tensor: Tensor, kind: Kind) -> None:
        """Count the storage of ``tensor``, unless it is counted already."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._kinds or address in self._weights or not size:
            return
        self._kinds[address] = kind
        self._change(size, {kind: size})

        def count_freed(_: object) -> None:
            del self._finalizers[address]
            self._change(size, {self._kinds.pop(address): -size})

        self._finalizers[address] = weakref.ref(storage, count_freed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE_OF:  # called twice as often as everything else together
            casts_weight = func is _TO_COPY and args[0].untyped_storage()._cdata in self._weights
            kind: Kind = "temporary" if casts_weight else self._kind
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self.add(tensor, kind)
        return result


def example_tensors(arrays: dict[str, NDArray[np.int64]]) -> dict[str, Tensor]:
    """Return tensors of the arrays' shapes, filled with the first number of each array."""
    return {name: torch.full(array.shape, int(array.flat[0]), dtype=torch.int64) for name, array in arrays.items()}


class MaskDropout(nn.Dropout):
    """Dropout as on CUDA, which keeps a mask of bytes; a CPU keeps noise of the input's type."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = torch.native_dropout(input, self.p, self.training)[0]
        return result


_VALIDATION_PEAKS: dict[str, Counter[Kind]] = {}
"""By task, data and model: a search for what fits predicts many recipes that differ in training only."""


def predict_peak(
    recipe: Recipe, *, device_kind: DeviceKind, precision: str, processes: int = 1, sharded: bool = False,
    work: StepWork | None = None, start_bytes: int = 0,
) -> MemoryBreakdown:  # fmt: skip
    """Predict the bytes of a process at the worst moment of training ``recipe``, with batches of full length.

    The reserve on a CUDA card is assumed: 64 MiB for cuBLAS workspaces and the kernels' own scratch, and a tenth of
    activations and temporary tensors for gaps of the caching allocator. The budget excludes CUDA's context and code.
    The reserve on a CPU is calibrated by benchmarks/plan_accuracy.py (glibc 2.36): 35 MiB of library pages and MKL's
    buffers, and gaps in the heap of tensors below 32 MiB. docs/results/training.md compares predictions and peaks.

    Args:
        device_kind: where it would train; this host need not have it.
        precision: fp32, bf16 or fp16 (resolved).
        processes: that train together; ``recipe`` is the share of one.
        sharded: each process has a shard of weights and optimizer state, and gathers the weights for a step.
        work: receives the work of a micro-batch.
        start_bytes: of a frozen start, which the processor computes, beside the weights.
    """
    with FakeTensorMode():
        # 1. Build model, loss and optimizer, with the state of the optimizer.
        task, adapter = get_task(recipe.task), model_spec_of(recipe).adapter
        model = adapter.build(recipe)
        if device_kind == "cuda":
            adapter.match_cuda_memory(model)
            for module in model.modules():
                if type(module) is nn.Dropout and module.p:
                    module.__class__ = MaskDropout
        static_gradients = use_static_gradients(model, device_kind, recipe.training, processes)
        model.train()
        parameters = list(model.parameters())
        weights = [*parameters, *model.buffers()]
        teacher_ledger = MemoryLedger(weights)
        with teacher_ledger.recording("weights"):
            loss = adapter.loss(model, recipe, None)
        optimizer = build_optimizer(model, recipe.training.optimizer, adapter.learning(model, recipe.training))
        allocate_state(optimizer)

        # 2. Trace one step: a micro-batch, the last of several, clipping and the optimizer's step.
        accumulated = []  # parameters with a gradient of the micro-batches before
        if recipe.training.accumulation > 1:
            tables = {id(module.weight) for module in model.modules() if isinstance(module, StaticGradientTable)}
            accumulated = [each for each in parameters if each.requires_grad and id(each) not in tables]
        for parameter in accumulated:
            parameter.grad = torch.zeros_like(parameter)
        existing = [*static_gradients, *(each.grad for each in accumulated if each.grad is not None)]
        ledger = MemoryLedger([*weights, *existing])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(ledger.mark_gradient)  # type: ignore[no-untyped-call]
        arrays = task.rows.example(recipe, recipe.training.batch_size)
        use, longest = choose_attention(recipe, device_kind, precision, BF16_CAPABILITY), recipe.data.tokens_at_once
        if use.used != SDPA:  # rows of full length, of one document each
            arrays.pop("positions", None)
            arrays = concatenate({**arrays, "attention_mask": np.ones_like(arrays["input_ids"])}, 0)
        half, counter = HALF_FORMATS.get(precision), nullcontext() if work is None else WorkCounter(work, device_kind)
        with ledger.recording("activations"), nullcontext() if half is None else torch.autocast("cpu", half):
            batch: dict[str, Any] = example_tensors(arrays)
            if use.used != SDPA:
                segments = Segments(batch.pop("ends"), batch.pop("positions"), batch.pop("places"), longest, use.used)
                batch["positions" if task.can_write else "attention_mask"] = segments
            with counter:
                total = loss(model, batch).total
        with ledger.recording("temporary"):
            with counter:
                total.backward()  # type: ignore[no-untyped-call]
            for parameter in accumulated:
                if parameter.grad is not None and parameter.grad._version == 0:  # the loss does not use the parameter
                    parameter.grad = None
            gradients = [parameter.grad for parameter in accumulated if parameter.grad is not None]
            if recipe.training.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, recipe.training.clip_norm)
            optimizer.step()
        if work is not None:
            work.parameters = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        # Bytes of the tensors that exist during the whole step.
        tensors_of: dict[Kind, list[Tensor]] = {
            "weights": weights,
            "optimizer": [tensor for state in optimizer.state.values() for tensor in state.values()],
            "gradients": [*static_gradients, *gradients],
        }
        lasting = {kind: sum(t.untyped_storage().nbytes() for t in tensors) for kind, tensors in tensors_of.items()}
        lasting["weights"] += sum(teacher_ledger.all.current.values())

        # 3. Trace a batch of validation.
        key = recipe.model_dump_json(include={"task", "data", "model"})
        if key not in _VALIDATION_PEAKS:  # the worst moment of one batch, in float32 and without gradients
            model = adapter.build(recipe).eval()
            validation = MemoryLedger([*model.parameters(), *model.buffers()])
            with validation.recording("activations"), torch.no_grad():
                batch = example_tensors(task.rows.example(recipe, task.rows.rows_at_once(recipe.data.tokens_at_once)))
                run_scorer(adapter.scorer(model), batch)
            _VALIDATION_PEAKS[key] = validation.all.worst
        traced = [ledger.all.worst, _VALIDATION_PEAKS[key]]
        if not recipe.training.epochs:  # a frozen start alone takes no step
            lasting, traced = {"weights": lasting["weights"]}, [_VALIDATION_PEAKS[key]]

    # 4. Find the worst moment.
    if sharded:
        lasting["weights"] = lasting["weights"] * (processes + 1) // processes
        lasting["optimizer"] = lasting.get("optimizer", 0) // processes
    moments = [{kind: lasting.get(kind, 0) + worst[kind] for kind in KINDS} for worst in traced]
    if device_kind == "cpu":
        moments.append({**dict.fromkeys(KINDS, 0), "weights": lasting["weights"], "temporary": start_bytes})
    peak = max(moments, key=lambda moment: sum(moment.values()))
    if device_kind == "cuda":
        reserve = 64 * _MIB + round(0.1 * (peak["activations"] + peak["temporary"]))
    else:
        gaps, heap = _HEAP_GAPS if precision == "fp32" else _HEAP_GAPS_HALF, ledger.heap.worst
        reserve = 35 * _MIB + round(gaps * (heap["activations"] + heap["temporary"]))
    return MemoryBreakdown(**peak, reserve=reserve)


def predict_fit(recipe: Recipe, rows: int, tokens: int) -> FitSize:
    """Predict weights and memory of a fit to ``rows`` training rows of ``tokens`` tokens together, with reserve."""
    adapter: Any = model_spec_of(recipe).adapter
    size: FitSize = adapter.fit_size(recipe, rows, tokens)
    return FitSize(size.parameters, size.memory.model_copy(update={"reserve": _FIT_RESERVE_BYTES}))


def check_data_fits(data: DataSection, processes: int = 1) -> None:
    """Raise InputError for files that memory cannot hold, before they are read. A streamed set needs no memory."""
    held_out = 0.0  # share of a streamed pool that its validation and test sets keep in memory
    is_cut = data.stream and getattr(data, "split", None) == "stratified"
    if is_cut:
        limits = [getattr(data, "rows", {}).get(name, 1.0) for name in ("validation", "test")]
        held_out = sum(0.1 * limit for limit in limits if isinstance(limit, float))
    size = 0.0
    for part, sources in data.parts.items():
        share = held_out if is_cut and part in ("train", "validation") else 1.0
        if part == "train" and not is_cut and (data.stream or getattr(data, "first_n", None) is not None):
            share = 0.0
        for source in sources:
            if source.kind == "file" and Path(source.path).is_file():
                rows = 1.0 if source.rows is None else source.rows
                size += share * Path(source.path).stat().st_size * (rows if isinstance(rows, float) else 0.0)
    needed = round(processes * size) * _MEMORY_PER_FILE_BYTE
    free, description = host_free_bytes()
    if needed <= free:
        return
    if is_cut:
        remedy = "keep fewer validation and test rows: --set data.rows.validation=5000 --set data.rows.test=5000"
    elif data.stream:
        remedy = "use smaller validation and test sets, because only the training set is streamed"
    else:
        remedy = "keep the training set on disk: --set data.stream=true"
        try:
            type(data).model_validate({**data.model_dump(), "stream": True}, strict=False)
        except ValidationError as error:
            remedy += f" (also change the recipe: {first_problem(error)})"
    times = f" for {processes} processes" if processes > 1 else ""
    raise InputError(
        f"data.parts: the files need at least {format_bytes(needed)} of memory{times}, and {format_bytes(free)} are "
        f"{description}; {remedy}, or train anyway with --ignore-memory"
    )


def measured_peak(device_type: str) -> tuple[int | None, str]:
    """Return this process's peak memory in bytes, and a description of it."""
    if device_type == "cuda":
        return int(torch.cuda.max_memory_allocated()), "peak of torch's CUDA allocator, without context and cache"
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset), "peak working set of the whole process"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, "peak resident set of the whole process, libraries and data included"
