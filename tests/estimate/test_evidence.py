"""Reports state which record of the estimator's error covers their estimates, and which does not."""

from __future__ import annotations

import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.report import EstimateEvidence
from edgeformer.estimate import estimate
from edgeformer.estimate.estimate import estimate_evidence, shipped_record
from edgeformer.report.context import estimate_note
from tests.report.made_reports import estimated, made_report, made_row

RECORD = shipped_record()
OWN = EstimateError(
    kind="cpu", device="Fast 9000", cases=30, models=5, median_log2=0.1, worst_log2=0.3, created="2026-11-24T08:00"
)
PI, CARD, HOST = (load_profile(name) for name in ("raspberry-pi-5", "rtx4050", "host"))


@pytest.fixture(autouse=True)
def _record_of_this_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_FIT_CHANGED", RECORD.measured)


def calibrated(processor: str, error: EstimateError | None = None, threads: int = RECORD.cores or 1) -> DeviceProfile:
    base = Calibration(created="now", processor=processor, threads=threads, provider="p", efficiencies={}, error=error)
    return HOST.model_copy(update={"calibration": base})


def words(device: DeviceProfile, error: EstimateError | None = None, precisions: tuple[str, ...] = ("fp32",)) -> str:
    report = made_report(
        made_row(estimated(), "device"),
        device_title=device.title,
        estimated_for=device.kind,
        estimate_evidence=estimate_evidence(device, error, precisions),
    )
    return str(estimate_note(report))


def of_record() -> str:
    """The figures as they are read from the record: a newer one changes the test with it."""
    where = (
        f"{RECORD.cases} cases of {RECORD.models} models on {RECORD.processor}, {RECORD.cores} cores, {RECORD.measured}"
    )
    errors = f"median error of a time {RECORD.median_error:.1%}, worst {RECORD.worst_error:.1%}"
    return f"{RECORD.source} ({where}: {errors})"


def test_an_uncalibrated_cpu_is_told_of_the_record_and_why_it_does_not_apply() -> None:
    assert RECORD.cases > 200 and RECORD.source == "docs/estimator.md"
    assert words(PI) == (
        f"estimated, not measured; never checked on {PI.title}; the record of {of_record()} does not apply: its "
        "estimates come from a calibration on that machine, these from the peak rates of the profile"
    )


def test_a_card_is_told_that_no_gpu_was_ever_checked() -> None:
    assert words(CARD) == (
        f"estimated, not measured; never checked on a GPU; the record of {of_record()} does not apply: it is of a CPU"
    )


def test_a_calibration_that_was_checked_goes_before_the_shipped_record() -> None:
    assert words(calibrated("Fast 9000", OWN), OWN) == (
        "estimated, not measured; the estimator's error on record is that of the calibrated profile (30 cases of 5 "
        "models on Fast 9000, 2026-11-24: median error of a time 7.2%, worst 23.1%)"
    )


def test_the_check_of_this_hosts_calibration_says_nothing_of_another_device() -> None:
    for device, why in ((PI, "it is of another processor"), (CARD, "it is of a CPU")):
        assert f"2026-11-24: median error of a time 7.2%, worst 23.1%) does not apply: {why}; " in words(device, OWN)


def test_the_record_applies_to_a_calibration_on_a_processor_of_its_name_only() -> None:
    assert words(calibrated(RECORD.processor)).endswith(f"the estimator's error on record is that of {of_record()}")
    assert words(calibrated("Slow 100")).endswith("does not apply: it is of another processor than Slow 100")


def test_the_record_applies_to_as_many_cores_and_its_precisions_only() -> None:
    more_cores = words(calibrated(RECORD.processor, threads=64))
    assert more_cores.endswith(f"does not apply: it is of {RECORD.cores} cores, the calibration of 64 threads")
    of_record = calibrated(RECORD.processor)
    assert "does not apply" not in words(of_record, precisions=RECORD.precisions)
    for precision in ("fp16", "int4"):
        assert words(of_record, precisions=("fp32", precision)).endswith(
            f"does not apply: it has fp32 and int8, but these estimates are of {precision} too"
        )


def test_a_record_of_an_earlier_estimator_never_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_FIT_CHANGED", "2100-01-01")
    assert words(calibrated(RECORD.processor)).endswith("does not apply: it is of an earlier estimator")


def test_a_card_that_was_checked_has_its_own_record() -> None:
    on_card = OWN.model_copy(update={"kind": "cuda", "device": "RTX 4050"})
    base = calibrated("RTX 4050", on_card).calibration
    result = estimate_evidence(CARD.model_copy(update={"calibration": base}), on_card, {"fp32"})
    assert [(type(one), one.kind, one.applies) for one in result] == [
        (EstimateEvidence, "cuda", True),
        (EstimateEvidence, "cpu", False),
    ]
