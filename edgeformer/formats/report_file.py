"""Reading a report that may come from anywhere: another machine, a browser, a stranger; and its checksum."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import BundleManifest
from edgeformer.formats.report import Report
from edgeformer.formats.workspace import parse_manifest, read_json_bytes

_LARGEST = 2**63 - 1


def read_report(path: Path) -> Report:
    """Read and check a report.

    Raises:
        ArtifactError: missing, larger than any report, not JSON, not what a report must hold, with numbers that are
            none (NaN, infinity) or larger than any that is measured, or edited since it was written.
    """
    content = read_json_bytes(path)
    report = parse_manifest(Report, path, content)
    for place in _not_finite(report.model_dump()):
        raise ArtifactError(f"{path}: damaged: {place}: is no finite number that could be measured; make it again")
    if report.report_sha256 not in (None, _checksum(json.loads(content))):
        raise ArtifactError(
            f"{path}: edited since it was written: its content differs from its checksum report_sha256; measure again "
            "with edgeformer profile"
        )
    return report


def seal_report(report: Report) -> Report:
    """Return the report with its checksum."""
    return report.model_copy(update={"report_sha256": _checksum(report.model_dump(mode="json", by_alias=True))})


def _checksum(document: dict[str, Any]) -> str:
    """Return the sha256 of a report's JSON; spaces and the order of keys do not count."""
    content = {key: value for key, value in document.items() if key != "report_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_notes(path: Path, report: Report, manifest: BundleManifest | None) -> list[str]:
    """Return what the checksums leave open.

    Args:
        path: of the report.
        report: that was read from it.
        manifest: of a bundle whose artifacts are the measured ones; None: no bundle is given.
    """
    notes = []
    if report.report_sha256 is None:
        notes.append(f"{path.name} has no checksum (written by a page or an earlier version): edits cannot be detected")
    measured = report.subject.manifest_sha256 if report.subject is not None else None
    if manifest is not None and measured not in (None, manifest.manifest_sha256):
        notes.append(
            f"bundle.json has changed since {path.name} was measured; the measured artifacts have the same checksums"
        )
    return notes


def _not_finite(value: object, place: str = "") -> Iterator[str]:
    """Where numbers stand that cannot be compared or written as JSON."""
    if isinstance(value, int):
        if abs(value) > _LARGEST:
            yield place
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield place
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _not_finite(entry, f"{place}.{name}" if place else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, entry in enumerate(value):
            yield from _not_finite(entry, f"{place}.{index}" if place else str(index))
