"""Memory of a call on a device that is not here, as a range. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Memory
from edgeformer.estimate.operators import DOUBTS, NodeWork, fuse
from edgeformer.estimate.rates import RAMP, Rates

# What lives beside one node's inputs and outputs: residual streams, masks, the tensors of parallel branches.
_ALIVE_HIGH = 4.0
# Arenas grow to the next power of two.
_ARENA_HIGH = 2.0
# cuBLAS takes 4 MiB, and 32 MiB on Hopper; TensorRT's tactics may take more, which its activation bytes then contain.
_GPU_WORKSPACE_HIGH = 32 * 2**20
# CUDA contexts differ by driver and by how many kernels are loaded.
_CONTEXT_LOW, _CONTEXT_HIGH = 0.7, 1.5
# ONNX Runtime on CPUs keeps weights as they are, and once more packed for its products; while it opens a file, the
# parsed graph is a third copy.
_CPU_COPIES_LOW, _CPU_COPIES_HIGH = 1.0, 3.2
# Sessions, thread pools, code pages of the kernels that run first.
_CPU_FIXED_HIGH = 48 * 2**20


def estimate_memory(
    artifact: ArtifactManifest, device: DeviceProfile, weights: float, step_bytes: float, feed_bytes: float
) -> Memory:
    """Weights, activations, workspace and, on GPUs, the CUDA context; `unavailable` where that is not known.

    Args:
        artifact: an engine says more of itself.
        device: that is estimated for.
        weights: bytes as stored.
        step_bytes: the largest node's inputs and outputs together.
        feed_bytes: inputs of a call; caches of earlier tokens are read and written.
    """
    gpu, fed_bytes = device.kind == "cuda", 2 * feed_bytes
    if gpu and device.context_bytes is None:
        reason = f"device profile {device.name!r} does not say context_bytes"
        return Memory(status="unavailable", reason=reason)
    alive_low, alive_high = step_bytes + fed_bytes, _ALIVE_HIGH * step_bytes + fed_bytes
    if device.context_bytes is None or not gpu:
        low = _CPU_COPIES_LOW * weights + alive_low
        high = _CPU_COPIES_HIGH * weights + _ARENA_HIGH * alive_high + _CPU_FIXED_HIGH
    else:
        engine_bytes, engine = _ARENA_HIGH * (weights + alive_high), artifact.engine
        if engine is not None and engine.activation_bytes is not None:
            # The builder says it, for the largest shape that the engine takes.
            alive_high = engine.activation_bytes + fed_bytes
            alive_low, weights = min(alive_low, alive_high), engine.weight_bytes or weights
            engine_bytes = (artifact.size_bytes or weights) + alive_high
        low = device.context_bytes.value * _CONTEXT_LOW + weights + alive_low
        high = max(low, device.context_bytes.value * _CONTEXT_HIGH + engine_bytes + _GPU_WORKSPACE_HIGH)
    parts = "weights, activations, workspace and CUDA context" if gpu else "weights and activations"
    return Memory(
        status="estimated",
        peak=round((low * high) ** 0.5),
        low=round(low),
        high=round(high),
        method=f"sum of {parts}",
        reason=f"sum of {parts}; the range covers what allocators keep and how many copies of the weights there are",
    )


# Time of a call from its work, every node at the device's rates. Pure functions.
#
# Two models share the same counts. Where the device was calibrated, a node costs its operator's overhead plus what it
# takes at each fitted rate; a product reads weights of the cache partly while it computes. Elsewhere it is unknown
# how close to its peaks the device gets, so there is a range: the low end overlaps arithmetic with memory, fuses what
# can be fused and reaches nearly the peaks; the high end does neither.


T = TypeVar("T", float, npt.NDArray[np.float64])


@dataclass(frozen=True)
class Share:
    """Assumed share of its peaks that an unmeasured device reaches, per end of the range."""

    of_peak: float
    of_bandwidth: float
    of_cache: float
    overhead: float


# Low end: cuBLAS, CUTLASS and oneDNN report 85–95 % of the peak for large products, STREAM reaches 80–92 % of the
# bandwidth that data sheets state. High end: what small, odd shapes get. On the CPU on which this was checked, products
# of 8 to 1,000 rows with weights of 256 × 768 to 1536 × 384 reached 0.3–0.95 of the peak; most element-wise operators
# 0.7–2.9 of the memory's bandwidth, from the cache, and strided slices 0.26.
# A last-level cache delivers about 2 to 5 times the memory's bandwidth on current GPUs and CPUs.
OPTIMISTIC = Share(of_peak=0.90, of_bandwidth=0.90, of_cache=4.0, overhead=1.0)
PESSIMISTIC = Share(of_peak=0.35, of_bandwidth=0.45, of_cache=1.0, overhead=2.0)
# Real operators of a CPU runtime, which look up shapes and allocate outputs, beside one that adds two numbers: 1.4–1.9
# against 0.4 µs on that CPU.
_CPU_OVERHEAD_HIGH = 4.0
# A product is cut into tiles of this size, one per streaming multiprocessor at a time; small products leave some idle.
_TILE = 64
# A multiprocessor that works alone in a wave still runs at its own rate; kernels that split the inner size use more.
_LEAST_OCCUPANCY = 0.10


@dataclass(frozen=True)
class Amounts:
    """Of one node: operations, bytes that a cache may hold, bytes that none holds; ``kept_bytes``: what of the near
    ones are weights, which stay from call to call."""

    operations: float
    near_bytes: float
    far_bytes: float
    kept_bytes: float = 0.0


def beyond_cache(total_bytes: float, cache_bytes: float, ramp: tuple[float, float] = RAMP) -> float:
    """Share of ``total_bytes``, used over and over, that comes from memory: 0 up to where a ramp begins, 1 from its end
    on, and between them with the logarithm.

    Args:
        total_bytes: of everything that is read in turn.
        cache_bytes: of the cache; 0: none is known.
        ramp: its begin and end, as shares of the cache.
    """
    if cache_bytes <= 0:
        return 1.0
    begin, end = ramp
    filled = total_bytes / cache_bytes / begin
    if filled <= 1:
        return 0.0
    return min(1.0, math.log(filled) / math.log(end / begin))


def amounts(work: NodeWork, weights_beyond: float, cache_bytes: float, ramp: tuple[float, float] = RAMP) -> Amounts:
    """Operations and bytes of a node, the bytes by their origin.

    Args:
        work: of the node.
        weights_beyond: share of all weights that no cache keeps from one call to the next (:func:`beyond_cache`).
        cache_bytes: a node whose activations are larger reads and writes memory.
        ramp: from where on it does.
    """
    moved_far = work.moved_bytes * beyond_cache(work.moved_bytes, cache_bytes, ramp)
    far = work.weight_bytes * weights_beyond + moved_far
    return Amounts(work.operations, work.bytes - far, far, work.weight_bytes * (1 - weights_beyond))


def fitted_us(
    works: Sequence[NodeWork],
    rates: Rates,
    calibration: Calibration,
    precision: str,
    weight_bytes: float,
    runs: int = 1,
) -> float:
    """Microseconds of a call on a calibrated device.

    Args:
        works: of all nodes.
        rates: what the shares are of.
        calibration: the device's.
        precision: of the artifact.
        weight_bytes: of the whole graph's products, each shared weight once.
        runs: graphs that are run in one call, each with the cost of a call: step bundles run several.
    """
    called = runs * calibration.call_overhead_us.get(precision, 0.0)
    return called + sum(fitted_nodes_us(works, rates, calibration, precision, weight_bytes))


def widened_us(
    works: Sequence[NodeWork], took_us: Sequence[float], fitted_keys: Collection[str]
) -> tuple[float, float]:
    """Lowest and highest plausible microseconds of nodes whose operators were never checked, the others as they are.

    Args:
        works: of all nodes.
        took_us: of each, by the efficiency of its operator or of its class.
        fitted_keys: keys of operators with their own fit.
    """
    doubts = [DOUBTS["checked" if work.key in fitted_keys else work.trust] for work in works]
    low = sum(took / doubt.faster for took, doubt in zip(took_us, doubts, strict=True))
    return low, sum(took * doubt.slower for took, doubt in zip(took_us, doubts, strict=True))


def fitted_nodes_us(
    works: Sequence[NodeWork], rates: Rates, calibration: Calibration, precision: str, weight_bytes: float
) -> list[float]:
    """Microseconds of every node of a call; the arguments are those of :func:`fitted_us`."""
    beyond = beyond_cache(weight_bytes, rates.cache_bytes, rates.ramp)
    return [
        node_us(
            amounts(work, beyond, rates.cache_bytes, rates.ramp), efficiency_of(work, calibration, precision), rates
        )
        for work in works
    ]


def efficiency_of(work: NodeWork, calibration: Calibration, precision: str) -> Efficiency:
    """The operator's own efficiency where it was fitted, else its class's, else that class's in FP32.

    Args:
        work: of one node.
        calibration: the device's.
        precision: of the artifact.

    Raises:
        EdgeformerError: the calibrated graphs had no operator of this class.
    """
    fitted = calibration.operators.get(precision, {}).get(work.key)
    if fitted is not None:
        return fitted
    for fallback_precision in (precision, "fp32"):
        efficiency = calibration.efficiencies.get(fallback_precision, {}).get(work.cls)
        if efficiency is not None:
            return efficiency
    raise EdgeformerError(
        f"the calibration has no {work.cls} operators, which this graph has; calibrate with a bundle that has them"
    )


def node_us(amount: Amounts, efficiency: Efficiency, rates: Rates) -> float:
    """Microseconds of one node: the overhead and what each rate takes, one after the other; but a product reads weights
    of the cache partly while it computes (:attr:`Rates.overlap`). From memory they come too slowly for that.

    Args:
        amount: what it computes and moves.
        efficiency: its operator's.
        rates: what the shares are of.
    """
    of_memory = efficiency.of_memory or efficiency.of_bandwidth
    took_us, computing_us, reading_us = efficiency.overhead_us, 0.0, 0.0
    if efficiency.of_peak is not None:
        computing_us = 1e6 * amount.operations / (rates.peak * efficiency.of_peak)
    of_weights = efficiency.of_weights or efficiency.of_bandwidth
    if of_weights is not None:
        reading_us = 1e6 * amount.kept_bytes / (rates.bandwidth * of_weights)
    if efficiency.of_bandwidth is not None:
        moved_bytes = amount.near_bytes - amount.kept_bytes
        took_us += 1e6 * moved_bytes / (rates.bandwidth * efficiency.of_bandwidth)
    if of_memory is not None:
        took_us += 1e6 * amount.far_bytes / (rates.bandwidth * of_memory)
    return took_us + together(computing_us, reading_us, rates.overlap)


def together(computing: T, reading: T, overlap: float) -> T:
    """(computing^x + reading^x)^(1/x) of two times, or arrays of them: 1 is their sum, ∞ would be the longer one."""
    both: T = (computing**overlap + reading**overlap) ** (1 / overlap)
    return both


def range_us(works: Sequence[NodeWork], rates: Rates, weight_bytes: float, fused: bool) -> tuple[float, float]:
    """Lowest and highest plausible microseconds of a call on a device that was never calibrated.

    Args:
        works: of all nodes.
        rates: the device's.
        weight_bytes: of the whole graph's products, each shared weight once.
        fused: the runtime is known to fuse kernels (an engine); else the high end launches one per operator.
    """
    beyond = beyond_cache(weight_bytes, rates.cache_bytes, rates.ramp)
    low = _low_us(fuse(works) if rates.gpu else [[work] for work in works], rates, beyond)
    parts = fuse(works) if rates.gpu and fused else [[work] for work in works if not (rates.gpu and work.host_only)]
    high = _high_us(parts, rates, weight_bytes, fits=beyond == 0)
    return low, max(high, low)


def _low_us(kernels: Sequence[Sequence[NodeWork]], rates: Rates, beyond: float) -> float:
    """Arithmetic overlaps memory, chains are read and written once, weights that fit stay from one call to the next."""
    share = OPTIMISTIC
    near, memory = rates.bandwidth * share.of_cache, rates.bandwidth * share.of_bandwidth
    took = 0.0
    for kernel in kernels:
        compute_s = sum(_compute_s(work, rates.peak, rates, share) for work in kernel)
        # What lies inside a fused chain stays in registers: its largest member's bytes are read and written.
        moved_s = max(work.moved_bytes for work in kernel) / near
        weights_s = sum(work.weight_bytes for work in kernel) * (beyond / memory + (1 - beyond) / near)
        speedup = max(DOUBTS[work.trust].faster for work in kernel)
        took += max(compute_s, moved_s + weights_s) / speedup * 1e6 + rates.overhead_us * share.overhead
    return took


def _high_us(kernels: Sequence[Sequence[NodeWork]], rates: Rates, weight_bytes: float, fits: bool) -> float:
    """Nothing overlaps; weights that fit are read from memory once per call, the repeats come from the cache."""
    share = PESSIMISTIC
    slow, near = rates.bandwidth * share.of_bandwidth, rates.bandwidth * share.of_cache
    read = sum(work.weight_bytes for kernel in kernels for work in kernel)
    first_read = min(read, weight_bytes)
    weights_s = first_read / slow + (read - first_read) / near if fits else read / slow
    took = weights_s * 1e6
    for kernel in kernels:
        compute_s = sum(
            DOUBTS[work.trust].slower
            * _compute_s(work, rates.sure_peak, rates, share)
            / (_occupancy(work, rates.cores) if rates.gpu else 1.0)
            for work in kernel
        )
        moved_s = sum(DOUBTS[work.trust].slower * work.moved_bytes for work in kernel) / slow
        overhead_us = rates.overhead_us * (share.overhead if rates.gpu else _CPU_OVERHEAD_HIGH)
        took += (compute_s + moved_s) * 1e6 + overhead_us
    return took


def _compute_s(work: NodeWork, peak: float, rates: Rates, share: Share) -> float:
    return work.operations / ((peak if work.is_product else rates.vector_peak) * share.of_peak)


def _occupancy(work: NodeWork, cores: int | None) -> float:
    """Share of a GPU's multiprocessors that a product's tiles keep busy, over all waves."""
    if cores is None or not work.is_product:
        return 1.0
    tiles = -(-work.rows // _TILE) * max(1, -(-work.columns // _TILE))
    waves = -(-tiles // cores)
    return max(_LEAST_OCCUPANCY, tiles / (waves * cores))
