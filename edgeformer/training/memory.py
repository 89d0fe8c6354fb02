"""Which tensors come and go while a piece of torch code runs, and what of them exists at the worst moment."""

from __future__ import annotations

import contextlib
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
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

from edgeformer.artifacts.data_config import DataSection
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.plan import MemoryBreakdown
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import Place, run_scorer
from edgeformer.system import nvidia
from edgeformer.system.memory import OWN_PAGES, host_free_bytes
from edgeformer.tasks import task_named
from edgeformer.training.optimizer import allocate_state, build_optimizer, quicken, quickens

Kind = Literal["weights", "gradients", "optimizer", "activations", "temporary"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TO_COPY = torch.ops.aten._to_copy.default
_DEVICE_OF = torch.ops.prim.device.default


class Event(NamedTuple):
    """A storage appears (its size), goes (minus its size), or becomes the gradient of a parameter (0)."""

    storage: int
    size_bytes: int
    kind: Kind


class MemoryLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the life of every tensor storage, real or fake, that the code in its blocks makes.

    It finds the same totals as ``torch.distributed._tools.mem_tracker.MemTracker`` (a test compares them) in a quarter
    of the time. That one also hooks into every module to attribute memory to it, and cannot follow a model whose parts
    are called from outside its ``forward``, as CRT's heads are by the loss. What a kernel takes for itself is not seen.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._numbers: dict[int, int] = {}  # address of a storage → its number; an address is used again later
        self._guards: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._kind: Kind = "activations"
        self._count = 0

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """Record what is made in this block as ``kind``."""
        before, self._kind = self._kind, kind
        try:
            with self:
                yield
        finally:
            self._kind = before

    def is_gradient_of(self, parameter: Tensor) -> None:
        """What ``parameter`` holds as its gradient is one from now on."""
        if parameter.grad is None:  # of a loss that leaves it out: torch calls the hook all the same
            return
        number = self._numbers.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self.events.append(Event(number, 0, "gradients"))

    def enter(self, tensor: Tensor, kind: Kind) -> None:
        """``tensor`` exists, if that is news."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address in self._numbers or address in self._weights or not size:
            return
        number = self._numbers[address] = self._count
        self._count += 1
        self.events.append(Event(number, size, kind))

        def gone(_: object) -> None:
            del self._numbers[address], self._guards[number]
            self.events.append(Event(number, -size, kind))

        self._guards[number] = weakref.ref(storage, gone)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE_OF:  # asked twice as often as everything else together
            casts_a_weight = func is _TO_COPY and args[0].untyped_storage()._cdata in self._weights
            kind: Kind = "temporary" if casts_a_weight else self._kind
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self.enter(made, kind)
        return result


def with_gradients(events: list[Event]) -> tuple[int, list[Event]]:
    """A micro-batch as it is when an earlier one has left its gradients: their bytes, and the events.

    Then a new gradient is added to the old one and goes at once, where the first one stays.
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
    """Bytes of each kind when their sum is largest."""
    now = {kind: existing.get(kind, 0) for kind in KINDS}
    worst, largest = dict(now), sum(now.values())
    total = largest
    held: dict[int, Event] = {}
    for event in events:
        if event.size_bytes == 0:  # the same bytes under another name
            old = held[event.storage]
            now[old.kind] -= old.size_bytes
            now[event.kind] += old.size_bytes
            held[event.storage] = old._replace(kind=event.kind)
            if total == largest:
                worst = dict(now)
            continue
        if event.size_bytes > 0:
            held[event.storage] = event
            now[event.kind] += event.size_bytes
        else:
            now[held.pop(event.storage).kind] += event.size_bytes
        total += event.size_bytes
        if total > largest:
            worst, largest = dict(now), total
    return worst


# The memory of training: its peak, predicted before a step is run by tracing one step and one validation batch on
# tensors without data; what is free on the machine that trains, the peak so far, and whether it ran out.


_MIB = 2**20

DeviceKind = Literal["cuda", "cpu"]
HALF_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _trace(
    recipe: Recipe, device_kind: DeviceKind, precision: str, processes: int = 1
) -> tuple[dict[Kind, int], list[Event]]:
    """The memory of training ``recipe``, batches at their longest, found without allocating any of it.

    The tensors are fake ones of the CPU (fake CUDA tensors need a torch with CUDA); for a CUDA card, what differs
    there is put in place.

    Returns:
        Bytes of the tensors that live as long as the training, gradients of tables among them; and the first
        micro-batch of a step, clipping and the optimizer's step. What that leaves are the other gradients.
    """
    task, adapter = task_named(recipe.task), model_spec_of(recipe).adapter
    model, _ = adapter.build(recipe, Place(for_export=True))  # flash or not takes the same memory
    if device_kind == "cuda":
        adapter.as_on_cuda(model)
        drop_as_on_cuda(model)
    kept = quicken(model) if quickens(device_kind, recipe.training, processes) else []
    model.train()
    parameters = list(model.parameters())
    weights = [*parameters, *model.buffers()]
    others = MemoryLedger(weights)
    with others.making("weights"):
        loss = adapter.loss(model, recipe, None)
    teacher = sum(event.size_bytes for event in others.events)
    ledger = MemoryLedger([*weights, *kept])
    learning = adapter.learning(model, recipe.training)
    optimizer = build_optimizer(model, recipe.training.optimizer, learning)
    allocate_state(optimizer)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(ledger.is_gradient_of)  # type: ignore[no-untyped-call]
    half = HALF_FORMATS.get(precision)
    with ledger.making("activations"), contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
        batch = filled(task.example(recipe, recipe.training.batch_size))
        total = loss(model, batch).total
    with ledger.making("temporary"):
        total.backward()  # type: ignore[no-untyped-call]
        if recipe.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, recipe.training.clip_norm)
        optimizer.step()
    first = list(ledger.events)  # a copy: what is left goes when this function returns
    state = [tensor for tensors in optimizer.state.values() for tensor in tensors.values()]
    return {"weights": _bytes(weights) + teacher, "optimizer": _bytes(state), "gradients": _bytes(kept)}, first


