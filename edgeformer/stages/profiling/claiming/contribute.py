"""A claim's facts as a device profile: what somebody measured on such a machine, and whether another one agrees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from edgeformer.formats.claim import ClaimVerification
from edgeformer.formats.data_config import NAME_PATTERN
from edgeformer.formats.device import DeviceProfile, Fact
from edgeformer.formats.documents import save_profile
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.report import Report
from edgeformer.formats.workspace import require_writable
from edgeformer.stages.profiling.claiming.check import OpenedClaim

_OWN_NAMES = ("host",)
_COMMENT = """\
# Written by `edgeformer verify-claim --write-profile` from a claim (sha256 {sha256}).
# {confirmed} of its {cases} measured times hold on a second machine of this kind. A fact is verified where the claimant
# measured it on the device, and such times were measured again.
"""


def require_free(path: Path) -> None:
    """Raises InputError for a file that a profile cannot be written to: asked before minutes of measuring."""
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--write-profile {path}: a profile's file ends in .yaml")
    if re.fullmatch(NAME_PATTERN, path.stem) is None or path.stem in _OWN_NAMES:
        raise InputError(
            f"--write-profile {path}: the profile is called as its file is: use letters, digits, '.', '_' and '-', "
            f"and none of {', '.join(_OWN_NAMES)}"
        )
    if path.exists():
        raise InputError(f"--write-profile {path}: exists already; choose another file")
    require_writable("--write-profile", path)


def write_contribution(opened: OpenedClaim, found: ClaimVerification, path: Path) -> DeviceProfile:
    """Write the profile that a claim gives.

    Args:
        opened: the claim.
        found: what this machine says of it.
        path: of the new file, by which the profile is called.

    Raises:
        InputError: a time of the claim is contradicted.
        ArtifactError: its report names no usable profile.
    """
    contradicted = sum(case.status == "contradicted" for case in found.cases)
    if contradicted:
        raise InputError(f"--write-profile {path}: not written: {contradicted} of the claim's times do not hold here")
    confirmed = sum(case.status == "confirmed" for case in found.cases)
    profile = _contributed(opened, found, path.stem, confirmed)
    save_profile(profile, path, _COMMENT.format(sha256=found.sha256, confirmed=confirmed, cases=len(found.cases)))
    return profile


def _contributed(opened: OpenedClaim, found: ClaimVerification, name: str, confirmed: int) -> DeviceProfile:
    report, base = opened.report, opened.claim.profile or _used(opened.report, opened.file.path)
    suffix = f"claim {found.sha256[:12]}"
    if confirmed:
        suffix += f", of which {confirmed} of {len(found.cases)} times hold on another run on {found.created[:10]}"
    else:
        suffix += ", of which nothing was measured again so far"

    def told(fact: Fact[Any]) -> Fact[Any]:
        if not fact.verified:
            return fact  # from a data sheet, or assumed: nobody claims to have measured it
        return fact.model_copy(update={"source": f"{fact.source}; {suffix}", "verified": confirmed > 0})

    def measured(value: int, what: str) -> Fact[Any]:
        return Fact[Any](value=value, source=f"{what}; {suffix}", verified=confirmed > 0)

    changes: dict[str, Any] = {"name": name}
    for field in type(base).model_fields:
        if isinstance(fact := getattr(base, field), Fact):
            changes[field] = told(fact)
    peaks = {field: told(rate) for field in type(base.peaks).model_fields if (rate := getattr(base.peaks, field))}
    changes["peaks"] = base.peaks.model_copy(update=peaks)
    if base.kind == "cpu":
        cpu, memory = str(report.host.get("cpu")), report.host.get("memory_bytes")
        changes |= {"title": cpu, "match": cpu}
        if base.memory_bytes is None and isinstance(memory, int):
            changes["memory_bytes"] = measured(memory, "as the system says")
    return base.model_copy(update=changes)


def _used(report: Report, path: Path) -> DeviceProfile:
    """The profile that the report judged for, where it was measured on that device; else one without facts."""
    budgets = report.profile.get("budgets", {})
    whole = report.profile if report.on_target else {"name": "x", "title": "x", "kind": "cpu", "budgets": budgets}
    try:
        return DeviceProfile.model_validate(whole, strict=False)
    except ValidationError as error:
        raise ArtifactError(f"{path}: its report names no usable device profile: {error.errors()[0]['msg']}") from None
