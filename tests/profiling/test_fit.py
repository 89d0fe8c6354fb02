"""Fitting finds the efficiencies that made the durations, and the roofline gives back the times."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeformer.formats.device import Calibration, Efficiency
from edgeformer.stages.profiling.estimating.fit import (
    CallSample,
    NodeSample,
    alike,
    fit_efficiency,
    fit_operators,
    meet_calls,
    memory_ratio,
    nnls,
)
from edgeformer.stages.profiling.estimating.rates import Rates
from edgeformer.stages.profiling.estimating.roofline import (
    amounts,
    beyond_cache,
    efficiency_of,
    fitted_us,
    node_us,
    range_us,
)
from edgeformer.stages.profiling.estimating.work import NodeWork

MIB = 2**20
RATES = Rates(100e9, 100e9, 100e9, 20e9, 32 * MIB, 3.0)
GPU = Rates(40e12, 20e12, 10e12, 200e9, 4 * MIB, 5.0, cores=20, gpu=True)
TRUE = Efficiency(overhead_us=4.0, of_peak=0.8, of_bandwidth=3.0, of_memory=1.5)


def product(rows: int, width: int = 256) -> NodeWork:
    return NodeWork("gemm", "MatMul", 2.0 * rows * width**2, 4.0 * width**2, 8.0 * rows * width, rows, width)


def samples_of(true: Efficiency, beyond: float, precision: str = "fp32") -> list[NodeSample]:
    found = []
    for rows in (1, 8, 64, 512):
        for width in (128, 512, 1024):
            work = product(rows, width)
            amount = amounts(work, beyond, RATES.cache_bytes)
            took = node_us(amount, true, RATES)
            found.append(NodeSample(precision, work, amount, took, 2 * took))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 1000))
def test_nnls_finds_what_made_the_target(wanted: list[float], seed: int) -> None:
    matrix = np.random.default_rng(seed).uniform(0.1, 1.0, size=(12, 3))
    assert nnls(matrix, matrix @ np.array(wanted)) == pytest.approx(wanted, abs=1e-6)


def test_nnls_gives_nothing_negative_and_no_better_answer_exists_nearby() -> None:
    draw = np.random.default_rng(3)
    for _ in range(30):
        matrix, target = draw.normal(size=(10, 4)), draw.normal(size=10)
        found = nnls(matrix, target)
        error = float(np.sum((matrix @ found - target) ** 2))
        assert (found >= 0).all()
        for _ in range(50):
            other = np.maximum(0, found + draw.normal(scale=0.1, size=4))
            assert float(np.sum((matrix @ other - target) ** 2)) >= error - 1e-9


def test_an_efficiency_is_found_again() -> None:
    found = fit_efficiency(samples_of(TRUE, 0.0), RATES, ratio=2.0)
    assert found.overhead_us == pytest.approx(4.0, rel=1e-3)
    assert found.of_peak == pytest.approx(0.8, rel=1e-3)
    assert found.of_bandwidth == pytest.approx(3.0, rel=1e-3)
    assert found.of_memory == pytest.approx(1.5, rel=1e-3)


def test_the_memory_is_told_from_the_cache_by_weights_that_no_cache_holds() -> None:
    both = [*samples_of(TRUE, 0.0), *samples_of(TRUE, 1.0)]
    assert memory_ratio(both, RATES) == pytest.approx(2.0, rel=1e-2)
    assert memory_ratio(samples_of(TRUE, 0.0), RATES) == 1.0  # nothing shows it


def test_an_operator_seen_at_few_sizes_is_described_by_its_class() -> None:
    rare = NodeWork("gemm", "Conv", 1e6, 1e4, 1e4)
    few = [NodeSample("fp32", rare, amounts(rare, 0.0, 0.0), 10.0, 10.0)]
    classes, operators = fit_operators([*samples_of(TRUE, 0.0), *few], {"fp32": RATES}, 2.0)
    assert set(operators["fp32"]) == {"MatMul"}
    calibration = calibrated(classes, operators)
    assert efficiency_of(rare, calibration, "fp32") == classes["fp32"]["gemm"]
    assert efficiency_of(product(1), calibration, "fp32") == operators["fp32"]["MatMul"]
    # a precision that was never seen takes FP32's
    assert efficiency_of(rare, calibration, "int8") == classes["fp32"]["gemm"]


def calibrated(classes: dict, operators: dict) -> Calibration:  # type: ignore[type-arg]
    return Calibration(
        created="now", processor="here", threads=1, provider="CPU", efficiencies=classes, operators=operators
    )


def test_sums_meet_the_calls_that_were_timed_without_the_profiler() -> None:
    """Production: half of the profiled overheads, rates 10 % worse, 30 µs per call."""
    classes, operators = fit_operators(samples_of(TRUE, 0.0), {"fp32": RATES}, 2.0)
    profiled = calibrated(classes, operators)
    small = NodeWork("gemm", "MatMul", 0.0, 0.0, 0.0)
    calls = []
    for rows, count in ((1, 300), (8, 20), (64, 50), (256, 5), (512, 100), (2, 400)):
        works = (*(product(rows) for _ in range(count)), *(small for _ in range(200)))
        done = tuple(amounts(work, 0.0, RATES.cache_bytes) for work in works)
        overhead = len(works) * 4.0
        rest = sum(node_us(amount, TRUE, RATES) for amount in done) - overhead
        calls.append(CallSample("fp32", works, 30 + 0.5 * overhead + 1.1 * rest, 256 * 256 * 4))
    met = meet_calls(profiled, calls, {"fp32": RATES})
    for call in calls:
        estimated = fitted_us(call.works, RATES, met, "fp32", call.weight_bytes)
        assert abs(math.log2(estimated / call.measured_us)) < 0.03
    # a step bundle pays for every graph that it runs
    twice = fitted_us(calls[0].works, RATES, met, "fp32", 1.0, runs=3) - fitted_us(
        calls[0].works, RATES, met, "fp32", 1.0
    )
    assert twice == pytest.approx(2 * met.call_overhead_us["fp32"])


def test_nodes_that_do_the_same_count_together() -> None:
    work = product(8)
    amount = amounts(work, 0.0, 0.0)
    merged = alike([NodeSample("fp32", work, amount, us, 100.0) for us in (1.0, 2.0, 3.0)])
    assert [(sample.duration_us, sample.call_us) for sample in merged] == [(2.0, pytest.approx(100 / 3))]


def test_the_share_beyond_the_cache_grows_with_what_is_used() -> None:
    sizes = [1, 8, 12, 16, 32, 40, 100]
    shares = [beyond_cache(size * MIB, 32 * MIB) for size in sizes]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0] and shares[-2:] == [1.0, 1.0]
    assert 0.3 < shares[3] < 0.6
    assert beyond_cache(1, 0) == 1.0


def chain(works: int) -> list[NodeWork]:
    add = NodeWork("elementwise", "Add", 1e5, 0.0, 1.2e6)
    return [work for _ in range(works) for work in (product(128), add, add)]


@pytest.mark.parametrize("rates", [RATES, GPU])
@pytest.mark.parametrize("fused", [False, True])
def test_a_range_is_a_range(rates: Rates, fused: bool) -> None:
    low, high = range_us(chain(10), rates, 256 * 256 * 4, fused)
    assert 0 < low < high
    more_low, more_high = range_us(chain(20), rates, 256 * 256 * 4, fused)
    assert more_low == pytest.approx(2 * low) and more_high > 1.5 * high


def test_the_low_end_is_never_below_the_peaks() -> None:
    works = chain(10)
    low, _ = range_us(works, GPU, 1e12, fused=True)
    assert low >= 1e6 * sum(work.operations for work in works if work.is_product) / GPU.peak
    assert low >= 1e6 * sum(work.weight_bytes for work in works) / GPU.bandwidth  # they fit in no cache
    assert low >= 20 * GPU.overhead_us  # a product and a fused chain, ten times


def test_a_runtime_that_fuses_launches_less() -> None:
    _, apart = range_us(chain(10), GPU, 1e6, fused=False)
    _, fused = range_us(chain(10), GPU, 1e6, fused=True)
    assert apart - fused == pytest.approx(10 * 2 * GPU.overhead_us)


def test_weights_that_fit_are_read_once_per_call() -> None:
    works = chain(10)
    _, looped = range_us(works, GPU, works[0].weight_bytes, fused=True)
    _, stacked = range_us(works, GPU, 10 * works[0].weight_bytes, fused=True)
    assert looped < stacked
