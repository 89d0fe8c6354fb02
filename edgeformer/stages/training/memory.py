"""The peak memory of training a recipe, predicted before a step is run: one step and one validation batch are traced
on tensors without data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from edgeformer.families import family_of
from edgeformer.families.network import Place, run_scorer
from edgeformer.formats.recipe import Recipe
from edgeformer.formats.report import MemoryBreakdown
from edgeformer.stages.training.memory_ledger import (
    Event,
    Kind,
    MemoryLedger,
    gradient_bytes,
    with_gradients,
    worst_moment,
)
from edgeformer.stages.training.optimization import build_optimizer
from edgeformer.tasks import task_named

_MIB = 2**20

DeviceKind = Literal["cuda", "cpu"]
_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trace:
    """The memory of a training step.

    Attributes:
        weights, optimizer: bytes of the tensors that live as long as the training.
        first: the first micro-batch of a step, clipping and the optimizer's step. What it leaves are gradients.
        validation: a batch of validation.
    """

    weights: int
    optimizer: int
    first: list[Event]
    validation: list[Event]


def trace(recipe: Recipe, device_kind: DeviceKind, precision: str) -> Trace:
    """The memory of training ``recipe``, batches at their longest, found without allocating any of it.

    The tensors are fake ones of the CPU (fake CUDA tensors need a torch with CUDA); for a CUDA card, what differs
    there is put in place.
    """
    with FakeTensorMode():
        task, network = task_named(recipe.task), family_of(recipe).network
        model, _ = network.build(recipe, Place(for_export=True))  # flash or not takes the same memory
        loss = network.loss(model, recipe, None)
        batch = _tensors(task.example(recipe, recipe.training.batch_size))
        if device_kind == "cuda":
            model = _as_on_cuda(network.as_on_cuda(model))
        model.train()
        parameters = list(model.parameters())
        weights = [*parameters, *model.buffers()]
        ledger = MemoryLedger(weights)
        optimizer = build_optimizer(model, recipe.training.optimizer)
        _make_state(optimizer, parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_gradient_hook(ledger))  # type: ignore[no-untyped-call]
        for tensor in batch.values():
            ledger.enter(tensor, "activations")
        half = _FORMATS.get(precision)
        with ledger.making("activations"), contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
            total = loss(model, batch).total
        with ledger.making("temporary"):
            total.backward()  # type: ignore[no-untyped-call]
            if recipe.training.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, recipe.training.clip_norm)
            optimizer.step()
        first = list(ledger.events)  # a copy: what is left goes when this function returns
        state = [tensor for tensors in optimizer.state.values() for tensor in tensors.values()]
        return Trace(_bytes(weights), _bytes(state), first, _validation(recipe))


def _tensors(arrays: dict[str, NDArray[np.int64]]) -> dict[str, Tensor]:
    """Tensors of these shapes; the arrays hold one number each, over and over."""
    return {name: torch.full(array.shape, int(array.flat[0]), dtype=torch.int64) for name, array in arrays.items()}


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _make_state(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _gradient_hook(ledger: MemoryLedger) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            ledger.is_gradient(parameter.grad)

    return hook


class _MaskDropout(nn.Module):
    """Dropout as CUDA computes it: it keeps a mask of bytes, where the CPU keeps the noise in the input's type."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type."""
        result: Tensor = torch.native_dropout(x, self.share, self.training)[0]
        return result


def _as_on_cuda(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout) and child.p:
                setattr(module, name, _MaskDropout(child.p))
    return model


def _validation(recipe: Recipe) -> list[Event]:
    """A batch of validation, in float32 and without gradients; it depends on nothing of how a recipe trains."""
    return _validation_of(_Untrained(recipe))


class _Untrained:
    """A recipe as a key for what does not depend on its ``training``."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._key = (recipe.task, recipe.data.model_dump_json(), recipe.model.model_dump_json())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Untrained) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=8)
def _validation_of(untrained: _Untrained) -> list[Event]:
    recipe = untrained.recipe
    task, network = task_named(recipe.task), family_of(recipe).network
    model, _ = network.build(recipe, Place(for_export=True))
    model.eval()
    batch = _tensors(task.example(recipe, task.evaluation_rows(recipe.data.tokens_at_once)))
    ledger = MemoryLedger([*model.parameters(), *model.buffers()])
    for tensor in batch.values():
        ledger.enter(tensor, "activations")
    with ledger.making("activations"), torch.no_grad():
        run_scorer(network.scorer(model), batch)
        return list(ledger.events)


def predict_peak(recipe: Recipe, *, device_kind: DeviceKind, precision: str) -> MemoryBreakdown:
    """Bytes at the worst moment of training ``recipe``, its batches at their longest.

    Args:
        device_kind: what would train; it need not be here.
        precision: fp32, bf16 or fp16, ``auto`` resolved.
    """
    traced = trace(recipe, device_kind, precision)
    counted = _worst(traced, accumulates=recipe.training.accumulation > 1)
    return MemoryBreakdown(**counted, reserve=_RESERVES[device_kind](traced, counted))


def _worst(traced: Trace, *, accumulates: bool) -> dict[Kind, int]:
    stays: dict[Kind, int] = {"weights": traced.weights, "optimizer": traced.optimizer}
    candidates = [worst_moment(stays, traced.first), worst_moment(stays, traced.validation)]
    if accumulates:
        gradients = {**stays, "gradients": gradient_bytes(traced.first)}
        candidates.append(worst_moment(gradients, with_gradients(traced.first)))
    return max(candidates, key=lambda moment: sum(moment.values()))


def _cuda_reserve(_: Trace, counted: dict[Kind, int]) -> int:
    """Assumed, not calibrated on a card yet.

    64 MiB for cuBLAS workspaces (8 MiB for each of two threads, 32 MiB on Hopper) and the kernels' own scratch, and a
    tenth of what comes and goes in a step for the gaps of the caching allocator. CUDA's context and the kernels' code
    are not in it: the budget leaves them out.
    """
    return 64 * _MIB + round(0.1 * (counted["activations"] + counted["temporary"]))


_HEAP_BLOCK = 32 * _MIB
"""From this size on glibc gives a block its own pages, and gives them back (the limit of its dynamic threshold)."""


def _cpu_reserve(traced: Trace, _: dict[Kind, int]) -> int:
    """Calibrated by benchmarks/plan_accuracy.py with glibc 2.36, fp32, one thread.

    35 MiB are library pages that are first touched in a step (24) and MKL's buffers (11). The rest are gaps in the
    heap, where tensors below 32 MiB lie: at nine sizes it grew by 0.4 to 0.9 of what comes and goes in it beyond the
    tensors themselves, which makes the whole prediction 0.90 to 1.03 of the measured peak. It is the heap indeed: with
    every tensor in pages of its own (MALLOC_MMAP_THRESHOLD_=65536), measured and counted bytes agree within 1 %.
    """
    sizes = {event.storage: event.size_bytes for event in traced.first if event.size_bytes > 0}
    inside = worst_moment({}, [event for event in traced.first if sizes[event.storage] < _HEAP_BLOCK])
    return 35 * _MIB + round(0.7 * (inside["activations"] + inside["temporary"]))


_RESERVES = {"cuda": _cuda_reserve, "cpu": _cpu_reserve}
