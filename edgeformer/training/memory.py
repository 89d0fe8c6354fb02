"""Memory of training: the peak predicted from a trace on tensors without data, free memory, and running out of it."""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgeformer.artifacts.command_results import MemoryBreakdown
from edgeformer.artifacts.data_config import DataSection
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import BuildTarget, run_scorer
from edgeformer.system.memory import OWN_PAGES, host_free_bytes
from edgeformer.tasks import get_task
from edgeformer.training.optimizer import allocate_state, build_optimizer, use_static_gradients

Kind = Literal["weights", "gradients", "optimizer", "activations", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DeviceKind = Literal["cuda", "cpu"]
HALF_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}

_MIB = 2**20
_TO_COPY = torch.ops.aten._to_copy.default
_DEVICE_OF = torch.ops.prim.device.default
_HEAP_GAPS, _HEAP_GAPS_HALF = 0.7, 1.2
"""Gaps in the heap as a share of the tensors that come and go in it: in float32, and in 16-bit formats."""
_MEMORY_PER_FILE_BYTE = 2
"""Least bytes in memory per byte of a data file: text and tokens. benchmarks/stream_memory.py --in-memory measured 2.2
for a classifier's rows of 1 KB cut to 256 tokens, 7 to 9 for a language model's."""


class Event(NamedTuple):
    """A storage is allocated (its size), is freed (minus its size), or becomes the gradient of a parameter (0)."""

    storage: int
    size_bytes: int
    kind: Kind


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records when each tensor storage, real or fake, is allocated and freed by the code in its blocks.

    Its totals are those of ``torch.distributed._tools.mem_tracker.MemTracker`` (a test compares them) in a quarter of
    the time. MemTracker also hooks into every module to attribute memory to it, and cannot follow a model whose parts
    are called from outside its ``forward``, as the loss calls CRT's heads. A kernel's workspace is not recorded.

    Args:
        weights: tensors that are not recorded.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}  # address of a live storage → its number; addresses are reused
        self._finalizers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._kind: Kind = "activations"
        self._count = 0

    @contextmanager
    def recording(self, kind: Kind) -> Iterator[None]:
        """Record storages allocated in the block as ``kind``."""
        outer_kind, self._kind = self._kind, kind
        try:
            with self:
                yield
        finally:
            self._kind = outer_kind

    def mark_gradient(self, parameter: Tensor) -> None:
        """Record that the storage of ``parameter.grad`` is a gradient from now on."""
        if parameter.grad is None:  # torch also calls the hook for a parameter that the loss does not use
            return
        number = self._numbers.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self.events.append(Event(number, 0, "gradients"))

    def add(self, tensor: Tensor, kind: Kind) -> None:
        """Record the storage of ``tensor``, unless it is recorded already."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._numbers or address in self._weights or not size:
            return
        number = self._numbers[address] = self._count
        self._count += 1
        self.events.append(Event(number, size, kind))

        def record_freed(_: object) -> None:
            del self._numbers[address], self._finalizers[number]
            self.events.append(Event(number, -size, kind))

        self._finalizers[number] = weakref.ref(storage, record_freed)

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


def with_gradients(events: list[Event]) -> tuple[int, list[Event]]:
    """Return the bytes of the gradients of an earlier micro-batch, and the events of a later one.

    A later micro-batch adds each new gradient to the existing one and frees it at once.
    """
    sizes = {event.storage: event.size_bytes for event in events if event.size_bytes > 0}
    added: set[int] = set()
    result = []
    for event in events:
        if event.size_bytes == 0 and event.storage not in added:
            added.add(event.storage)
            result.append(Event(event.storage, -sizes[event.storage], "temporary"))
        elif event.storage not in added:
            result.append(event)
    return sum(sizes[storage] for storage in added), result


def worst_moment(existing: dict[Kind, int], events: Iterable[Event]) -> dict[Kind, int]:
    """Return the bytes of each kind at the moment when their sum is largest."""
    current = {kind: existing.get(kind, 0) for kind in KINDS}
    worst, largest = dict(current), sum(current.values())
    total = largest
    live: dict[int, Event] = {}
    for event in events:
        if event.size_bytes == 0:  # the same bytes change their kind
            old = live[event.storage]
            current[old.kind] -= old.size_bytes
            current[event.kind] += old.size_bytes
            live[event.storage] = old._replace(kind=event.kind)
            if total == largest:
                worst = dict(current)
            continue
        if event.size_bytes > 0:
            live[event.storage] = event
            current[event.kind] += event.size_bytes
        else:
            current[live.pop(event.storage).kind] += event.size_bytes
        total += event.size_bytes
        if total > largest:
            worst, largest = dict(current), total
    return worst


def _trace_step(
    recipe: Recipe, device_kind: DeviceKind, precision: str, processes: int = 1
) -> tuple[dict[Kind, int], list[Event]]:
    """Trace the memory of one step of ``recipe``, with batches of full length, under FakeTensorMode.

    The tensors are fake CPU tensors (fake CUDA tensors need a torch with CUDA). For a CUDA card, modules that use
    memory differently on it are replaced.

    Returns:
        Bytes of the tensors that live as long as the training, static gradients of tables included; and the events of
        the first micro-batch of a step, clipping and the optimizer's step, which leave the other gradients.
    """
    task, adapter = get_task(recipe.task), model_spec_of(recipe).adapter
    model, _ = adapter.build(recipe, BuildTarget(for_export=True))  # the kernel of attention does not change the memory
    if device_kind == "cuda":
        adapter.match_cuda_memory(model)
        use_cuda_dropout(model)
    static_gradients = use_static_gradients(model, device_kind, recipe.training, processes)
    model.train()
    parameters = list(model.parameters())
    weights = [*parameters, *model.buffers()]
    teacher_ledger = MemoryLedger(weights)
    with teacher_ledger.recording("weights"):
        loss = adapter.loss(model, recipe, None)
    ledger = MemoryLedger([*weights, *static_gradients])
    optimizer = build_optimizer(model, recipe.training.optimizer, adapter.learning(model, recipe.training))
    allocate_state(optimizer)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ledger.mark_gradient)  # type: ignore[no-untyped-call]
    half = HALF_FORMATS.get(precision)
    with ledger.recording("activations"), contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
        batch = example_tensors(task.example(recipe, recipe.training.batch_size))
        total = loss(model, batch).total
    with ledger.recording("temporary"):
        total.backward()  # type: ignore[no-untyped-call]
        if recipe.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.training.clip_norm)
        optimizer.step()
    events = list(ledger.events)  # a copy: on return, the ledger records the tensors that are freed

    def storage_bytes(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    lasting: dict[Kind, int] = {
        "weights": storage_bytes(weights) + sum(event.size_bytes for event in teacher_ledger.events),
        "optimizer": storage_bytes(tensor for state in optimizer.state.values() for tensor in state.values()),
        "gradients": storage_bytes(static_gradients),
    }
    return lasting, events


def example_tensors(arrays: dict[str, NDArray[np.int64]]) -> dict[str, Tensor]:
    """Return tensors of the arrays' shapes, filled with the first number of each array."""
    return {name: torch.full(array.shape, int(array.flat[0]), dtype=torch.int64) for name, array in arrays.items()}


