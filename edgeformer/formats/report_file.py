"""Reading a report that may come from anywhere: another machine, a browser, a stranger."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.report import Report
from edgeformer.formats.workspace import parse_manifest, read_json_bytes

_LARGEST = 2**63 - 1


def read_report(path: Path) -> Report:
    """Read and check a report.

    Raises:
        ArtifactError: missing, larger than any report, not JSON, not what a report must hold, or with numbers that are
            none (NaN, infinity) or larger than any that is measured.
    """
    return parse_report(path, read_json_bytes(path))


def parse_report(path: Path, content: bytes) -> Report:
    """A report that was read from ``path``. Raises ArtifactError as :func:`read_report`."""
    report = parse_manifest(Report, path, content)
    require_finite(report, path)
    return report


def require_finite(document: BaseModel, path: Path) -> None:
    """Raises ArtifactError for numbers that are none (NaN, infinity), or larger than any that is measured."""
    for place in _not_finite(document.model_dump()):
        raise ArtifactError(f"{path}: damaged: {place}: is no finite number that could be measured; make it again")


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
