"""Time and memory of nodes against sums made by hand: the models that stand behind every estimate."""

from dataclasses import replace
from typing import Any

import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency, EstimateError
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, EngineBuild
from edgeformer.artifacts.report import Memory
from edgeformer.estimate import roofline
from edgeformer.estimate.operators import NodeWork
from tests.estimate.test_estimate import device, fact

MIB = 2**20
CPU = roofline.Rates(peak=100e9, vector_peak=10e9, bandwidth=20e9, cache_bytes=MIB, overhead_us=3.0)
HELD, HALF_HELD, TOO_LARGE = 0.25 * MIB, 0.25 * MIB * 5**0.5, 1.25 * MIB
"""Weights of which the cache holds all, half and nothing."""

PRODUCT = NodeWork("gemm", "MatMul", 9e6, 8e3, 4e3)
WEIGHTS = NodeWork("gemm", "MatMul", 1.0, 7.2e6, 0.0)
MOVED = NodeWork("elementwise", "Add", 9e4, 0.0, 7.2e6)
SHAPES = NodeWork("layout", "Shape", 0.0, 0.0, 64.0, host_only=True)
ERROR = EstimateError(kind="cpu", device="x", cases=1, median_log2=0.1, worst_log2=0.2, created="now")
CONVOLUTION = replace(PRODUCT, operator="Conv", trust="convolution")
ATTENTION = NodeWork("attention", "product of activations", 9e6, 0.0, 4e3)


def test_the_share_beyond_the_cache_grows_with_the_weights() -> None:
    sizes = [1, 8, 12, 16, 32, 40, 100]
    shares = [roofline.beyond_cache(size * MIB, 32 * MIB) for size in sizes]
    assert shares == sorted(shares)
    assert shares[:2] == [0.0, 0.0] and shares[-2:] == [1.0, 1.0]
    assert 0.3 < shares[3] < 0.6
    assert roofline.beyond_cache(1, 0) == 1.0


def test_a_calibrated_node_takes_its_overhead_and_what_each_rate_takes() -> None:
    work = NodeWork("gemm", "MatMul", operations=1e6, weight_bytes=1e4, moved_bytes=2e4)
    full = Efficiency(overhead_us=4.0, of_peak=0.5, of_bandwidth=2.0, of_memory=0.25)
    assert roofline.node_us(work, 1e4, full, CPU) == pytest.approx(4.0 + 20.0 + 0.5 + 2.0, rel=1e-12)
    # without a share of its own, memory is as fast as what a cache can hold
    assert roofline.node_us(work, 1e4, full.model_copy(update={"of_memory": None}), CPU) == pytest.approx(
        24.0 + 0.5 + 0.25
    )
    assert roofline.node_us(work, 1e4, full.model_copy(update={"of_peak": None}), CPU) == pytest.approx(4.0 + 0.5 + 2.0)
    assert roofline.node_us(work, 1e4, full.model_copy(update={"of_bandwidth": None}), CPU) == pytest.approx(24.0 + 2.0)
    assert roofline.node_us(work, 1e4, Efficiency(overhead_us=4.0), CPU) == 4.0


def calibration(**changes: Any) -> Calibration:
    base = Calibration(
        created="now", processor="x", threads=1, provider="p",
        efficiencies={"fp32": {"gemm": Efficiency(overhead_us=10.0), "layout": Efficiency(overhead_us=1.0)}},
        operators={"fp32": {"MatMul": Efficiency(overhead_us=20.0)}}, call_overhead_us={"fp32": 50.0},
    )  # fmt: skip
    return base.model_copy(update=changes)


def test_an_operators_own_efficiency_goes_before_its_classs_and_that_before_fp32s() -> None:
    gemm = NodeWork("gemm", "Gemm", 1.0, 1.0, 1.0)
    half = calibration(efficiencies={**calibration().efficiencies, "fp16": {"layout": Efficiency(overhead_us=2.0)}})
    for work, precision, result, expected in (
        (PRODUCT, "fp32", half, 20.0),
        (gemm, "fp32", half, 10.0),
        (PRODUCT, "fp16", half, 10.0),  # FP32's operators are not FP16's
        (SHAPES, "fp16", half, 2.0),
        (SHAPES, "int8", half, 1.0),
    ):
        assert roofline.calibrated_nodes_us([work], CPU, result, precision, 0.0) == [pytest.approx(expected, abs=1e-3)]
    with pytest.raises(EdgeformerError, match="no rate for the elementwise operators"):
        roofline.calibrated_nodes_us([MOVED], CPU, half, "fp32", 0.0)


@pytest.mark.parametrize(("beyond", "us"), [(HELD, 2.5), (HALF_HELD, 6.25), (TOO_LARGE, 10.0)])
def test_a_calibrated_call_reads_from_memory_what_the_cache_does_not_hold(beyond: float, us: float) -> None:
    """0.1 MB of weights at 20 GB/s: twice as fast from the cache, half as fast from memory."""
    fitted = calibration(operators={}, efficiencies={"fp32": {"gemm": Efficiency(of_bandwidth=2.0, of_memory=0.5)}})
    works = [NodeWork("gemm", "MatMul", 0.0, 1e5, 0.0)]
    assert roofline.calibrated_nodes_us(works, CPU, fitted, "fp32", beyond) == pytest.approx([us])


