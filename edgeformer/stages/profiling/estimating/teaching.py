"""From timed graphs to a calibration: all at one speed, without the profiler, operator by operator, then the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgeformer.backends import default_provider, library_versions
from edgeformer.formats.device import Calibration, DeviceProfile, FittedCase, Response, Speed
from edgeformer.formats.errors import EdgeformerError
from edgeformer.machine.capability import kernel_flags
from edgeformer.machine.host import cpu_name, now, stated_cache_bytes
from edgeformer.stages.profiling.estimating.fit import (
    CallSample,
    NodeSample,
    fit_operators,
    meet_calls,
    memory_ratio,
)
from edgeformer.stages.profiling.estimating.host_facts import shown_ramp
from edgeformer.stages.profiling.estimating.probe import HostRates
from edgeformer.stages.profiling.estimating.profiled import TimedCall, at_one_speed, speeds_of, without_profiler
from edgeformer.stages.profiling.estimating.rates import RAMP, Rates, rates_of
from edgeformer.stages.profiling.estimating.reference import UNMOVED, slowness, two_speeds
from edgeformer.stages.profiling.estimating.response import fit_response
from edgeformer.stages.profiling.estimating.roofline import amounts, beyond_cache, fitted_nodes_us
from edgeformer.stages.profiling.estimating.work import NodeWork

PRECISIONS = ("fp32", "int8", "fp16")
# A probe's product beside a product of the model: it shows sizes that the model lacks, but the model is what counts.
_PROBE_WEIGHT = 0.5
_FEWEST_SHAPES = 4
OVERLAP = 1.5
"""Exponent of a product that computes while it reads weights of the cache, see :attr:`Rates.overlap`. Of 1, 1.5, 2 and
3 what estimated models best that were left out, on a Xeon with AMX; with 1, products of 16 rows come out a seventh too
slow."""


def fit(
    device: DeviceProfile,
    probed: HostRates,
    calls: Sequence[TimedCall],
    speed: Speed | None = None,
) -> DeviceProfile:
    """The device with a calibration.

    Args:
        device: with this host's facts; ``cores`` are the threads that ``calls`` used.
        probed: the products and the cost of a call, with as many threads.
        calls: of one model or of several.
        speed: of the machine, that the calibration is to hold for; None: the usual one, of two the faster.

    Raises:
        EdgeformerError: too little was timed.
    """
    speeds = two_speeds(speeds_of(calls))
    response = fit_response(calls)
    alike, held = at_one_speed(calls, speed or (speeds[0] if speeds else None), response)
    threads = device.cores.value if device.cores is not None else 1
    ramp = shown_ramp(probed.products, threads, device.cache_bytes.value if device.cache_bytes is not None else 0)
    rates = {name: replace(rates_of(device, name), ramp=ramp or RAMP, overlap=OVERLAP) for name in PRECISIONS}
    probes = _probe_samples(rates["fp32"], probed, held, response)
    ratio = memory_ratio(probes, rates["fp32"])
    bare = Calibration(
        created=now(), processor=cpu_name(), instructions=kernel_flags(), stated_cache_bytes=stated_cache_bytes(),
        cache_ramp=ramp, overlap=OVERLAP,
        threads=threads, provider=default_provider("cpu"),
        versions=library_versions(), speed=held, other_speed=speeds[1] if speeds else None, response=response,
        efficiencies={},
    )  # fmt: skip
    met = _taught(bare, without_profiler(alike, probed.call_us), rates, probes, ratio)
    fitted = device.model_copy(update={"calibration": met})
    cases = tuple(case_of(fitted, call) for call in alike)
    return fitted.model_copy(update={"calibration": met.model_copy(update={"fitted_on": cases})})


def estimated_us(device: DeviceProfile, call: TimedCall) -> float:
    """Microseconds of a call on a calibrated device. Raises EdgeformerError where the calibration cannot tell.

    Args:
        device: a calibrated one.
        call: what it consists of; its own times have no influence.
    """
    calibration, precision = device.calibration, call.artifact.precision
    assert calibration is not None
    rates = rates_of(device, precision)
    each = fitted_nodes_us(call.works, rates, calibration, precision, call.weight_bytes)
    nodes_us = sum(us * count for us, count in zip(each, call.counts, strict=True))
    return call.runs * calibration.call_overhead_us.get(precision, 0.0) + nodes_us


def case_of(device: DeviceProfile, call: TimedCall) -> FittedCase:
    """A timed call beside its estimate."""
    phase, batch, seq = call.item
    return FittedCase(
        run=call.run, artifact=call.artifact.id, precision=call.artifact.precision, phase=phase, batch=batch, seq=seq,
        measured_ms=call.call_us / 1000, estimated_ms=estimated_us(device, call) / 1000,
    )  # fmt: skip


def _taught(
    bare: Calibration, calls: Sequence[TimedCall], rates: Mapping[str, Rates], probes: list[NodeSample], ratio: float
) -> Calibration:
    """``bare`` with what calls teach.

    Args:
        probes: products beside those of the calls.
        ratio: how much longer a byte takes from memory.
    """
    if sum(call.artifact.precision == "fp32" for call in calls) < _FEWEST_SHAPES:
        raise EdgeformerError("fewer than 4 shapes of the FP32 graph could be timed: too little to fit on")
    believed = [call for call in calls if call.believed]
    if not any(call.artifact.precision == "fp32" for call in believed):
        raise EdgeformerError("the nodes of no FP32 call add up to it: something else used the processor meanwhile")
    nodes = [sample for call in believed for sample in _samples(call, rates[call.artifact.precision])]
    classes, operators = fit_operators([*probes, *nodes], rates, ratio)
    whole = [
        CallSample(call.artifact.precision, call.works, call.call_us, call.weight_bytes, call.counts) for call in calls
    ]
    return meet_calls(bare.model_copy(update={"efficiencies": classes, "operators": operators}), whole, rates)


def _samples(call: TimedCall, rates: Rates) -> list[NodeSample]:
    """Nodes that do the same are one sample, with their mean duration and the weight of all of them."""
    beyond, whole_us = beyond_cache(call.weight_bytes, rates.cache_bytes, rates.ramp), call.nodes_us
    return [
        NodeSample(
            call.artifact.precision, work, amounts(work, beyond, rates.cache_bytes, rates.ramp), us, whole_us / count
        )
        for work, us, count in zip(call.works, call.durations_us, call.counts, strict=True)
    ]


def _probe_samples(
    rates: Rates, probed: HostRates, held: Speed | None = None, response: Response = UNMOVED
) -> list[NodeSample]:
    """The probe's products as they would be at the speed ``held``."""
    samples: list[NodeSample] = []
    for time in probed.products:
        weight = 4.0 * time.width**2
        beyond = beyond_cache(weight * time.weights, rates.cache_bytes, rates.ramp)
        moved = 8.0 * time.rows * time.width
        work = NodeWork("gemm", "MatMul", 2.0 * time.rows * time.width**2, weight, moved, time.rows, time.width)
        amount = amounts(work, beyond, rates.cache_bytes, rates.ramp)
        slow = slowness(time.speed, held, response) if time.speed is not None and held is not None else 1.0
        us = time.duration_us / slow
        samples.append(NodeSample("fp32", work, amount, us, us / _PROBE_WEIGHT))
    return samples
