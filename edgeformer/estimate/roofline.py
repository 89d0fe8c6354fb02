"""Roofline: time and memory of a call from the work of its nodes and the rates of a device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency, EstimateError, Fact
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Memory
from edgeformer.artifacts.units import format_bytes
from edgeformer.estimate.operators import NodeWork, fuse
from edgeformer.runtimes import library_versions
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import cpu_name, stated_cache_bytes

# Processors without instructions for INT8 products: no faster than FP32 at worst; at best a register holds four times
# as many numbers, of which widening to 16 and 32 bits costs half.
_INT8_WITHOUT_INSTRUCTIONS = 2.0
# Shares of the cache at which weights that are read in turn begin to come from memory, and at which all of them do. In
# chains of 4 to 96 MiB of weights on a CPU with 32 MiB, the time per byte rises from 8 to 40 MiB.
_RAMP_BEGIN, _RAMP_END = 0.25, 1.25


@dataclass(frozen=True)
class Rates:
    """Rates of a device at one precision."""

    peak: float  # operations per second of matrix products
    vector_peak: float  # operations per second of everything else
    bandwidth: float  # bytes per second of the memory
    cache_bytes: float  # last-level cache; 0: not known
    overhead_us: float  # from one kernel or operator to the next
    cores: int | None = None  # None: not known
    gpu: bool = False


def rates_of(device: DeviceProfile, precision: str) -> Rates:
    """Return the device's rates for an artifact. Raises EdgeformerError if the profile lacks a needed fact."""

    def required(name: str, fact: Fact[float] | None) -> float:
        if fact is None:
            remedy = "; run edgeformer calibrate" if device.kind == "cpu" and device.match is None else ""
            raise EdgeformerError(f"the profile {device.name!r} has no value for {name}, which estimates need{remedy}")
        return fact.value

    fp32 = required("peaks.fp32", device.peaks.fp32)
    peak = fp32  # ONNX Runtime's CPU provider computes FP16 graphs in FP32
    if device.kind == "cuda" and precision == "tf32":
        halves = device.peaks.of("fp16")
        peak = halves[0].value / 2 if halves else fp32
    elif device.kind == "cuda":
        peaks = [fact.value for fact in device.peaks.of(precision)]
        if not peaks:
            raise EdgeformerError(
                f"the profile {device.name!r} has no value for peaks.{precision}, so {precision} is not estimated"
            )
        peak = max(peaks)
    elif precision in ("int8", "int4"):  # weights of 4 bits meet activations in INT8
        peak = device.peaks.int8.value if device.peaks.int8 is not None else fp32 * _INT8_WITHOUT_INSTRUCTIONS
    bandwidth = required("bandwidth_bytes_per_s", device.bandwidth_bytes_per_s)
    overhead_us = required("launch_overhead_us", device.launch_overhead_us)
    cache_bytes = device.cache_bytes.value if device.cache_bytes is not None else 0
    cores = device.cores.value if device.cores is not None else None
    return Rates(peak, fp32, bandwidth, cache_bytes, overhead_us, cores, device.kind == "cuda")


def refused_calibration(device: DeviceProfile) -> str | None:
    """Return why the profile's calibration does not hold for its device; None if it does, or if there is none.

    A profile without ``match`` stands for this host; one copied from another machine is wrong even for the same name.
    """
    calibration, expected = device.calibration, cpu_name() if device.match is None else device.match
    if calibration is None:
        return None
    if expected.lower() not in calibration.processor.lower():
        difference = f"{calibration.processor}, not {expected}"
        remedy = "run edgeformer calibrate on the device"
        return f"the profile {device.name!r} was calibrated on another processor ({difference}); {remedy}"
    if device.match is not None:
        return None
    # 1.23 of 1.23.2: patch releases compute alike.
    versions = [
        ".".join(each["onnxruntime"].split(".")[:2]) if "onnxruntime" in each else None
        for each in (calibration.versions, library_versions())
    ]
    flags = [names and ", ".join(sorted(names)) for names in (calibration.instructions, kernel_flags())]
    caches = [size and format_bytes(size) for size in (calibration.stated_cache_bytes, stated_cache_bytes())]
    facts: dict[str, list[Any]] = {"ONNX Runtime": versions, "instructions": flags, "cache": caches}
    differences = [
        f"{name} {calibrated or 'none'} (this host: {present or 'none'})"
        for name, (calibrated, present) in facts.items()
        if calibrated is not None and present is not None and calibrated != present
    ]
    if not differences:
        return None
    return f"the profile {device.name!r} was calibrated with {', '.join(differences)}; run edgeformer calibrate again"


