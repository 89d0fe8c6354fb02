"""Time of training on a CUDA card, from the kernels of a step and the card's stated rates; never checked on a card."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import model_spec_of
from edgeformer.models.adapter import Place
from edgeformer.tasks import task_named
from edgeformer.training.memory import HALF_FORMATS, drop_as_on_cuda, filled

WITH_VALIDATION = 1.05
"""Time of training with validation, as a multiple of the time of the steps; for the high end of estimates from rates. A
validation set has at most an eighth of the training rows in the shipped recipes, and its forward pass is a third of the
work of a step: 1 + 1/24."""
_TILE = 128
"""Rows and columns of a product's output that one multiprocessor computes at a time."""
_OPTIMIZER_PASSES = 7
"""AdamW reads a weight, its gradient and two moments, and writes all but the gradient."""
_CLIPPING_PASSES = 3
"""Clipping reads the gradients for their norm, and reads and writes them to scale them."""
_ACCUMULATING_PASSES = 3
"""Each further micro-batch reads the gradients so far and its own, and writes their sum."""


@dataclass(frozen=True)
class Kernel:
    """One operation of a step as torch launches it.

    Attributes:
        operations: of products, a multiplication and an addition being two; 0: not a product.
        size_bytes: of all that it reads and writes.
        half: a product of 16-bit numbers.
        attention: the fused kernel of attention.
        tiles: of a product's output, which the multiprocessors share.
    """

    operations: int
    size_bytes: int
    half: bool = False
    attention: bool = False
    tiles: int = 0


@dataclass(frozen=True)
class End:
    """What one end of the range assumes.

    Attributes:
        of_peak: share of the card's rate that products reach while every multiprocessor has a tile.
        of_attention: the same of the fused kernel of attention, whose softmax is no product.
        of_bandwidth: share of the stated bandwidth that kernels without reuse reach.
        from_cache: share of a kernel's traffic that the cache serves, if the cache holds all of its tensors.
        launches: multiples of the launch overhead from one kernel to the next, Python's work included.
    """

    of_peak: float
    of_attention: float
    of_bandwidth: float
    from_cache: float
    launches: float


FAST = End(of_peak=0.85, of_attention=0.60, of_bandwidth=0.90, from_cache=0.5, launches=1.0)
"""Assumed, measured on no card by us: what large products, fused attention and streaming kernels are expected to reach.
Of tensors that the cache holds, what the kernel before wrote is read from there, and what this one writes goes to
memory."""
SLOW = End(of_peak=0.75, of_attention=0.35, of_bandwidth=0.75, from_cache=0.0, launches=3.0)
"""Assumed as well: products of the sizes of small models, whose inner loops are short. Nothing stays in the cache."""


class _KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels that the code in its block launches; equal ones together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[Kernel] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace == "aten" and not func.is_view and name not in _FREE:
            self.kernels[_kernel(func, name, args, kwargs or {}, out)] += 1
        return out


_FREE = {"_unsafe_view", "detach", "alias", "empty", "empty_like", "new_empty", "lift_fresh", "_local_scalar_dense"}
"""Operations that launch nothing."""
_ROWS_ONLY = ("embedding", "index_select", "gather", "scatter_add_", "index_add_", "index_put_")
"""Operations that touch as many rows of their largest tensor as they have numbers of rows."""


