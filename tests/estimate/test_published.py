"""The record of published times: its size, what it says of a setting, and the times beside an estimate."""

import math
from importlib import resources

import pytest

from edgeformer import estimate
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.estimate.published import Errors, PublishedRecord, Setting, phase_of, published_record
from edgeformer.estimate.roofline import WORK
from edgeformer.report.sentences import published_sentence

ERRORS = Errors(factor=2.0, rows=30, sources=3, median_error=0.1, worst_error=2.0, within=0.9)
SETTING = Setting("cpu", "pi", "onnxruntime", "fp32", "call")
RECORD = PublishedRecord(
    created="2026-11-29", tf32=("onnxruntime",), devices={"pi": ERRORS, "rare": ERRORS.model_copy(update={"rows": 3})},
    effects={
        "kind cpu: products": math.log(2.0), "runtime cpu onnxruntime: products": math.log(3.0),
        "precision cpu onnxruntime fp32: memory": math.log(5.0), "device pi": math.log(7.0),
        "phase cpu onnxruntime decode": math.log(11.0),
    },
    errors={
        "device pi onnxruntime fp32 call": ERRORS.model_copy(update={"factor": 1.5}),
        "device pi litert fp32 call": ERRORS.model_copy(update={"factor": 1.4, "rows": 6}),
        "known cpu onnxruntime": ERRORS.model_copy(update={"factor": 1.7}),
        "known cpu": ERRORS.model_copy(update={"factor": 2.5}),
        "other cpu onnxruntime": ERRORS.model_copy(update={"factor": 3.0, "rows": 10}),
        "other cpu": ERRORS.model_copy(update={"factor": 4.0, "rows": 99}),
    },
    names=("pi", "onnxruntime", "litert", "small", "large", "a page"),
    rows=(
        (0, 1, "fp32", "call", 3, 1, 224, 10.0, 1.0, 5), (0, 1, "fp32", "call", 4, 1, 224, 90.0, 9.0, 5),
        (0, 2, "fp32", "call", 3, 1, 224, 8.0, 1.0, 5), (0, 1, "int8", "call", 3, 1, 224, 4.0, 1.0, 5),
        (1, 1, "fp32", "call", 3, 1, 224, 1.0, 1.0, 5),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "work", "expected"),
    [
        ("steady", (1, 5, 5, 1, 0, 9, 9), "call"),
        ("steady", (1, 5, 0, 3, 3, 9, 9), "convolutions"),
        ("prefill", (1, 0, 0, 3, 3, 9, 9), "prefill"),
        ("decode", (1, 0, 0, 0, 0, 9, 9), "decode"),
    ],
)
def test_calls_of_convolutional_networks_have_errors_of_their_own(phase, work, expected):
    assert phase_of(phase, work) == expected


def test_factors_and_nearest_times_of_a_setting() -> None:
    factors = dict(zip(WORK, RECORD.factors(SETTING), strict=True))
    assert factors["products"] == pytest.approx(2 * 3 * 7) and factors["memory"] == pytest.approx(5 * 7)
    assert factors["kernels"] == pytest.approx(7)
    assert RECORD.factors(SETTING._replace(phase="decode"))[0] == pytest.approx(7 * 11)
    assert RECORD.factors(Setting("cuda", "x", "tensorrt", "fp16", "call")) == [1.0] * len(WORK)
    assert RECORD.knows(SETTING) and not RECORD.knows(SETTING._replace(runtime="coreml"))
    with pytest.raises(KeyError):
        RECORD.errors_of(Setting("cuda", "t4", "tensorrt", "fp16", "call"))
    nearest = RECORD.nearest(SETTING, 1e9)
    assert [(time.model, time.runtime, time.precision) for time in nearest] == [
        ("small", "onnxruntime", "fp32"), ("small", "litert", "fp32"), ("small", "onnxruntime", "int8"),
    ]  # fmt: skip
    assert RECORD.nearest(SETTING, 8e9)[0].ms == 90.0
    assert RECORD.nearest(SETTING._replace(device="new"), 1e9) == ()


@pytest.mark.parametrize(
    ("changes", "factor", "rows", "subject"),
    [
        ({}, 1.5, 30, "of onnxruntime in fp32 on this device"),
        ({"runtime": "litert"}, 1.4, 6, "of litert in fp32 on this device"),
        # Of other settings: never narrower than the device's errors.
        ({"precision": "int8", "phase": "decode"}, 2.0, 30, "of onnxruntime on CPUs"),
        ({"runtime": "openvino"}, 2.5, 30, "on CPUs"),
        ({"device": "rare"}, 3.0, 10, "of onnxruntime on other CPUs"),
        ({"device": "new", "runtime": "litert"}, 4.0, 99, "on other CPUs"),
    ],
)
def test_errors_are_those_of_the_narrowest_group(changes, factor, rows, subject):
    found, errors, measured = RECORD.errors_of(SETTING._replace(**changes))
    assert (found, errors.rows, measured) == (factor, rows, subject)


def test_the_shipped_record_is_small_and_knows_the_shipped_devices() -> None:
    assert (resources.files(estimate) / "published.json").stat().st_size <= 200_000
    record = published_record()
    assert sum(errors.rows for errors in record.devices.values()) == len(record.rows) > 2000
    assert record.devices.keys() <= {*shipped_names("profiles")}
    for kind in ("cpu", "cuda"):
        assert record.knows(Setting(kind, "", "onnxruntime", "fp32", "call"))


def test_an_estimate_says_what_its_range_rests_on() -> None:
    pi, apple = load_profile("raspberry-pi-5"), load_profile("apple-m4")
    work = [1.0] * len(WORK)
    setting = Setting("cpu", pi.name, "onnxruntime", "fp32", "convolutions")
    estimated = published_record().estimate_ms(setting, work, 1e9)
    record = published_record()
    factor, errors, subject = record.errors_of(setting)
    assert estimated.p50 == pytest.approx(sum(record.factors(setting)))
    assert estimated.p50 / estimated.low == pytest.approx(factor)
    assert estimated.high / estimated.p50 == pytest.approx(factor)
    assert subject == "of onnxruntime in fp32 on this device" and len(estimated.check.nearest) == 3
    assert published_sentence(estimated.check) == (
        f"checked against {errors.rows} published measurements {subject} ({errors.sources} sources): median error "
        f"{errors.median_error:.0%}, {errors.within:.0%} within the range"
    )
    unknown = published_record().estimate_ms(setting._replace(device=apple.name), work, 1e9)
    assert unknown.check.subject == "of onnxruntime on other CPUs" and unknown.check.nearest == ()