class _MaskDropout(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.native_dropout(x, self.share, self.training)[0]
        return result


def use_cuda_dropout(model: nn.Module) -> None:
    """Replace dropout by CUDA's implementation, which keeps a mask of bytes; a CPU keeps noise of the input's type."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout) and child.p:
                setattr(module, name, _MaskDropout(child.p))


_VALIDATION_EVENTS: dict[str, list[Event]] = {}
"""By task, data and model: a search for what fits predicts many recipes that differ in training only."""


def _trace_validation(recipe: Recipe) -> list[Event]:
    """Trace the memory of one validation batch, in float32 and without gradients."""
    key = recipe.model_dump_json(include={"task", "data", "model"})
    if key not in _VALIDATION_EVENTS:
        task, adapter = get_task(recipe.task), model_spec_of(recipe).adapter
        model, _ = adapter.build(recipe, BuildTarget(for_export=True))
        model.eval()
        ledger = MemoryLedger([*model.parameters(), *model.buffers()])
        with ledger.recording("activations"), torch.no_grad():
            batch = example_tensors(task.example(recipe, task.evaluation_rows(recipe.data.tokens_at_once)))
            run_scorer(adapter.scorer(model), batch)
            _VALIDATION_EVENTS[key] = list(ledger.events)
    return _VALIDATION_EVENTS[key]


def share_of(recipe: Recipe, processes: int) -> Recipe:
    """Return a recipe whose batch is the share of one of ``processes``, to predict the memory of each process."""
    training = recipe.training
    rows = -(-training.effective_batch // processes)
    size = min(training.batch_size, rows)
    share = training.model_copy(update={"batch_size": size, "accumulation": -(-rows // size)})
    return recipe.model_copy(update={"training": share})


def predict_peak(
    recipe: Recipe, *, device_kind: DeviceKind, precision: str, processes: int = 1, sharded: bool = False
) -> MemoryBreakdown:
    """Predict the bytes of a process at the worst moment of training ``recipe``, with batches of full length.

    The reserve on a CUDA card is assumed, never calibrated: 64 MiB for cuBLAS workspaces (8 MiB for each of two
    threads, 32 MiB on Hopper) and the kernels' own scratch, and a tenth of activations and temporary tensors for gaps
    of the caching allocator. The budget excludes CUDA's context and the kernels' code.

    The reserve on a CPU is calibrated by benchmarks/plan_accuracy.py (glibc 2.36, fp32). 35 MiB are library pages first
    touched in a step (24) and MKL's buffers (11). The rest are gaps in the heap, which contains tensors below 32 MiB:
    at nine sizes it grew by 0.4 to 0.9 of these tensors beyond their bytes. With every tensor in its own pages
    (MALLOC_MMAP_THRESHOLD_=65536), measured and counted bytes agree within 1 %. docs/results.md compares predictions
    and peaks. Batches of many lengths leave more gaps, most in bfloat16, where oneDNN's primitives lie between the
    tensors: that share is from `baseline_yelp_fast`, whose heap stopped growing after 60 steps of 64 texts of up to 128
    tokens.

    Args:
        device_kind: where it would train; this host need not have it.
        precision: fp32, bf16 or fp16 (resolved).
        processes: that train together; ``recipe`` is the share of one, see :func:`share_of`.
        sharded: each process has a shard of weights and optimizer state, and gathers the weights for a step.
    """
    with FakeTensorMode():
        lasting, events = _trace_step(recipe, device_kind, precision, processes)
        if sharded:
            lasting["weights"] = lasting["weights"] * (processes + 1) // processes
            lasting["optimizer"] //= processes
        moments = [worst_moment(lasting, events), worst_moment(lasting, _trace_validation(recipe))]
    if recipe.training.accumulation > 1:
        gradient_bytes, later_events = with_gradients(events)
        existing: dict[Kind, int] = {**lasting, "gradients": lasting["gradients"] + gradient_bytes}
        moments.append(worst_moment(existing, later_events))
    peak = max(moments, key=lambda moment: sum(moment.values()))
    if device_kind == "cuda":
        reserve = 64 * _MIB + round(0.1 * (peak["activations"] + peak["temporary"]))
    else:
        sizes = {event.storage: event.size_bytes for event in events if event.size_bytes > 0}
        heap = worst_moment({}, [event for event in events if sizes[event.storage] < OWN_PAGES])
        gaps = _HEAP_GAPS if precision == "fp32" else _HEAP_GAPS_HALF
        reserve = 35 * _MIB + round(gaps * (heap["activations"] + heap["temporary"]))
    return MemoryBreakdown(**peak, reserve=reserve)


def free_bytes(device_kind: str) -> tuple[int, str]:
    """Return the free bytes of the current CUDA card, or of this host and its control group, and a description."""
    if device_kind == "cuda":
        name = torch.cuda.get_device_name()
        return int(torch.cuda.mem_get_info()[0]), f"free on {name} now"
    return host_free_bytes()


def check_data_fits(data: DataSection, processes: int = 1) -> None:
    """Refuse files that memory cannot hold, before they are read. A streamed training set needs no memory.

    Args:
        processes: on this host, each of which reads the files.

    Raises:
        InputError: with the memory they would take, and how to reduce it.
    """
    excluded = {"train"} if data.stream or getattr(data, "first_n", None) is not None else set()
    sources = [source for part, sources in data.parts.items() if part not in excluded for source in sources]
    paths = [Path(source.path) for source in sources if source.kind == "file"]
    size = processes * sum(path.stat().st_size for path in paths if path.is_file())
    free, description = free_bytes("cpu")
    if size * _MEMORY_PER_FILE_BYTE <= free:
        return
    remedy = "set data.stream: true (--set data.stream=true), which keeps the training set on disk"
    if data.stream:
        remedy = "make the sets besides train smaller: only train is streamed"
    times = f" (those of {processes} processes)" if processes > 1 else ""
    raise InputError(
        f"data.parts: {format_bytes(size)} of files{times} take at least {format_bytes(size * _MEMORY_PER_FILE_BYTE)} "
        f"in memory, and {format_bytes(free)} are {description}; {remedy}, or train anyway with --ignore-memory"
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


_OUT_OF_MEMORY = re.compile(
    r"DefaultCPUAllocator"
    r"|CUDA out of memory"  # torch.OutOfMemoryError, wrapped by the compiler
    r"|CUDA (driver )?error: out of memory"  # AcceleratorError; the allocator's expandable segments
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUSPARSE_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED"
    r"|Triton Error \[CUDA\]: out of memory"
)
"""Messages of a RuntimeError. Not included: Triton's "out of resource: shared memory" (a block of a kernel needs more
than a multiprocessor has, for any number of rows) and CUBLAS_STATUS_NOT_INITIALIZED (has other causes too)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the card or the host ran out of memory, so that a smaller batch may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