@pytest.mark.parametrize(
    ("work", "weights", "expected"),
    [
        # 9 MFLOP at 100 GFLOP/s; 12 KB at 20 GB/s from the cache
        (PRODUCT, HELD, {"products": 0.09, "cache": 0.0006}),
        (CONVOLUTION, HELD, {"convolutions": 0.09, "cache": 0.0006}),
        (replace(CONVOLUTION, trust="narrow"), HELD, {"depthwise": 0.9, "cache": 0.0006}),  # 10 GFLOP/s
        (ATTENTION, HELD, {"attention": 0.09, "cache": 0.0002}),
        (replace(ATTENTION, reduces=True), HELD, {"cache": 0.0002}),  # a softmax is no product
        (WEIGHTS, HELD, {"products": 1e-8, "cache": 0.36}),
        (WEIGHTS, HALF_HELD, {"products": 1e-8, "cache": 0.18, "memory": 0.18}),
        (WEIGHTS, TOO_LARGE, {"products": 1e-8, "memory": 0.36}),
        (MOVED, HELD, {"memory": 0.36}),  # more than the cache holds
    ],
)
def test_work_takes_its_time_at_the_rates_of_the_device(work, weights, expected):
    every = dict.fromkeys(roofline.WORK, 0.0) | {"kernels": 0.003} | expected
    found = roofline.work_ms([work], CPU, weights, fused=False)
    assert dict(zip(roofline.WORK, found, strict=True)) == pytest.approx(every, rel=1e-9)
    assert roofline.work_ms([work, work, SHAPES], CPU, weights, fused=False) == pytest.approx([2 * ms for ms in found])


def test_a_compiled_graph_launches_and_moves_less() -> None:
    moved = replace(MOVED, moved_bytes=2e5)
    works = [PRODUCT, moved, replace(moved, moved_bytes=3e5), PRODUCT]
    single, fused = (
        dict(zip(roofline.WORK, roofline.work_ms(works, CPU, HELD, fused=fused), strict=True))
        for fused in (False, True)
    )
    assert (single["kernels"], fused["kernels"]) == pytest.approx((4 * 0.003, 3 * 0.003))
    # 24 KB of products and 500 KB of the chain, of which the larger member's 300 KB remain; 20 GB/s
    assert single["cache"] + single["memory"] == pytest.approx(524e3 / 20e6)
    assert fused["cache"] + fused["memory"] == pytest.approx(324e3 / 20e6)
    assert single["products"] == fused["products"]


def graph(**changes: Any) -> ArtifactManifest:
    base = ArtifactManifest(id="a", file="a", format="onnx", precision="fp32", status="built", size_bytes=3 * MIB)
    return base.model_copy(update=changes)


def engine(**changes: Any) -> ArtifactManifest:
    sizes = {"activation_bytes": 4 * MIB, "weight_bytes": 2 * MIB, **changes}
    base = EngineBuild(builder="b", seconds=1, checked_by="size", graph_bytes=1, shapes={})
    return graph(engine=base.model_copy(update=sizes))


def profile(kind: str, context: int | None) -> DeviceProfile:
    base = DeviceProfile(name="made-up", title="Made up", kind="cuda" if kind == "cuda" else "cpu")
    return base.model_copy(update={"context_bytes": None if context is None else fact(context)})


def memory(artifact: ArtifactManifest, device: DeviceProfile) -> Memory:
    return roofline.estimate_memory(artifact, device, weights=10 * MIB, step_bytes=3 * MIB, feed_bytes=MIB)


GPU_DEVICE = profile("cuda", 100 * MIB)


@pytest.mark.parametrize(
    ("artifact", "device", "low", "high"),
    [
        (graph(), profile("cpu", 500 * MIB), 10 + 3 + 2, 3.2 * 10 + 2 * (4 * 3 + 2) + 48),
        (graph(), profile("cpu", None), 10 + 3 + 2, 3.2 * 10 + 2 * (4 * 3 + 2) + 48),
        (graph(), GPU_DEVICE, 70 + 10 + 3 + 2, 150 + 2 * (10 + 4 * 3 + 2) + 32),
        # An engine's builder says more; no more is alive than it ever needs.
        (engine(), GPU_DEVICE, 70 + 2 + 3 + 2, 150 + 3 + 4 + 2 + 32),
        (engine(activation_bytes=MIB), GPU_DEVICE, 70 + 2 + 1 + 2, 150 + 3 + 1 + 2 + 32),
        (engine(weight_bytes=None).model_copy(update={"size_bytes": None}), GPU_DEVICE, 70 + 10 + 3 + 2,
         150 + 10 + 4 + 2 + 32),
        (engine(activation_bytes=None), GPU_DEVICE, 70 + 10 + 3 + 2, 150 + 2 * (10 + 4 * 3 + 2) + 32),
    ],
)  # fmt: skip
def test_memory(artifact: ArtifactManifest, device: DeviceProfile, low: float, high: float) -> None:
    """On a CPU copies of the weights and what is alive; on a GPU the context, too."""
    result = memory(artifact, device)
    assert result.low == pytest.approx(low * MIB, abs=1) and result.high == pytest.approx(high * MIB, abs=1)
    assert result.peak == pytest.approx(MIB * (low * high) ** 0.5, abs=2)
    assert result.status == "estimated" and ("CUDA context" in str(result.method)) == (device.kind == "cuda")