def known_error(device: DeviceProfile, host: DeviceProfile | None = None) -> EstimateError | None:
    """Return the estimator's error on the device itself, else on this host's processor; not another machine's."""
    for profile in (device, host):
        if profile is not None and profile.calibration is not None and refused_calibration(profile) is None:
            return profile.calibration.error
    return None


def beyond_cache(total_bytes: float, cache_bytes: float) -> float:
    """Return the share of ``total_bytes``, read in turn over and over, that comes from memory.

    0 up to a quarter of the cache, 1 from 1.25 times the cache on, and between them linear in the logarithm.
    """
    if cache_bytes <= 0:
        return 1.0
    filled = total_bytes / cache_bytes / _RAMP_BEGIN
    return min(1.0, math.log(filled) / math.log(_RAMP_END / _RAMP_BEGIN)) if filled > 1 else 0.0


def far_bytes(work: NodeWork, weights_beyond: float, cache_bytes: float) -> float:
    """Return the bytes of a node that come from memory; the cache holds the others.

    ``weights_beyond``: share of all weights that no cache keeps from one call to the next (:func:`beyond_cache`).
    """
    return work.weight_bytes * weights_beyond + work.moved_bytes * beyond_cache(work.moved_bytes, cache_bytes)


# A calibrated device: each node costs its class's overhead and what it takes at each fitted rate.


def calibrated_nodes_us(
    works: Sequence[NodeWork], rates: Rates, calibration: Calibration, precision: str, weight_bytes: float
) -> list[float]:
    """Return the microseconds of every node of a call on a calibrated device.

    ``weight_bytes``: of the whole graph's products, each shared weight once. Raises EdgeformerError: the calibrated
    graphs had no operator of a class that this graph has.
    """
    beyond = beyond_cache(weight_bytes, rates.cache_bytes)
    durations_us: list[float] = []
    for work in works:
        # The operator's efficiency, else its class's, else its class's in FP32.
        efficiency = calibration.operators.get(precision, {}).get(work.operator)
        for fitted_precision in (precision, "fp32"):
            efficiency = efficiency or calibration.efficiencies.get(fitted_precision, {}).get(work.cls)
        if efficiency is None:
            raise EdgeformerError(
                f"the calibration has no rate for the {work.cls} operators of this graph; calibrate with a bundle that "
                "has such operators"
            )
        durations_us.append(node_us(work, far_bytes(work, beyond, rates.cache_bytes), efficiency, rates))
    return durations_us


def node_us(work: NodeWork, far: float, efficiency: Efficiency, rates: Rates) -> float:
    """Return the microseconds of one node: its overhead and the times of arithmetic, cache and memory, in sequence.

    ``far``: bytes that come from memory.
    """
    of_memory, duration_us = efficiency.of_memory or efficiency.of_bandwidth, efficiency.overhead_us
    if efficiency.of_peak is not None:
        duration_us += 1e6 * work.operations / (rates.peak * efficiency.of_peak)
    if efficiency.of_bandwidth is not None:
        duration_us += 1e6 * (work.bytes - far) / (rates.bandwidth * efficiency.of_bandwidth)
    if of_memory is not None:
        duration_us += 1e6 * far / (rates.bandwidth * of_memory)
    return duration_us


# A device that was never calibrated: published measurements show which share of its rates it reaches.

