"""Which facts of a profile become which rate, and whose calibration may be used."""

from __future__ import annotations

from typing import Any

import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, Fact, Peaks
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.estimate import rates as rates_module
from edgeformer.estimate.rates import Rates, known_error, rates_of, refused_calibration


def fact(value: Any) -> Any:
    return Fact(value=value, source="a test", verified=False)


PEAKS = Peaks(fp32=fact(1e11), fp16=fact(4e11), fp16_fp32_accumulate=fact(2e11), int8=fact(8e11))


def device(kind: str, **changes: Any) -> DeviceProfile:
    known = DeviceProfile(
        name="made-up", title="Made up", kind="cuda" if kind == "cuda" else "cpu", peaks=PEAKS,
        bandwidth_bytes_per_s=fact(2e10), cache_bytes=fact(2**20), launch_overhead_us=fact(5.0), cores=fact(4),
    )  # fmt: skip
    return known.model_copy(update=changes)


@pytest.mark.parametrize(
    ("kind", "precision", "peak", "sure"),
    [
        ("cpu", "fp32", 1e11, 1e11),
        ("cpu", "fp16", 1e11, 1e11),  # computed in FP32
        ("cpu", "int8", 8e11, 1e11),
        ("cuda", "fp32", 1e11, 1e11),
        ("cuda", "fp16", 4e11, 2e11),  # GeForce cards halve it where products are summed in FP32
        ("cuda", "int8", 8e11, 1e11),  # or widened
    ],
)
def test_rates_of_a_precision(kind: str, precision: str, peak: float, sure: float) -> None:
    assert rates_of(device(kind), precision) == Rates(
        peak=peak, sure_peak=sure, vector_peak=1e11, bandwidth=2e10, cache_bytes=2**20, overhead_us=5.0, cores=4,
        gpu=kind == "cuda",
    )  # fmt: skip


def test_a_processor_without_int8_instructions_is_at_best_twice_as_fast_with_it() -> None:
    found = rates_of(device("cpu", peaks=PEAKS.model_copy(update={"int8": None})), "int8")
    assert (found.peak, found.sure_peak) == (2e11, 1e11)


def test_what_may_be_unknown() -> None:
    found = rates_of(device("cpu", cache_bytes=None, cores=None), "fp32")
    assert (found.cache_bytes, found.cores) == (0, None)


@pytest.mark.parametrize("missing", ["bandwidth_bytes_per_s", "launch_overhead_us"])
def test_a_fact_that_is_needed_is_named_with_the_way_to_it(missing: str) -> None:
    with pytest.raises(EdgeformerError) as here:
        rates_of(device("cpu", **{missing: None}), "fp32")
    assert str(here.value) == f"device profile 'made-up' does not say {missing}; run edgeformer calibrate"
    for elsewhere in (device("cpu", match="Other", **{missing: None}), device("cuda", **{missing: None})):
        with pytest.raises(EdgeformerError) as absent:
            rates_of(elsewhere, "fp32")
        assert str(absent.value) == f"device profile 'made-up' does not say {missing}"


def test_a_peak_that_is_needed_is_named() -> None:
    with pytest.raises(EdgeformerError, match=r"'made-up' does not say peaks\.fp32"):
        rates_of(device("cpu", peaks=Peaks()), "fp32")
    with pytest.raises(EdgeformerError, match=r"does not say peaks\.int8$"):
        rates_of(device("cuda", peaks=PEAKS.model_copy(update={"int8": None})), "int8")


ERROR = EstimateError(kind="cpu", device="x", cases=1, median_log2=0.1, worst_log2=0.2, created="now")


def calibrated(processor: str, error: EstimateError | None = ERROR, **changes: Any) -> DeviceProfile:
    known = Calibration(created="now", processor=processor, threads=1, provider="p", efficiencies={}, error=error)
    return device("cpu", calibration=known, **changes)


def test_a_calibration_is_of_the_processor_that_the_profile_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "cpu_name", lambda: "Fast 9000")
    assert refused_calibration(device("cpu")) is None
    assert refused_calibration(calibrated("The FAST 9000 with graphics")) is None
    assert refused_calibration(calibrated("Slow 100", match="slow")) is None
    refused = refused_calibration(calibrated("Slow 100"))
    assert refused is not None and "(Slow 100, not Fast 9000)" in refused
    assert "not Other" in str(refused_calibration(calibrated("Fast 9000", match="Other")))


@pytest.mark.parametrize(
    ("noted", "says"),
    [
        ({}, None),
        (
            {"instructions": ("avx2", "avx512f"), "stated_cache_bytes": 2**25, "versions": {"onnxruntime": "1.23.2"}},
            None,
        ),
        ({"instructions": ("avx2",)}, "for the instructions avx2, and here are avx512f, avx2"),
        ({"stated_cache_bytes": 2**30}, "beside a cache of 1.00 GiB, and here are 32.0 MiB"),
        ({"versions": {"onnxruntime": "1.22.1"}}, "with ONNX Runtime 1.22, and 1.23 is installed here"),
    ],
)
def test_a_processor_of_the_same_name_may_be_another_one(
    noted: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates_module, "cpu_name", lambda: "Xeon Processor")
    monkeypatch.setattr(rates_module, "kernel_flags", lambda: ("avx512f", "avx2"))
    monkeypatch.setattr(rates_module, "stated_cache_bytes", lambda: 2**25)
    monkeypatch.setattr(rates_module, "library_versions", lambda: {"onnxruntime": "1.23.0"})

    def refused(**changes: Any) -> str | None:
        target = calibrated("Xeon Processor", **changes)
        assert target.calibration is not None
        known = target.calibration.model_copy(update=noted)
        return refused_calibration(target.model_copy(update={"calibration": known}))

    if says is None:
        assert refused() is None
    else:
        assert refused() == f"device profile 'made-up' was calibrated {says}; run edgeformer calibrate"
    assert refused(match="Xeon") is None, "of another machine, which is as it was"


def test_a_known_error_is_the_devices_own_or_this_hosts_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates_module, "cpu_name", lambda: "Fast 9000")
    own, host = calibrated("Slow 100", match="Slow"), calibrated("Fast 9000", ERROR.model_copy(update={"cases": 2}))
    elsewhere = calibrated("Third")
    assert known_error(own, host) == ERROR
    assert known_error(device("cuda"), host) == ERROR.model_copy(update={"cases": 2})
    assert known_error(elsewhere, host) == ERROR.model_copy(update={"cases": 2})
    assert known_error(device("cuda"), elsewhere) is None
    assert known_error(device("cuda")) is None
