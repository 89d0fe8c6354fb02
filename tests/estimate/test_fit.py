"""Fitting finds the efficiencies that made the durations, and cross-validation shows errors on other models."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency, Peaks
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.estimate.fit import TimedCall, estimated_us, fit, nnls, with_cross_validation
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.roofline import beyond_cache, far_bytes, node_us, rates_of
from tests.estimate.test_estimate import fact

MIB = 2**20
TRUE = Efficiency(overhead_us=4.0, of_peak=0.8, of_bandwidth=3.0, of_memory=1.5)
BARE = Calibration(created="now", processor="here", threads=1, provider="CPU", efficiencies={})
CALL_US = 7.0


DEVICE = DeviceProfile(
    name="host", title="Host", kind="cpu", peaks=Peaks(fp32=fact(1e11), int8=fact(4e11)),
    bandwidth_bytes_per_s=fact(2e10), cache_bytes=fact(32 * MIB), launch_overhead_us=fact(3.0),
)  # fmt: skip


def product(rows: int, width: int, operator: str = "MatMul") -> NodeWork:
    return NodeWork("gemm", operator, 2.0 * rows * width**2, 4.0 * width**2, 8.0 * rows * width)


def artifact(precision: Any = "fp32") -> ArtifactManifest:
    return ArtifactManifest(id=precision, file="a", format="onnx", precision=precision, status="built")


def timed(
    works: tuple[NodeWork, ...], *, true: Efficiency = TRUE, weights: float = 0.0, profiler_us: float = 0.0, **of: Any
) -> TimedCall:
    """A call whose nodes take as long as ``true`` says, and ``profiler_us`` more under the profiler."""
    call = replace(TimedCall("r", artifact(), ("steady", 1, 8), 1, works, (), 0.0, weights), **of)
    rates = rates_of(DEVICE, call.artifact.precision)
    beyond = beyond_cache(weights, rates.cache_bytes)
    each = [node_us(work, far_bytes(work, beyond, rates.cache_bytes), true, rates) for work in works]
    return replace(call, durations_us=tuple(us + profiler_us for us in each), call_us=CALL_US + sum(each))


def calls_of(**of: Any) -> list[TimedCall]:
    """Calls of two equal products each, small and large, whose weights the cache holds or does not."""
    sizes = [(rows, width) for rows in (1, 8, 64, 512) for width in (128, 512, 1024)]
    return [timed((product(*size),) * 2, weights=weights, **of) for size in sizes for weights in (0.0, 100.0 * MIB)]


def fitted(calls: list[TimedCall]) -> Calibration:
    return fit(DEVICE, calls, CALL_US, BARE).calibration


def test_nnls_equals_scipys() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    generator = np.random.default_rng(3)
    for _ in range(30):
        matrix, target = generator.normal(size=(10, 4)), generator.normal(size=10)
        assert nnls(matrix, target) == pytest.approx(optimize.nnls(matrix, target)[0], abs=1e-9)


def test_rates_of_an_operator_and_its_class_are_recovered_without_the_profilers_share() -> None:
    calibration = fitted(calls_of())
    for efficiency in (calibration.operators["fp32"]["MatMul"], calibration.efficiencies["fp32"]["gemm"]):
        assert efficiency.model_dump() == pytest.approx(TRUE.model_dump(), rel=1e-6)
    assert calibration.call_overhead_us == {"fp32": pytest.approx(CALL_US)}
    for case in calibration.fitted_on:
        assert case.estimated_ms == pytest.approx(case.measured_ms, rel=1e-6)
    calibration = fitted(calls_of(profiler_us=1.5))
    assert calibration.operators["fp32"]["MatMul"].overhead_us == pytest.approx(TRUE.overhead_us, abs=1.0)
    errors = [case.estimated_ms / case.measured_ms for case in calibration.fitted_on if case.estimated_ms]
    assert errors == pytest.approx([1.0] * len(errors), rel=0.15)


def test_an_operator_that_was_only_small_costs_what_its_class_costs_when_it_is_large() -> None:
    true = Efficiency(overhead_us=2.0, of_bandwidth=1.0)
    adds = [timed((NodeWork("elementwise", "Add", 0.0, 0.0, 2.0**power),), true=true) for power in range(10, 24)]
    # 256 bytes take three times as long as 8: a timer's tick, not a rate.
    ticks = ((8.0, 1.0), (16.0, 1.0), (128.0, 2.0), (256.0, 3.0))
    cast = NodeWork("elementwise", "Cast", 0.0, 0.0, 2.0**23)
    casts = [
        replace(adds[0], works=(replace(cast, moved_bytes=moved),), durations_us=(us,), call_us=7.0 + us)
        for moved, us in ticks
    ]
    large = replace(adds[-1], works=(cast,))
    device = fit(DEVICE, [*adds, *casts], CALL_US, BARE)
    assert 1 <= estimated_us(device, large) / adds[-1].call_us < 4, "160 times as long by the casts alone"


def test_times_that_cannot_be_right_or_are_too_few_are_refused() -> None:
    """They were timed while something else used the processor: a tenth of their call."""
    disturbed = timed((product(8, 512),))
    disturbed = replace(disturbed, durations_us=tuple(us / 10 for us in disturbed.durations_us))
    expected = fitted(calls_of()).operators["fp32"]["MatMul"].model_dump()
    assert fitted([*calls_of(), disturbed]).operators["fp32"]["MatMul"].model_dump() == pytest.approx(expected)
    with pytest.raises(EdgeformerError, match="contradict the times of whole calls"):
        fit(DEVICE, [disturbed] * 4, CALL_US, BARE)
    with pytest.raises(EdgeformerError, match="fewer than 4 shapes"):
        fit(DEVICE, [*calls_of()[:3], *calls_of(artifact=artifact("int8"))], CALL_US, BARE)


def test_each_of_three_models_is_estimated_by_the_others() -> None:
    models = [calls_of(run="a"), calls_of(run="b"), calls_of(run="c", true=TRUE.model_copy(update={"of_peak": 0.4}))]
    calls = [call for model in models for call in model]
    base = DEVICE.model_copy(update={"calibration": BARE})
    calibration = with_cross_validation(base, calls, CALL_US, BARE).calibration
    assert calibration is not None and (error := calibration.error) is not None
    cases = calibration.left_out
    assert [case.run for case in cases] == [call.run for call in calls]
    assert (error.models, error.cases, error.spread_log2) == (3, len(calls), error.worst_log2)
    without_c = fit(DEVICE, [call for call in calls if call.run != "c"], CALL_US, BARE)
    last = calls[-1]
    assert cases[-1].estimated_ms == pytest.approx(estimated_us(without_c, last) / 1000)
    assert cases[-1].estimated_ms is not None and cases[-1].estimated_ms < 0.8 * cases[-1].measured_ms
    two = models[0] + models[1]
    assert with_cross_validation(base, two, CALL_US, BARE) == base, "two models say nothing of a third"
