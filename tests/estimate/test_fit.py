"""Fitting finds the efficiencies that made the durations, and the roofline gives back the times."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeformer.artifacts.device import Calibration, Efficiency
from edgeformer.estimate.fit import (
    CallSample,
    NodeSample,
    fit_efficiency,
    fit_operators,
    meet_calls,
    memory_ratio,
    nnls,
)
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.rates import Rates
from edgeformer.estimate.roofline import amounts, beyond_cache, efficiency_of, fitted_us, node_us, range_us

MIB = 2**20
RATES = Rates(100e9, 100e9, 100e9, 20e9, 32 * MIB, 3.0)
GPU = Rates(40e12, 20e12, 10e12, 200e9, 4 * MIB, 5.0, cores=20, gpu=True)
TRUE = Efficiency(overhead_us=4.0, of_peak=0.8, of_bandwidth=3.0, of_memory=1.5)


def product(rows: int, width: int = 256) -> NodeWork:
    return NodeWork("gemm", "MatMul", 2.0 * rows * width**2, 4.0 * width**2, 8.0 * rows * width, rows, width)


def samples_of(true: Efficiency, beyond: float, precision: str = "fp32", rates: Rates = RATES) -> list[NodeSample]:
    found = []
    for rows in (1, 8, 64, 512):
        for width in (128, 512, 1024):
            work = product(rows, width)
            amount = amounts(work, beyond, RATES.cache_bytes)
            took = node_us(amount, true, rates)
            found.append(NodeSample(precision, work, amount, took, 2 * took))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10), min_size=3, max_size=3), st.integers(0, 1000))
def test_nnls_finds_what_made_the_target(wanted: list[float], seed: int) -> None:
    matrix = np.random.default_rng(seed).uniform(0.1, 1.0, size=(12, 3))
    assert nnls(matrix, matrix @ np.array(wanted)) == pytest.approx(wanted, abs=1e-6)


def test_nnls_is_scipys() -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="scipy, which scikit-learn brings, is the oracle")
    draw = np.random.default_rng(3)
    for _ in range(30):
        matrix, target = draw.normal(size=(10, 4)), draw.normal(size=10)
        assert nnls(matrix, target) == pytest.approx(optimize.nnls(matrix, target)[0], abs=1e-9)


def test_an_efficiency_is_found_again() -> None:
    found = fit_efficiency(samples_of(TRUE, 0.0), RATES, ratio=2.0)
    assert found.overhead_us == pytest.approx(4.0, rel=1e-3)
    assert found.of_peak == pytest.approx(0.8, rel=1e-3)
    assert found.of_bandwidth == pytest.approx(3.0, rel=1e-3)
    assert found.of_memory == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize("overlap", [1.5, 2.0, 3.0])
def test_an_efficiency_is_found_again_where_weights_are_read_while_it_computes(overlap: float) -> None:
    rates = replace(RATES, overlap=overlap)
    true = Efficiency(overhead_us=4.0, of_peak=0.8, of_bandwidth=3.0, of_weights=1.5, of_memory=0.7)
    both = [*samples_of(true, 0.0, rates=rates), *samples_of(true, 1.0, rates=rates)]
    found = fit_efficiency(both, rates, ratio=2.0).model_dump()
    assert found == pytest.approx(true.model_dump(), rel=0.02)
    summed = fit_efficiency(both, RATES, ratio=2.0)  # as if it did one after the other
    assert summed.model_dump() != pytest.approx(true.model_dump(), rel=0.02)


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


def samples(works: list[NodeWork], true: Efficiency, precision: str = "fp32") -> list[NodeSample]:
    done = [(work, amounts(work, 0.0, RATES.cache_bytes)) for work in works]
    return [NodeSample(precision, work, amount, node_us(amount, true, RATES), 100.0) for work, amount in done]


def test_only_products_are_limited_by_arithmetic() -> None:
    """Their durations follow the operations, and yet an addition's peak is nobody's matter."""
    draw = np.random.default_rng(0)
    works = [NodeWork("elementwise", "Add", float(n), 0.0, float(m)) for n, m in draw.uniform(1e5, 1e6, size=(12, 2))]
    found = fit_efficiency(samples(works, Efficiency(overhead_us=2.0, of_peak=0.5, of_bandwidth=1.0)), RATES, 2.0)
    assert found.of_peak is None and found.overhead_us > 0


def test_a_rate_that_limits_nothing_is_unknown_and_one_may_be_above_the_peak() -> None:
    works = [product(rows, width) for rows in (1, 8, 64, 512) for width in (128, 512, 1024)]
    found = fit_efficiency(samples(works, Efficiency(overhead_us=4.0, of_peak=2.0)), RATES, ratio=2.0)
    assert (found.of_bandwidth, found.of_memory) == (None, None)
    assert found.of_peak == pytest.approx(2.0) and found.overhead_us == pytest.approx(4.0)


def test_memory_and_cache_are_fitted_together() -> None:
    both = [*samples_of(TRUE, 0.0), *samples_of(TRUE, 1.0), *samples_of(TRUE, 0.3)]
    found = fit_efficiency(both, RATES, ratio=2.0)
    fitted = (found.overhead_us, found.of_peak, found.of_bandwidth, found.of_memory)
    assert fitted == pytest.approx((4.0, 0.8, 3.0, 1.5), rel=1e-8)


@pytest.mark.parametrize(
    ("true", "ratio"),
    [
        (Efficiency(of_peak=0.8, of_bandwidth=3.0, of_memory=0.15), 8.0),  # 20, which no cache is
        (Efficiency(of_peak=0.8, of_bandwidth=1.0, of_memory=2.0), 1.0),  # faster from memory: nonsense
        (Efficiency(of_peak=0.8, of_memory=1.5), 1.0),  # bytes from the cache cost nothing
    ],
)
def test_the_memory_is_one_to_eight_times_slower_than_the_cache(true: Efficiency, ratio: float) -> None:
    near, far = samples_of(Efficiency(of_peak=0.8, of_bandwidth=true.of_bandwidth), 0.0), samples_of(true, 1.0)
    assert memory_ratio([*near, *far], RATES) == ratio


@pytest.mark.parametrize(("sizes", "own"), [(3, set()), (4, {"Add"})])
def test_four_sizes_make_an_operator_of_its_own(sizes: int, own: set[str]) -> None:
    works = [NodeWork("elementwise", "Add", 1.0, 0.0, 1e5 * (1 + size)) for size in range(sizes)]
    _, operators = fit_operators(samples([*works, *works], TRUE), {"fp32": RATES}, 2.0)
    assert set(operators.get("fp32", {})) == own


def empty(duration_us: float, call_us: float) -> NodeSample:
    work = NodeWork("elementwise", "Add", 0.0, 0.0, 0.0)
    return NodeSample("fp32", work, amounts(work, 0.0, 0.0), duration_us, call_us)


def test_a_sample_counts_by_its_share_of_its_call() -> None:
    """The overhead x with the least sum of share · difference² / (measured · x): Σ duration/call over Σ 1/call."""
    found = fit_efficiency([empty(10.0, 100.0), empty(20.0, 50.0)], RATES, 1.0)
    assert found.overhead_us == pytest.approx((10 / 100 + 20 / 50) / (1 / 100 + 1 / 50))
    assert fit_efficiency([empty(0.0, 100.0)], RATES, 1.0).overhead_us == pytest.approx(0.5), "half a tick of the clock"


def compute(us: float) -> NodeWork:
    """A product that takes so long at the full peak."""
    return NodeWork("gemm", "MatMul", us * RATES.peak / 1e6, 0.0, 0.0)


def timed(precision: str, known: dict[str, Efficiency], *calls: tuple[float, float]) -> Calibration:
    """What comes of calls of one product, (microseconds at the full peak, measured)."""
    before = calibrated({name: {"gemm": efficiency} for name, efficiency in known.items()}, {})
    found = [CallSample(precision, (compute(us),), measured, 0.0) for us, measured in calls]
    return meet_calls(before, found, {precision: RATES})


def test_the_cost_of_a_call_is_not_mixed_with_that_of_its_nodes() -> None:
    own = Efficiency(of_peak=0.5, of_memory=0.25)
    met = timed("fp16", {"fp16": own, "fp32": Efficiency(of_peak=1.0)}, (50.0, 130.0), (500.0, 1030.0))
    assert met.call_overhead_us == {"fp16": pytest.approx(30.0)}
    assert met.efficiencies["fp16"]["gemm"].of_peak == pytest.approx(0.5)
    assert met.efficiencies["fp32"] == {"gemm": Efficiency(of_peak=1.0)}


def test_rates_are_scaled_together_where_calls_take_less_than_their_nodes() -> None:
    own = Efficiency(of_peak=0.5, of_memory=0.25)
    met = timed("fp16", {"fp16": own}, (50.0, 80.0), (500.0, 800.0), (5000.0, 8000.0)).efficiencies["fp16"]["gemm"]
    assert met.of_peak is not None and met.of_memory is not None and met.of_bandwidth is None
    assert met.of_peak == pytest.approx(0.5 / 0.8, rel=0.01)
    assert met.of_memory == pytest.approx(met.of_peak / 2)


def test_rates_stay_where_calls_say_nothing_of_them() -> None:
    """The longer one took less: no factor fits."""
    met = timed("fp32", {"fp32": Efficiency(of_peak=1.0)}, (1e5, 100.0), (1e6, 50.0))
    assert met.efficiencies["fp32"]["gemm"].of_peak == 1.0


def test_a_precision_without_efficiencies_of_its_own_has_a_cost_per_call_all_the_same() -> None:
    met = timed("int8", {"fp32": Efficiency(of_peak=1.0)}, (100.0, 130.0), (1000.0, 1030.0))
    assert met.call_overhead_us["int8"] == pytest.approx(30.0)
    assert met.efficiencies["fp32"]["gemm"].of_peak == 1.0


def test_operators_are_scaled_as_their_classes_are() -> None:
    before = calibrated({"fp16": {"gemm": Efficiency(of_peak=0.5)}}, {"fp16": {"MatMul": Efficiency(of_peak=0.25)}})
    calls = [CallSample("fp16", (compute(us),), 0.8 * 4 * us, 0.0) for us in (50.0, 500.0, 5000.0)]
    met = meet_calls(before, calls, {"fp16": RATES})
    assert met.operators["fp16"]["MatMul"].of_peak == pytest.approx(0.25 / 0.8, rel=0.01)
    assert met.efficiencies["fp16"]["gemm"].of_peak == pytest.approx(0.5 / 0.8, rel=0.01)


def test_an_operator_seen_at_small_sizes_only_is_not_stretched_to_large_ones() -> None:
    """Four tiny sums whose times are noise beside one class that is known: what they cost per byte is the class's."""

    def sample(key: str, moved: float, us: float, call_us: float) -> NodeSample:
        work = NodeWork("elementwise", key, 0.0, 0.0, moved)
        return NodeSample("fp32", work, amounts(work, 0.0, RATES.cache_bytes), us, call_us)

    known = [sample("Add", moved, 1.0 + moved / 20e3, 100.0) for moved in (1e3, 1e4, 1e5, 1e6)]
    tiny = [sample("Sub", moved, us, 1e6) for moved, us in ((4, 0.5), (8, 2.0), (12, 0.5), (16, 3.0))]
    _, operators = fit_operators([*known, *tiny], {"fp32": RATES}, 1.0)
    large = NodeWork("elementwise", "Sub", 0.0, 0.0, 1e6)
    took = node_us(amounts(large, 0.0, RATES.cache_bytes), operators["fp32"]["Sub"], RATES)
    assert took == pytest.approx(51.0, rel=0.1)


def test_int8_weights_that_were_never_read_from_memory_take_as_much_more_there_as_fp32s() -> None:
    near = [*samples_of(TRUE, 0.0), *samples_of(TRUE, 1.0)]
    slower = Efficiency(overhead_us=4.0, of_peak=0.8, of_bandwidth=1.0)
    classes, _ = fit_operators([*near, *samples_of(slower, 0.0, "int8")], {"fp32": RATES, "int8": RATES}, 2.0)
    # FP32: 1/3 of the bandwidth's time from the cache, 2/3 from memory; INT8 takes one third more than its own 1
    assert classes["int8"]["gemm"].of_memory == pytest.approx(1 / (1 + 1 / 3), rel=0.02)


def test_nodes_that_are_often_there_count_as_often_in_a_call() -> None:
    before = calibrated({"fp32": {"gemm": Efficiency(of_peak=1.0)}}, {})
    calls = [CallSample("fp32", (compute(us),), 3 * us, 0.0, (3,)) for us in (50.0, 500.0, 5000.0)]
    assert meet_calls(before, calls, {"fp32": RATES}).efficiencies["fp32"]["gemm"].of_peak == pytest.approx(1.0)
