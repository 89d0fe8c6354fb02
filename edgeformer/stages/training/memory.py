"""The peak memory of training a recipe, predicted before a step is run."""

from __future__ import annotations

from edgeformer.formats.errors import InputError
from edgeformer.formats.planning import MemoryBreakdown, Suggestion
from edgeformer.formats.recipes import AnyRecipe
from edgeformer.formats.units import format_bytes
from edgeformer.stages.training.memory_free import free_bytes
from edgeformer.stages.training.memory_ledger import Kind, gradient_bytes, with_gradients, worst_moment
from edgeformer.stages.training.memory_step import DeviceKind, Trace, trace
from edgeformer.stages.training.precision import resolve_precision
from edgeformer.stages.training.suggestions import in_words, suggest

__all__ = ["DeviceKind", "check_fits", "free_bytes", "predict_peak", "suggestions"]

_MIB = 2**20


def predict_peak(recipe: AnyRecipe, *, device_kind: DeviceKind, precision: str) -> MemoryBreakdown:
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
    tenth of what comes and goes in a step for the gaps of the caching allocator. The context and the kernels' code are
    not in it: a profile's usable memory already leaves them out.
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


def check_fits(
    recipe: AnyRecipe, *, device_kind: DeviceKind, precision: str, free_bytes: int, what: str
) -> MemoryBreakdown:
    """Predict the peak, and refuse a recipe that cannot fit.

    Args:
        free_bytes, what: memory that training may take, and of what it is a part, e.g. "free on … now".

    Raises:
        InputError: with the predicted peak, what there is, and what to change.
    """
    breakdown = predict_peak(recipe, device_kind=device_kind, precision=precision)
    if breakdown.peak_bytes <= free_bytes:
        return breakdown
    natural = resolve_precision("auto", device_kind)
    found = suggestions(recipe, free_bytes, device_kind=device_kind, precision=precision, natural=natural)
    raise InputError(
        f"{recipe.name}: training would take {format_bytes(breakdown.peak_bytes)} at its peak (predicted), and "
        f"{format_bytes(free_bytes)} are {what}; {in_words(found)}, or train anyway with --ignore-memory"
    )


def suggestions(
    recipe: AnyRecipe, budget_bytes: int, *, device_kind: DeviceKind, precision: str, natural: str
) -> tuple[Suggestion, ...]:
    """What to change so that ``recipe`` fits into ``budget_bytes``.

    Args:
        precision: what the recipe computes in, resolved.
        natural: what the device would compute in with ``precision: auto``.
    """

    def peak(candidate: AnyRecipe) -> int:
        changed = candidate.training.precision != recipe.training.precision
        format_ = candidate.training.precision if changed else precision
        return predict_peak(candidate, device_kind=device_kind, precision=format_).peak_bytes

    half = natural if precision == "fp32" and natural != "fp32" else None
    return suggest(recipe, budget_bytes, peak, half)