WORK = ("kernels", "products", "attention", "convolutions", "depthwise", "cache", "memory")
"""Kinds of work: kernels that are launched; operations of products with weights, of products between activations, of
convolutions, and of convolutions of one channel at a time; bytes from the cache, and from memory."""


def work_ms(works: Sequence[NodeWork], rates: Rates, weight_bytes: float, *, fused: bool) -> tuple[float, ...]:
    """Return what each kind of :data:`WORK` of a call takes at the device's rates, in milliseconds.

    ``weight_bytes``: of the whole graph's products, each shared weight once. ``fused``: the runtime compiles the graph;
    else it launches a kernel per operator.
    """
    totals = dict.fromkeys(WORK, 0.0)
    beyond = beyond_cache(weight_bytes, rates.cache_bytes)
    kernels = fuse(works) if fused else [[work] for work in works if work.bytes and not work.host_only]
    totals["kernels"] = len(kernels) * rates.overhead_us / 1000
    for kernel in kernels:
        moved = [work.moved_bytes for work in kernel]
        # What lies inside a fused chain stays in registers: its largest member's bytes are read and written.
        near = sum(work.weight_bytes for work in kernel) + (max(moved) if fused else sum(moved))
        far = min(near, sum(far_bytes(work, beyond, rates.cache_bytes) for work in kernel))
        totals["cache"] += 1000 * (near - far) / rates.bandwidth
        totals["memory"] += 1000 * far / rates.bandwidth
        for work in kernel:
            if work.is_product:
                kind = {"convolution": "convolutions", "narrow": "depthwise"}.get(work.trust, "products")
                kind = "attention" if work.cls == "attention" else kind
                peak = rates.vector_peak if kind == "depthwise" else rates.peak
                totals[kind] += 1000 * work.operations / peak
    return tuple(totals.values())


# What lives beside one node's inputs and outputs: residual streams, masks, the tensors of parallel branches.
_ALIVE_HIGH = 4.0
_ARENA_HIGH = 2.0  # arenas grow to the next power of two
# cuBLAS takes 4 MiB, and 32 MiB on Hopper; TensorRT's tactics may take more, which its activation bytes then contain.
_GPU_WORKSPACE_HIGH = 32 * 2**20
_CONTEXT_LOW, _CONTEXT_HIGH = 0.7, 1.5  # CUDA contexts differ by driver and by how many kernels are loaded
# ONNX Runtime on CPUs keeps weights as they are, and once more packed for its products; while it opens a file, the
# parsed graph is a third copy.
_CPU_COPIES_LOW, _CPU_COPIES_HIGH = 1.0, 3.2
_CPU_FIXED_HIGH = 48 * 2**20  # sessions, thread pools, code pages of the kernels that run first


def estimate_memory(
    artifact: ArtifactManifest, device: DeviceProfile, weights: float, step_bytes: float, feed_bytes: float
) -> Memory:
    """Return weights, activations, workspace and, on GPUs, the CUDA context; `unavailable` where that is not known.

    ``weights`` are bytes as stored, ``step_bytes`` the largest node's inputs and outputs, ``feed_bytes`` the inputs.
    """
    gpu, fed_bytes = device.kind == "cuda", 2 * feed_bytes  # caches of earlier tokens are read and written
    alive_low, alive_high = step_bytes + fed_bytes, _ALIVE_HIGH * step_bytes + fed_bytes
    if not gpu:
        low = _CPU_COPIES_LOW * weights + alive_low
        high = _CPU_COPIES_HIGH * weights + _ARENA_HIGH * alive_high + _CPU_FIXED_HIGH
    elif device.context_bytes is None:
        reason = f"the profile {device.name!r} has no value for context_bytes, so memory is not estimated"
        return Memory(status="unavailable", reason=reason)
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
        status="estimated", peak=round((low * high) ** 0.5), low=round(low), high=round(high), method=f"sum of {parts}",
        reason=f"sum of {parts}; the range covers memory that allocators keep and copies of the weights",
    )  # fmt: skip