def filled(arrays: dict[str, NDArray[np.int64]]) -> dict[str, Tensor]:
    """Tensors of these shapes; the arrays hold one number each, over and over."""
    return {name: torch.full(array.shape, int(array.flat[0]), dtype=torch.int64) for name, array in arrays.items()}


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def drop_as_on_cuda(model: nn.Module) -> None:
    """Put dropout as CUDA computes it in the place of the model's own."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout) and child.p:
                setattr(module, name, _MaskDropout(child.p))


class _MaskDropout(nn.Module):
    """Dropout as CUDA computes it: it keeps a mask of bytes, where the CPU keeps the noise in the input's type."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type."""
        result: Tensor = torch.native_dropout(x, self.share, self.training)[0]
        return result


_VALIDATIONS: dict[str, list[Event]] = {}
"""Of recipes whose prediction was asked for; a search for what fits asks for many that only train differently."""


def _validation(recipe: Recipe) -> list[Event]:
    """A batch of validation, in float32 and without gradients; it depends on nothing of how a recipe trains."""
    key = recipe.model_dump_json(include={"task", "data", "model"})
    if key in _VALIDATIONS:
        return _VALIDATIONS[key]
    task, adapter = task_named(recipe.task), model_spec_of(recipe).adapter
    model, _ = adapter.build(recipe, Place(for_export=True))
    model.eval()
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    with ledger.making("activations"), torch.no_grad():
        batch = filled(task.example(recipe, task.evaluation_rows(recipe.data.tokens_at_once)))
        run_scorer(adapter.scorer(model), batch)
        _VALIDATIONS[key] = list(ledger.events)
    return _VALIDATIONS[key]