@pytest.mark.parametrize(
    ("kind", "precision", "peak"),
    [
        ("cpu", "fp32", 1e11), ("cpu", "int8", 8e11), ("cpu", "fp16", 1e11),  # computed in FP32
        ("cuda", "fp32", 1e11), ("cuda", "int8", 8e11), ("cuda", "fp16", 4e11),
    ],
)  # fmt: skip
def test_rates_of_a_precision(kind: str, precision: str, peak: float) -> None:
    assert roofline.rates_of(device(kind), precision) == roofline.Rates(
        peak=peak, vector_peak=1e11, bandwidth=2e10, cache_bytes=2**18, overhead_us=5.0, cores=4, gpu=kind == "cuda"
    )


@pytest.mark.parametrize("missing", ["bandwidth_bytes_per_s", "launch_overhead_us"])
def test_a_fact_that_is_needed_is_named_with_the_way_to_it(missing: str) -> None:
    with pytest.raises(EdgeformerError) as host_error:
        roofline.rates_of(device("cpu", **{missing: None}), "fp32")
    assert str(host_error.value) == (
        f"the profile 'made-up' has no value for {missing}, which estimates need; run edgeformer calibrate"
    )
    for elsewhere in (device("cpu", match="Other", **{missing: None}), device("cuda", **{missing: None})):
        with pytest.raises(EdgeformerError) as absent:
            roofline.rates_of(elsewhere, "fp32")
        assert str(absent.value) == f"the profile 'made-up' has no value for {missing}, which estimates need"


def calibrated(processor: str, error: EstimateError | None = ERROR, **changes: Any) -> DeviceProfile:
    base = Calibration(created="now", processor=processor, threads=1, provider="p", efficiencies={}, error=error)
    return device("cpu", calibration=base, **changes)


def test_a_calibration_is_of_the_processor_that_the_profile_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "cpu_name", lambda: "Fast 9000")
    assert roofline.refused_calibration(device("cpu")) is None
    assert roofline.refused_calibration(calibrated("The FAST 9000 with graphics")) is None
    assert roofline.refused_calibration(calibrated("Slow 100", match="slow")) is None
    refused = roofline.refused_calibration(calibrated("Slow 100"))
    assert refused is not None and "(Slow 100, not Fast 9000)" in refused
    assert "not Other" in str(roofline.refused_calibration(calibrated("Fast 9000", match="Other")))


@pytest.mark.parametrize(
    ("noted", "says"),
    [
        ({}, None),
        (
            {"instructions": ("avx2", "avx512f"), "stated_cache_bytes": 2**25, "versions": {"onnxruntime": "1.23.2"}},
            None,
        ),
        ({"instructions": ("avx2",)}, "instructions avx2 (this host: avx2, avx512f)"),
        ({"stated_cache_bytes": 2**30}, "cache 1.00 GiB (this host: 32.0 MiB)"),
        ({"versions": {"onnxruntime": "1.22.1"}}, "ONNX Runtime 1.22 (this host: 1.23)"),
    ],
)
def test_a_processor_of_the_same_name_may_be_another_one(noted, says, monkeypatch):
    monkeypatch.setattr(roofline, "cpu_name", lambda: "Xeon Processor")
    monkeypatch.setattr(roofline, "kernel_flags", lambda: ("avx512f", "avx2"))
    monkeypatch.setattr(roofline, "stated_cache_bytes", lambda: 2**25)
    monkeypatch.setattr(roofline, "library_versions", lambda: {"onnxruntime": "1.23.0"})

    def refused(**changes: Any) -> str | None:
        target = calibrated("Xeon Processor", **changes)
        base = target.calibration.model_copy(update=noted)
        return roofline.refused_calibration(target.model_copy(update={"calibration": base}))

    if says is None:
        assert refused() is None
    else:
        assert refused() == f"the profile 'made-up' was calibrated with {says}; run edgeformer calibrate again"
    assert refused(match="Xeon") is None, "of another machine, which is as it was"


def test_a_known_error_is_the_devices_own_or_this_hosts_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "cpu_name", lambda: "Fast 9000")
    other, host = calibrated("Slow 100", match="Slow"), calibrated("Fast 9000", ERROR.model_copy(update={"cases": 2}))
    elsewhere = calibrated("Third")
    assert roofline.known_error(other, host) == ERROR
    assert roofline.known_error(device("cuda"), host) == ERROR.model_copy(update={"cases": 2})
    assert roofline.known_error(elsewhere, host) == ERROR.model_copy(update={"cases": 2})
    assert roofline.known_error(device("cuda"), elsewhere) is None
    assert roofline.known_error(device("cuda")) is None
