"""Fit of a calibration: rates per operator and per operator class, in every precision, from timed calls.

Each node costs an overhead and the times of its operations, its bytes in the cache and its bytes in memory
(:func:`roofline.node_us`). Non-negative least squares finds the four rates of an operator from the durations of its
nodes, by their relative errors. Pure functions.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import numpy.typing as npt

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency, EstimateError, FittedCase
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.roofline import beyond_cache, calibrated_nodes_us, far_bytes, rates_of
from edgeformer.measurement.artifact import Item
from edgeformer.system.host import now

Floats = npt.NDArray[np.float64]

FEWEST_SHAPES = 4  # fewer shapes of the FP32 graph are too little to fit on
FEWEST_MODELS = 3  # fewer models show nothing of a model that was not fitted
# The calls with the cheapest nodes show what the profiler adds to a node; in the others it is lost in their noise.
_CHEAPEST_SHARE, _FEWEST_CHEAPEST = 3, 3
_LEAST_US = 0.1
# An operator's nodes may all be small, or cached: of large ones, and of memory, its class's nodes say more, which count
# as this share of all that it was fitted on.
_CLASS_SHARE = 0.001
# Reading memory takes this many times as long as at the measured bandwidth, and no longer than a slower cache: small
# models read few bytes from memory, and what a fit says of them is noise.
_LEAST_MEMORY_COST, _MOST_MEMORY_COST = 0.01, 1.5
# Nodes whose sum is further from their call were timed at another speed of the machine than the call.
_LEAST_SCALE, _MOST_SCALE = 0.3, 2.0


@dataclass(frozen=True)
class TimedCall:
    """One timed item of an artifact."""

    run: str
    artifact: ArtifactManifest
    item: Item
    runs: int  # graph runs in one call
    works: tuple[NodeWork, ...]
    durations_us: tuple[float, ...]  # one per work, under the profiler
    call_us: float  # of the whole call, without the profiler
    weight_bytes: float  # of the whole graph's products, each shared weight once
    process_us: tuple[float, ...] = ()  # ``call_us`` in each of the processes that timed it


def nnls(matrix: Floats, target: Floats) -> Floats:
    """Return x ≥ 0 [k] with the least |matrix · x − target|², trying all 2ᵏ sets of columns, without scipy."""
    # The same problem in k rows: the part of the target that no column reaches is constant.
    rotation, matrix = np.linalg.qr(matrix)
    target = rotation.T @ target
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for used in map(list, chain.from_iterable(combinations(range(columns), size + 1) for size in range(columns))):
        trial = np.zeros(columns)
        trial[used] = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        residual = float(np.square(matrix @ trial - target).sum())
        if residual < least and (trial >= 0).all():
            best, least = trial, residual
    return best


def fit(device: DeviceProfile, calls: Sequence[TimedCall], call_us: float, bare: Calibration) -> DeviceProfile:
    """Return the device, with this host's facts, and a calibration fitted to the calls.

    ``call_us``: of a graph run beside its nodes; ``bare``: the calibration without rates. Raises EdgeformerError: too
    few shapes of the FP32 graph were timed.
    """
    # 1. Find out what the profiler adds to a node
    if sum(call.artifact.precision == "fp32" for call in calls) < FEWEST_SHAPES:
        raise EdgeformerError("fewer than 4 shapes of the FP32 graph could be timed, too few for a fit")
    profiled = sorted((call for call in calls if call.works), key=lambda call: call.call_us / len(call.works))
    cheapest = profiled[: max(_FEWEST_CHEAPEST, len(profiled) // _CHEAPEST_SHARE)]
    added = [(sum(call.durations_us) - call.call_us) / len(call.works) for call in cheapest]
    added_us = max(0.0, statistics.median(added)) if added else 0.0
    # 2. Scale the durations of nodes to their call's, and sort them by operator and class
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for call in calls:
        bare_us = [max(_LEAST_US, duration_us - added_us) for duration_us in call.durations_us]
        scale = max(call.call_us - call.runs * call_us, _LEAST_US) / sum(bare_us) if bare_us else 1.0
        if not _LEAST_SCALE <= scale <= _MOST_SCALE:  # nodes and call were timed at different speeds
            continue
        precision = call.artifact.precision
        rates = rates_of(device, precision)
        beyond = beyond_cache(call.weight_bytes, rates.cache_bytes)
        for work, node_us in zip(call.works, (scale * us for us in bare_us), strict=False):
            far = far_bytes(work, beyond, rates.cache_bytes)
            compute_us = 1e6 * work.operations / rates.peak if work.is_product else 0.0
            near_us, far_us = 1e6 * (work.bytes - far) / rates.bandwidth, 1e6 * far / rates.bandwidth
            row = (1.0, compute_us, near_us, far_us, node_us, node_us / call.call_us)
            rows[precision, work.cls].append(row)
            rows[precision, work.operator].append(row)
    if not any(precision == "fp32" for precision, _ in rows):
        contradiction = "the times of single nodes contradict the times of whole calls"
        raise EdgeformerError(f"{contradiction}; calibrate again on an idle machine")
    # 3. Fit their rates
    efficiencies: dict[str, dict[str, Efficiency]] = defaultdict(dict)
    operators: dict[str, dict[str, Efficiency]] = defaultdict(dict)
    class_of = {work.operator: work.cls for call in calls for work in call.works}
    for (key, name), rows_of_name in sorted(rows.items()):
        samples = np.array(rows_of_name)
        if name not in class_of:
            efficiencies[key][name] = _efficiency(samples)
            continue
        class_samples = np.array(rows[key, class_of[name]])
        class_samples[:, 5] *= _CLASS_SHARE * samples[:, 5].sum() / class_samples[:, 5].sum()
        operators[key][name] = _efficiency(np.vstack([samples, class_samples]))
    overheads = dict.fromkeys(efficiencies, call_us)
    update = {"efficiencies": efficiencies, "operators": operators, "call_overhead_us": overheads}
    fitted = device.model_copy(update={"calibration": bare.model_copy(update=update)})
    # 4. Sums of nodes are biased by what the profiler adds; one factor per precision makes the median call exact.
    for key in efficiencies:
        ratios = [c.call_us / estimated_us(fitted, c) for c in calls if c.artifact.precision == key]
        factor = statistics.median(ratios)
        for table in (efficiencies[key], operators[key]):
            for name, efficiency in table.items():
                shares = efficiency.model_dump(exclude={"overhead_us"}, exclude_none=True)
                slower = {share_name: share / factor for share_name, share in shares.items()}
                slower["overhead_us"] = efficiency.overhead_us * factor
                table[name] = efficiency.model_copy(update=slower)
        overheads[key] *= factor
    cases = tuple(case_of(fitted, call) for call in calls)
    calibration = bare.model_copy(update={**update, "fitted_on": cases})
    return device.model_copy(update={"calibration": calibration})


def _efficiency(samples: Floats) -> Efficiency:
    """Fit one operator or class.

    ``samples`` [n, 6]: 1, the microseconds of operations, near and far bytes at the device's rates, the measured
    duration, and its share of the call, by which a sample counts: sums have to come out right.
    """
    columns, durations, shares = samples[:, :4], samples[:, 4], samples[:, 5]
    weights = np.sqrt(shares) / durations
    scales = columns.max(axis=0)

    def solve(used: npt.NDArray[np.bool_], target: Floats) -> Floats:
        costs = np.zeros(4)
        costs[used] = nnls(columns[:, used] / scales[used] * weights[:, None], target * weights) / scales[used]
        return costs

    costs = solve(scales > 0, durations)
    if scales[3] == 0:  # nothing came from memory: assume its bandwidth, or the cache's if slower
        costs[3] = max(costs[2], 1.0) if costs[2] > 0 else 0.0
    else:
        memory_cost = float(np.clip(costs[3], _LEAST_MEMORY_COST, max(_MOST_MEMORY_COST, costs[2])))
        if memory_cost != costs[3]:
            memory_us = memory_cost * columns[:, 3]
            costs = solve((scales > 0) & (np.arange(4) < 3), np.maximum(durations - memory_us, 0.0))
            costs[3] = memory_cost
    of_peak, of_bandwidth, of_memory = (float(1 / cost) if cost > 0 else None for cost in costs[1:])
    return Efficiency(overhead_us=float(costs[0]), of_peak=of_peak, of_bandwidth=of_bandwidth, of_memory=of_memory)


def estimated_us(device: DeviceProfile, call: TimedCall) -> float:
    """Estimate the microseconds of a call on a calibrated device; the call's own times have no influence."""
    calibration, precision = device.calibration, call.artifact.precision
    assert calibration is not None
    each_us = calibrated_nodes_us(call.works, rates_of(device, precision), calibration, precision, call.weight_bytes)
    return call.runs * calibration.call_overhead_us.get(precision, 0.0) + sum(each_us)


