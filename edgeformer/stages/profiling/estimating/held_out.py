"""How far off estimates of a model are that was never seen: each model is left out once (leave one group out)."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from edgeformer.formats.device import DeviceProfile, EstimateError, FittedCase, Speed
from edgeformer.machine.host import now
from edgeformer.stages.profiling.estimating.probe import HostRates
from edgeformer.stages.profiling.estimating.profiled import TimedCall, at_one_speed, speeds_of
from edgeformer.stages.profiling.estimating.reference import UNMOVED, typical
from edgeformer.stages.profiling.estimating.teaching import case_of, fit

FEWEST_MODELS = 3
"""Fewer say nothing of a model that was never seen."""
PERCENT = 95
"""Of a model's cases that a range must hold, whichever of the known models the next one is like."""


def left_out(
    device: DeviceProfile, probed: HostRates, calls: Sequence[TimedCall], speed: Speed | None = None
) -> list[FittedCase]:
    """Every timed call beside what is estimated from the other models alone; empty for fewer than three models.

    Args:
        device: with this host's facts.
        probed: by the same number of threads.
        calls: of several models.
        speed: that all times are brought to; None: the usual one.
    """
    runs = list(dict.fromkeys(call.run for call in calls))
    if len(runs) < FEWEST_MODELS:
        return []
    seen = speeds_of(calls)
    held = speed or (typical(seen) if seen else None)
    cases: list[FittedCase] = []
    for run in runs:
        taught = fit(device, probed, [call for call in calls if call.run != run], speed=held)
        assert taught.calibration is not None
        known = taught.calibration.efficiencies
        own = as_taught(taught, [call for call in calls if call.run == run])
        cases += [case_of(taught, call) for call in own if call.artifact.precision in known]
    return cases


def as_taught(taught: DeviceProfile, calls: Sequence[TimedCall]) -> list[TimedCall]:
    """Times as they would be at the speed of a calibration, by what its own calls show of the way to it.

    Args:
        taught: a calibrated profile.
        calls: others than it was fitted on.
    """
    assert taught.calibration is not None
    return at_one_speed(calls, taught.calibration.speed, taught.calibration.response or UNMOVED)[0]


def error_of(device: DeviceProfile, cases: Sequence[FittedCase]) -> EstimateError:
    """What cases that were left out say of those to come.

    Args:
        device: a calibrated profile.
        cases: at least one, with estimates.
    """
    assert device.calibration is not None
    by_model: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        if case.estimated_ms:
            by_model[case.run].append(abs(math.log2(case.estimated_ms / case.measured_ms)))
    off = [value for values in by_model.values() for value in values]
    return EstimateError(
        kind=device.kind, device=device.calibration.processor, cases=len(off), models=len(by_model),
        median_log2=statistics.median(off), worst_log2=max(off), spread_log2=spread(by_model), created=now(),
    )  # fmt: skip


def spread(off: Mapping[str, Sequence[float]]) -> float:
    """Half of a range, in log2: what 95 % of a model's cases stay within, of the model that is the worst at it.

    The cases of a model share an error, so many cases of few models are few: what the next model will be off by is as
    likely above each of these quantiles as any of the models was above the others'.

    Args:
        off: model → |log2(estimated / measured)| of its cases, estimated by what the others taught.
    """
    return max(float(np.quantile(values, PERCENT / 100)) for values in off.values())


def with_left_out(device: DeviceProfile, cases: Sequence[FittedCase]) -> DeviceProfile:
    """The calibrated profile with the error that left-out cases show."""
    assert device.calibration is not None
    update = {"left_out": tuple(cases), "error": error_of(device, cases)}
    return device.model_copy(update={"calibration": device.calibration.model_copy(update=update)})