def _kernel(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Kernel:
    read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if name == "copy_":  # its first argument is written only
        read = read[1:]
    elif name.startswith("new_") or name.endswith("_like") or name in ("fill_", "zero_"):
        read = []
    sizes = [tensor.numel() * tensor.element_size() for tensor in (*read, *written)]
    if name in _ROWS_ONLY:
        largest = max(sizes)
        sizes = [size for size in sizes if size < largest] or [largest]
    if "scaled_dot_product" in name:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        # Scores and mixed values; the backward pass computes the scores again, and four more products.
        products = 5 if backward else 2
        operations = 2 * products * math.prod(query.shape) * key.shape[-2]
        return Kernel(operations, sum(sizes), _is_half(query), attention=True)
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return Kernel(0, sum(sizes))
    *batch, rows, columns = written[0].shape if written[0].ndim > 1 else (1, *written[0].shape)
    tiles = math.prod(batch) * -(-rows // _TILE) * -(-columns // _TILE)
    operations = int(count(*args, **kwargs, out_val=out))
    return Kernel(operations, sum(sizes), _is_half(written[0]), tiles=tiles)


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def count_kernels(recipe: Recipe, tokens: int, precision: str) -> tuple[Counter[Kernel], int]:
    """Count the kernels of one micro-batch, forward and backward, whatever is computed again included.

    Args:
        tokens: per row.
        precision: what products are computed in, resolved.

    Returns:
        The kernels, and the number of the model's parameters that are trained.

    Raises:
        InputError: the model cannot be built.
    """
    task, adapter = task_named(recipe.task), model_spec_of(recipe).adapter
    length = recipe.data.model_copy(update={recipe.data.length_key: tokens})
    shorter = recipe.model_copy(update={"data": length})
    half = HALF_FORMATS.get(precision)
    with FakeTensorMode():
        model, _ = adapter.build(recipe, Place(for_export=True))
        adapter.as_on_cuda(model)
        drop_as_on_cuda(model)
        loss = adapter.loss(model.train(), recipe, None)
        batch = filled(task.example(shorter, recipe.training.batch_size))
        with _KernelCounter() as counter:
            with contextlib.nullcontext() if half is None else torch.autocast("cpu", half):
                total = loss(model, batch).total
            total.backward()  # type: ignore[no-untyped-call]
        parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return counter.kernels, parameters


@dataclass(frozen=True)
class GpuTime:
    """Seconds of all steps, and what they are made of.

    Attributes:
        low_s, high_s: of all steps; `high_s` with validation.
        low_reason, high_reason: what each end assumes of the card.
        operations: of all products.
        share_of_peak: of the stated rate, at the high and the low end.
        rate: operations per second that the shares are of.
    """

    low_s: float
    high_s: float
    low_reason: str
    high_reason: str
    operations: float
    share_of_peak: tuple[float, float]
    rate: float


def gpu_time(recipe: Recipe, device: DeviceProfile, precision: str, *, tokens: int, rows: int) -> GpuTime:
    """Estimate how long a CUDA card computes ``rows`` training rows of ``tokens`` tokens.

    A kernel takes the longer of its arithmetic and its traffic, and a step at least the launches of its kernels. The
    low end is the card at its highest power limit, the high end at its lowest.

    Raises:
        EdgeformerError: the profile lacks a rate that is needed.
    """
    card = _Card.of(device, precision, tf32=recipe.training.tf32)
    kernels, parameters = count_kernels(recipe, tokens, precision)
    micro_batches = rows / recipe.training.batch_size
    operations = micro_batches * sum(kernel.operations * count for kernel, count in kernels.items())
    compiled = recipe.training.compile is not None
    reasons: list[str] = []
    seconds: list[float] = []
    for end, fast in ((FAST, True), (SLOW, False)):
        watts, clock = card.fastest if fast else card.slowest
        products, other = _split(kernels, end, card, clock, fused=compiled and fast)
        passes = _OPTIMIZER_PASSES + (_CLIPPING_PASSES if recipe.training.clip_norm is not None else 0)
        passes += _ACCUMULATING_PASSES * (recipe.training.accumulation - 1)
        weights = passes * 4 * parameters / (card.bandwidth * end.of_bandwidth) / recipe.training.accumulation
        launches = kernels.total() * card.launch_s * end.launches * (0.0 if compiled else 1.0)
        computing = products + other + weights
        took = max(computing, launches)
        seconds.append(took * micro_batches * (1.0 if fast else WITH_VALIDATION))
        rate, total = card.rate * clock / 1e12, kernels.total()
        cached = f", {end.from_cache:.0%} of it from the cache where it fits" if end.from_cache and card.cache else ""
        reasons.append(
            f"{watts}products {products / computing:.0%} of the time, at up to {end.of_peak:.0%} of {rate:.1f} "
            f"TFLOP/s; memory traffic of all other kernels {(other + weights) / computing:.0%}, at "
            f"{end.of_bandwidth:.0%} of {card.bandwidth / 1e9:.0f} GB/s{cached}"
            + ("; torch.compile fuses the other kernels away" if compiled and fast else "")
            + (f"; launching {total:,} kernels takes longer than computing them" if launches > computing else "")
        )
    shares = (operations / (seconds[1] * card.rate), operations / (seconds[0] * card.rate))
    return GpuTime(seconds[0], seconds[1], reasons[0], reasons[1], operations, shares, card.rate)


def _split(kernels: Counter[Kernel], end: End, card: _Card, clock: float, *, fused: bool) -> tuple[float, float]:
    """Seconds of a micro-batch's products, attention included, and of its other kernels."""
    products = other = 0.0
    for kernel, count in kernels.items():
        cached = end.from_cache if kernel.size_bytes <= card.cache else 0.0
        traffic = kernel.size_bytes * (1 - cached) / (card.bandwidth * end.of_bandwidth)
        if not kernel.operations:
            other += 0.0 if fused else traffic * count
            continue
        rate = (card.rate if kernel.half or not card.half else card.fp32) * clock
        waves = -(-kernel.tiles // card.cores) * card.cores if card.cores else 0
        busy = kernel.tiles / waves if waves and end is SLOW else 1.0
        share = end.of_attention if kernel.attention else end.of_peak * busy
        products += max(kernel.operations / (rate * share), traffic) * count
    return products, other


@dataclass(frozen=True)
class _Card:
    """A card's rates as its profile states them.

    Attributes:
        rate: operations per second of products in the precision of training; `fp32` of those that stay in float32.
        half: ``rate`` is one of 16-bit numbers.
        fastest, slowest: the power limit in words, and the clock there as a multiple of the one of the stated rates.
    """

    rate: float
    fp32: float
    half: bool
    bandwidth: float
    cache: float
    cores: int
    launch_s: float
    fastest: tuple[str, float]
    slowest: tuple[str, float]

    @classmethod
    def of(cls, device: DeviceProfile, precision: str, *, tf32: bool) -> _Card:
        peaks, half = device.peaks, precision != "fp32"
        needed = {
            "peaks.fp32": peaks.fp32,
            "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
            **({"peaks.fp16": next(iter(peaks.of("fp16")), None)} if half else {}),
        }
        missing = [name for name, fact in needed.items() if fact is None]
        if missing or peaks.fp32 is None or device.bandwidth_bytes_per_s is None:
            raise EdgeformerError(f"device profile {device.name!r} does not say {', '.join(missing)}")
        fp32 = peaks.fp32.value
        if tf32 and peaks.fp16_fp32_accumulate is not None:  # tensor cores compute TF32 at half of that rate
            fp32 = max(fp32, peaks.fp16_fp32_accumulate.value / 2)
        fastest = slowest = ("", 1.0)
        if device.clocks_hz is not None and device.power is not None:
            clocks, power = device.clocks_hz.value, device.power.value
            fastest = (
                f"{power.high_w:.0f} W, boost {clocks.at_high_w / 1e6:.0f} MHz: ",
                clocks.at_high_w / clocks.at_peaks,
            )
            slowest = f"{power.low_w:.0f} W, boost {clocks.at_low_w / 1e6:.0f} MHz: ", clocks.at_low_w / clocks.at_peaks
        launch = device.launch_overhead_us
        return cls(
            rate=peaks.of("fp16")[0].value if half else fp32,
            fp32=fp32,
            half=half,
            bandwidth=device.bandwidth_bytes_per_s.value,
            cache=float(device.cache_bytes.value) if device.cache_bytes is not None else 0.0,
            cores=device.cores.value if device.cores is not None else 0,
            launch_s=launch.value * 1e-6 if launch is not None else 0.0,
            fastest=fastest,
            slowest=slowest,
        )