def case_of(device: DeviceProfile, call: TimedCall) -> FittedCase:
    """Return a timed call beside its estimate."""
    phase, batch, seq = call.item
    return FittedCase(
        run=call.run, artifact=call.artifact.id, precision=call.artifact.precision, phase=phase, batch=batch, seq=seq,
        measured_ms=call.call_us / 1000, estimated_ms=estimated_us(device, call) / 1000,
    )  # fmt: skip


def with_cross_validation(
    fitted: DeviceProfile, calls: Sequence[TimedCall], call_us: float, bare: Calibration
) -> DeviceProfile:
    """Return the profile of :func:`fit` with the error on models that were left out; unchanged for fewer than three.

    Every model's calls are estimated by a fit to the other models. Half of a range, in log2, is the largest error: the
    cases of a model share an error, so many cases of few models are few.
    """
    assert fitted.calibration is not None
    runs = list(dict.fromkeys(call.run for call in calls))
    cases: list[FittedCase] = []
    for run in runs if len(runs) >= FEWEST_MODELS else ():
        device = fit(fitted, [call for call in calls if call.run != run], call_us, bare)
        assert device.calibration is not None
        precisions = device.calibration.efficiencies
        cases += [case_of(device, call) for call in calls if call.run == run and call.artifact.precision in precisions]
    if not cases:
        return fitted
    pooled = [abs(math.log2(case.estimated_ms / case.measured_ms)) for case in cases if case.estimated_ms]
    error = EstimateError(
        kind=fitted.kind, device=fitted.calibration.processor, cases=len(pooled),
        models=len({case.run for case in cases}), median_log2=statistics.median(pooled), worst_log2=max(pooled),
        spread_log2=max(pooled), created=now(),
    )  # fmt: skip
    update = {"left_out": tuple(cases), "error": error}
    return fitted.model_copy(update={"calibration": fitted.calibration.model_copy(update=update)})
