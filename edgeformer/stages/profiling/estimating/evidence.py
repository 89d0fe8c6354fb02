"""Records of the estimator's error, and which of them cover the estimates for a device."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from importlib import resources

from edgeformer.formats.device import DeviceProfile, EstimateError, EstimateRecord
from edgeformer.formats.report import EstimateEvidence

RECORD_FILE = "record.json"
"""In this package; `python -m benchmarks.estimates` writes it from the measurements behind docs/estimator.md."""


@lru_cache(maxsize=1)
def shipped_record() -> EstimateRecord:
    """Read the record that ships with the package: calibrated estimates of left-out models on one CPU."""
    text = resources.files(__package__).joinpath(RECORD_FILE).read_text(encoding="utf-8")
    return EstimateRecord.model_validate_json(text)


def estimate_evidence(
    device: DeviceProfile, error: EstimateError | None, precisions: Collection[str]
) -> tuple[EstimateEvidence, ...]:
    """Return what is on record about estimates for a device, the nearest record first; empty if there are none.

    Args:
        device: whose rows are estimated.
        error: of the device's own calibration, or else of this host's, as ``known_error`` returns it.
        precisions: of the rows that are estimated.
    """
    if not precisions:
        return ()
    evidence = [] if error is None else [_of_calibration(device, error)]
    record, why_not = shipped_record(), None
    if device.kind != record.kind:
        why_not = "it is of a CPU"
    elif device.calibration is None:
        why_not = "its estimates come from a calibration on that machine, these from the peak rates of the profile"
    elif device.calibration.processor != record.processor:
        why_not = f"it is of another processor than {device.calibration.processor}"
    elif record.cores is not None and device.calibration.threads != record.cores:
        why_not = f"it is of {record.cores} cores, the calibration of {device.calibration.threads} threads"
    elif unchecked := sorted(set(precisions) - set(record.precisions)):
        why_not = f"it has {' and '.join(record.precisions)}, but these estimates are of {' and '.join(unchecked)} too"
    return (*evidence, EstimateEvidence(**record.model_dump(), applies=why_not is None, why_not=why_not))


def _of_calibration(device: DeviceProfile, error: EstimateError) -> EstimateEvidence:
    applies = device.calibration is not None and device.calibration.error == error
    kinds = {"cpu": "a CPU", "cuda": "a GPU"}
    other = f"it is of {kinds[error.kind]}" if error.kind != device.kind else "it is of another processor"
    return EstimateEvidence(
        source="the calibrated profile",
        kind=error.kind,
        processor=error.device,
        measured=error.created[:10],
        cases=error.cases,
        models=error.models,
        median_error=2**error.median_log2 - 1,
        worst_error=2**error.worst_log2 - 1,
        applies=applies,
        why_not=None if applies else other,
    )