def share_of(recipe: Recipe, processes: int) -> Recipe:
    """What each of several processes trains: a recipe of its share of every step's rows."""
    training = recipe.training
    rows = -(-training.effective_batch // processes)
    size = min(training.batch_size, rows)
    share = training.model_copy(update={"batch_size": size, "accumulation": -(-rows // size)})
    return recipe.model_copy(update={"training": share})


def predict_peak(
    recipe: Recipe, *, device_kind: DeviceKind, precision: str, processes: int = 1, sharded: bool = False
) -> MemoryBreakdown:
    """Bytes that a process has at the worst moment of training ``recipe``, its batches at their longest.

    Args:
        device_kind: what would train; it need not be here.
        precision: fp32, bf16 or fp16, ``auto`` resolved.
        processes: that train together, ``recipe`` being the share of one.
        sharded: weights and optimizer state are spread over them; each has its shard, and the weights that it gathers
            for a step.
    """
    (peak,) = predict_peaks(
        recipe, (1,), device_kind=device_kind, precision=precision, processes=processes, sharded=sharded
    )
    return peak


def predict_peaks(
    recipe: Recipe,
    factors: Sequence[int],
    *,
    device_kind: DeviceKind,
    precision: str,
    processes: int = 1,
    sharded: bool = False,
) -> list[MemoryBreakdown]:
    """Predict the peak for ``factors`` times as many rows at a time, from one trace of the recipe as it is.

    With factor 1 this is :func:`predict_peak`. With a larger one it is an upper bound: everything that a micro-batch
    makes counts as if it grew with the rows, which the 16-bit copies of weights do not.

    Args:
        factors: of ``training.batch_size``.
        device_kind, precision, processes, sharded: as of :func:`predict_peak`.
    """
    with FakeTensorMode():
        stays, first = _trace(recipe, device_kind, precision, processes)
        if sharded:
            stays["weights"] = stays["weights"] * (processes + 1) // processes
            stays["optimizer"] //= processes
        validation = worst_moment(stays, _validation(recipe))
    peaks = []
    for factor in factors:
        events = _grown(first, factor)
        candidates = [worst_moment(stays, events), validation]
        if recipe.training.accumulation > 1:
            gradients, later = with_gradients(events)
            candidates.append(worst_moment({**stays, "gradients": stays["gradients"] + gradients}, later))
        counted = max(candidates, key=lambda moment: sum(moment.values()))
        reserve = _cuda_reserve(counted) if device_kind == "cuda" else _cpu_reserve(events, precision)
        peaks.append(MemoryBreakdown(**counted, reserve=reserve))
    return peaks


def _grown(events: list[Event], factor: int) -> list[Event]:
    """Return the events with ``factor`` times the bytes of every storage that does not become a gradient."""
    gradients = {event.storage for event in events if event.kind == "gradients"}
    return [
        event if event.storage in gradients else event._replace(size_bytes=event.size_bytes * factor)
        for event in events
    ]


def _cuda_reserve(counted: dict[Kind, int]) -> int:
    """Assumed, not calibrated on a card yet.

    64 MiB for cuBLAS workspaces (8 MiB for each of two threads, 32 MiB on Hopper) and the kernels' own scratch, and a
    tenth of what comes and goes in a step for the gaps of the caching allocator. CUDA's context and the kernels' code
    are not in it: the budget leaves them out.
    """
    return 64 * _MIB + round(0.1 * (counted["activations"] + counted["temporary"]))


_GAPS, _GAPS_OF_HALF = 0.7, 1.2
"""Of the heap, as a share of what comes and goes in it: in float32, and in formats of 16 bits."""


def _cpu_reserve(first: list[Event], precision: str) -> int:
    """Calibrated by benchmarks/plan_accuracy.py with glibc 2.36 and fp32.

    35 MiB are library pages that are first touched in a step (24) and MKL's buffers (11). The rest are gaps in the
    heap, where tensors below 32 MiB lie: at nine sizes it grew by 0.4 to 0.9 of what comes and goes in it beyond the
    tensors themselves. It is the heap indeed: with every tensor in pages of its own (MALLOC_MMAP_THRESHOLD_=65536),
    measured and counted bytes agree within 1 %. docs/results.md holds predictions against peaks.
    Batches of many lengths leave more of them, most in bfloat16, where oneDNN's primitives lie between the tensors:
    that share is from `baseline_yelp_fast`, whose heap no longer grew after 60 steps of 64 texts of up to 128 tokens.
    """
    sizes = {event.storage: event.size_bytes for event in first if event.size_bytes > 0}
    inside = worst_moment({}, [event for event in first if sizes[event.storage] < OWN_PAGES])
    share = _GAPS if precision == "fp32" else _GAPS_OF_HALF
    return 35 * _MIB + round(share * (inside["activations"] + inside["temporary"]))


def free_bytes(device_kind: str) -> tuple[int, str]:
    """Bytes, and of what: the current CUDA card, or this host (less, where its control group is limited)."""
    if device_kind == "cuda":
        name = torch.cuda.get_device_name()
        return int(torch.cuda.mem_get_info()[0]), f"free on {name} now"
    return host_free_bytes()


def spills() -> bool:
    """Return whether the current CUDA card moves what does not fit to system memory, as Windows does.

    No allocation fails there unless torch's allocator is capped: training becomes many times slower instead.
    """
    return nvidia.uses_wddm(f"GPU-{torch.cuda.get_device_properties().uuid}")


def cap_allocator(limit_bytes: int) -> None:
    """Let torch's allocator run out of memory at ``limit_bytes`` of the current CUDA card."""
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))


_HELD_PER_BYTE = 2
"""Bytes that a byte of a file takes at least once its part is in memory: text and tokens. Measured with
benchmarks/stream_memory.py --in-memory: 2.2 for a classifier's rows of 1 KB cut to 256 tokens, 7 to 9 for a language
model's."""


def check_data_fits(data: DataSection, processes: int = 1) -> None:
    """Refuse files that memory cannot hold, before they are read. A training set that is streamed needs none.

    Args:
        processes: on this machine, each of which reads them.

    Raises:
        InputError: with what they would take, and what to do.
    """
    some = {"train"} if data.stream or getattr(data, "first_n", None) is not None else set()
    paths = [
        Path(source.path)
        for part, sources in data.parts.items()
        for source in sources
        if source.kind == "file" and part not in some
    ]
    size = processes * sum(path.stat().st_size for path in paths if path.is_file())
    free, what = free_bytes("cpu")
    if size * _HELD_PER_BYTE <= free:
        return
    remedy = (
        "make the sets besides train smaller: only train is streamed"
        if data.stream
        else "set data.stream: true (--set data.stream=true), which keeps the training set on disk"
    )
    times = f" (those of {processes} processes)" if processes > 1 else ""
    raise InputError(
        f"data.parts: {format_bytes(size)} of files{times} take at least {format_bytes(size * _HELD_PER_BYTE)} in "
        f"memory, and {format_bytes(free)} are {what}; {remedy}, or train anyway with --ignore-memory"
    )


def measured_peak(device_type: str) -> tuple[int | None, str]:
    """Bytes, and what they are."""
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
"""Messages of a RuntimeError. Triton's "out of resource: shared memory" is none of them: one block of a kernel asks for
more than a multiprocessor has, however few rows there are. CUBLAS_STATUS_NOT_INITIALIZED has other causes as well."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, of the card or of the host, so that a smaller batch may fit."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
