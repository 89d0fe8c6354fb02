"""`edgeformer claim`: a report, its bundle's checksums, the machine and its calibration become one file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from edgeformer.bundle import Bundle
from edgeformer.formats.claim import Claim, Environment
from edgeformer.formats.claim_file import BUNDLE_FOLDER, REPORT_MEMBER, ClaimFile, write_claim
from edgeformer.formats.data_config import NAME_PATTERN
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.documents import load_profile
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.report import Report, Row
from edgeformer.formats.report_file import parse_report
from edgeformer.formats.workspace import BUNDLE_FILE, read_json_bytes
from edgeformer.machine.capability import kernel_flags
from edgeformer.machine.host import code_version, describe_host, now
from edgeformer.stages.profiling.consistency import require_consistent
from edgeformer.stages.profiling.gating.gate import named_baseline

SUFFIX = ".claim.zip"


def make_claim(
    path: Path, output: Path | None, profiles: Path, *, whole: bool, bundle: Bundle | None = None
) -> ClaimFile:
    """Pack a report into a claim.

    Args:
        path: of the report.
        output: the claim's file; None: beside the report.
        profiles: folder of the user's own device profiles, where the calibrated one is looked for.
        whole: put all files of the bundle into it, not its manifest alone.
        bundle: that was measured; None: where the report says that it lay. It must be what it was.

    Raises:
        ArtifactError: the report is damaged, contradicts itself, holds nothing that was measured, or is of an earlier
            version; its bundle is not there, or is not what was measured.
        RecipeError: the calibrated profile is damaged.
    """
    content = read_json_bytes(path)
    report = parse_report(path, content)
    bundle = bundle or named_baseline(path)
    require_consistent(path, report, bundle.manifest)
    measured = measured_rows(report)
    if not measured:
        raise ArtifactError(f"{path}: holds no row that was measured, so it claims nothing; profile on the device")
    for name in dict.fromkeys(row.artifact for row in measured):
        bundle.check(bundle.artifact(name))
    members: dict[str, bytes | Path] = {REPORT_MEMBER: content}
    members |= {BUNDLE_FOLDER + name: bundle.folder / name for name in _files(bundle, whole)}
    claim = Claim(
        created=now(),
        run=report.run,
        device=report.device,
        members={},
        whole_bundle=whole,
        environment=_environment(report, measured),
        profile=_calibrated(report, profiles),
    )
    return write_claim(output or path.with_suffix(SUFFIX), claim, members)


def measured_rows(report: Report) -> list[Row]:
    """The rows that can be measured again: a cold start is one call, which nobody can have again."""
    rows = (row for row in report.rows if row.where == "host" and row.phase != "cold")
    return [row for row in rows if row.latency_ms.status == "measured"]


def environment_of(report: Report, measured: list[Row]) -> Environment:
    """What the report itself says of the machine; ``measured``: its rows that can be measured again."""
    return Environment(
        host=report.host,
        threads=tuple(sorted({row.threads for row in measured if row.threads is not None})),
        power=_noted(measured, "power"),
        governor=_noted(measured, "governor"),
    )


def _environment(report: Report, measured: list[Row]) -> Environment:
    found = environment_of(report, measured)
    here = describe_host()
    if any(report.host.get(name) != value for name, value in here.items()):
        return found  # measured elsewhere, or before the system changed: nobody asked that machine
    return found.model_copy(update={"cpu_flags": kernel_flags(), "code_version": code_version()})


def _noted(rows: list[Row], name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(row.conditions[name]) for row in rows if name in row.conditions))


def _files(bundle: Bundle, whole: bool) -> Iterator[str]:
    """Names of what is packed. Raises ArtifactError where one is missing or changed."""
    yield BUNDLE_FILE
    for name in sorted(bundle.contents.checksums) if whole else ():
        bundle.contents.intact(name, f"the claim packs {name}")
        yield name


def _calibrated(report: Report, profiles: Path) -> DeviceProfile | None:
    """The user's calibrated profile of the machine that was measured; None: there is none."""
    for name in dict.fromkeys((report.device, "host")):
        path = profiles / f"{name}.yaml"
        if re.fullmatch(NAME_PATTERN, name) is None or not path.is_file():
            continue
        profile = load_profile(str(path))
        if is_of(profile, report):
            return profile
    return None


def is_of(profile: DeviceProfile, report: Report) -> bool:
    """Whether a profile was calibrated, or checked, on the machine that the report was measured on."""
    machine = (report.host.get("cpu"), report.host.get("gpu"))
    return profile.calibration is not None and profile.calibration.processor in machine
