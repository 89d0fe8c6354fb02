"""Reports state which record of the estimator's error covers their estimates, and which does not."""

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError
from edgeformer.artifacts.documents import load_profile
from edgeformer.estimate.estimate import estimate_evidence, shipped_record
from edgeformer.report.sentences import estimate_note
from tests.report.made_reports import estimated, made_report, made_row

RECORD = shipped_record()
OWN = EstimateError(
    kind="cpu", device="Fast 9000", cases=30, models=5, median_log2=0.1, worst_log2=0.3, created="2026-11-24T08:00"
)
PI, CARD, HOST = (load_profile(name) for name in ("raspberry-pi-5", "rtx4050", "host"))
UNKNOWN = "so their error is unknown (docs/explanation/estimating.md)"
OF_RECORD = (
    f"estimated, not measured; error of estimated times: median {RECORD.median_error:.1%}, largest "
    f"{RECORD.worst_error:.1%} ({RECORD.cases} cases of {RECORD.models} models on {RECORD.processor}, {RECORD.cores} "
    f"cores, {RECORD.measured}; {RECORD.source})"
)


def calibrated(processor: str, error: EstimateError | None = None, threads: int = RECORD.cores or 1) -> DeviceProfile:
    base = Calibration(created="now", processor=processor, threads=threads, provider="p", efficiencies={}, error=error)
    return HOST.model_copy(update={"calibration": base})


def note_of(device: DeviceProfile, error: EstimateError | None = None, *precisions: str) -> tuple[str, list[str]]:
    """The sentence of a report, and the reasons why records do not apply, which its JSON keeps."""
    facts = {"device_title": device.title, "estimated_for": device.kind}
    evidence = estimate_evidence(device, error, precisions or ("fp32",))
    report = made_report(made_row(estimated(), "device"), estimate_evidence=evidence, **facts)
    return str(estimate_note(report)), [str(record.why_not) for record in evidence if record.why_not]


def test_estimates_of_uncalibrated_devices_have_an_unknown_error() -> None:
    assert RECORD.cases > 200 and RECORD.source == "docs/results/estimates.md"
    uncalibrated = "its estimates come from a calibration on that machine, these from the peak rates of the profile"
    for device, checked, why in ((CARD, "a GPU", "it is of a CPU"), (PI, PI.title, uncalibrated)):
        sentence = f"estimated, not measured; estimates were never checked on {checked}, {UNKNOWN}"
        assert note_of(device) == (sentence, [why])


def test_a_checked_calibration_is_evidence_for_its_own_device() -> None:
    assert note_of(calibrated("Fast 9000", OWN), OWN)[0] == (
        "estimated, not measured; error of estimated times: median 7.2%, largest 23.1% (30 cases of 5 models on Fast "
        "9000, 2026-11-24; the calibrated profile)"
    )
    for device, why in ((PI, "it is of another processor"), (CARD, "it is of a CPU")):
        sentence, reasons = note_of(device, OWN)
        assert sentence.endswith(UNKNOWN) and reasons[0] == why
    on_card = OWN.model_copy(update={"kind": "cuda", "device": "RTX 4050"})
    base = calibrated("RTX 4050", on_card).calibration
    result = estimate_evidence(CARD.model_copy(update={"calibration": base}), on_card, {"fp32"})
    assert [(evidence.kind, evidence.applies) for evidence in result] == [("cuda", True), ("cpu", False)]


def test_the_record_applies_to_its_processor_cores_and_precisions_only() -> None:
    of_record_device, many = calibrated(RECORD.processor), calibrated(RECORD.processor, threads=64)
    assert note_of(of_record_device)[0] == note_of(of_record_device, None, *RECORD.precisions)[0] == OF_RECORD
    for device, precisions, why in (
        (calibrated("Slow 100"), ("fp32",), "it is of another processor than Slow 100"),
        (many, ("fp32",), f"it is of {RECORD.cores} cores, the calibration of 64 threads"),
        (of_record_device, ("fp32", "fp16"), "it has fp32 and int8, but these estimates are of fp16 too"),
    ):
        sentence, reasons = note_of(device, None, *precisions)
        assert sentence.endswith(UNKNOWN) and reasons == [why]
