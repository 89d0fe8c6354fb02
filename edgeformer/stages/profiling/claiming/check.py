"""`edgeformer verify-claim`: is a claim whole, does it agree with itself, and do its times hold on this machine?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.backends import provider_facts
from edgeformer.bundle import Bundle
from edgeformer.formats.claim import CaseStatus, Claim, ClaimCase, ClaimVerification
from edgeformer.formats.claim_file import BUNDLE_FOLDER, REPORT_MEMBER, ClaimFile
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.progress import Progress, Silent, bar
from edgeformer.formats.report import Report, Row
from edgeformer.formats.workspace import BUNDLE_FILE
from edgeformer.machine.host import now
from edgeformer.stages.profiling.claiming.comparing import (
    TIMES_ALONE,
    Machine,
    differences,
    not_measured_again,
    why_not_here,
)
from edgeformer.stages.profiling.claiming.make import environment_of, is_of, measured_rows
from edgeformer.stages.profiling.claiming.rounds import (
    Again,
    AgainRules,
    Holds,
    common_factor,
    measure_again,
    unknown_speed,
)
from edgeformer.stages.profiling.consistency import require_consistent
from edgeformer.stages.profiling.gating.pacing import PaceSpec
from edgeformer.stages.profiling.gating.timed import RULES
from edgeformer.stages.profiling.measure import MeasureRules
from edgeformer.stages.profiling.messages import CheckedArtifact, MeasureSpec
from edgeformer.stages.profiling.verdict import shown

_NO_BUNDLE = "the claim holds its bundle's checksums only; name the bundle itself with --bundle"

_SIGNATURE = "a checksum is no signature: it says that the file is whole, not who made it"


@dataclass(frozen=True)
class ClaimOptions:
    """What `verify-claim` is asked for.

    Attributes:
        again: tolerance, time and error of what is measured again.
        measure: measure at all; else the file alone is checked.
        rules: of the warm-up; None: the usual ones, cut off where a process does not settle.
    """

    again: AgainRules = field(default_factory=AgainRules)
    measure: bool = True
    rules: MeasureRules | None = None


@dataclass(frozen=True)
class OpenedClaim:
    """A claim that is whole and agrees with itself.

    Attributes:
        file: it.
        report: that it holds.
        inside: what it holds of the bundle: at least the manifest.
    """

    file: ClaimFile
    report: Report
    inside: Bundle

    @property
    def claim(self) -> Claim:
        """What its claim.json says."""
        return self.file.claim


def open_claim(path: Path, folder: Path) -> OpenedClaim:
    """Check all that a claim says of itself.

    Args:
        path: of the claim.
        folder: an empty one, into which its part of the bundle is unpacked.

    Raises:
        ArtifactError: it is damaged, its parts do not belong together, or numbers in it contradict each other.
    """
    file = ClaimFile.open(path)
    report = file.report()
    inside = Bundle.open(file.unpack(folder))
    require_consistent(path / REPORT_MEMBER, report, inside.manifest)
    for problem in _disagreements(file.claim, report, inside):
        raise ArtifactError(f"{path}: does not agree with itself: {problem}; make it again with edgeformer claim")
    return OpenedClaim(file, report, inside)


def _disagreements(claim: Claim, report: Report, inside: Bundle) -> Iterator[str]:
    told, measured = claim.environment, measured_rows(report)
    if not measured:
        yield "its report holds no measured row"
    for name in ("run", "device"):
        if getattr(claim, name) != getattr(report, name):
            yield f"{name} is {getattr(claim, name)!r}, and {getattr(report, name)!r} in its report"
    own = environment_of(report, measured)
    for name in ("host", "threads", "power", "governor"):
        if getattr(told, name) != getattr(own, name):
            yield f"its environment's {name} is not what its report says"
    if claim.profile is not None and not is_of(claim.profile, report):
        yield "its calibration is of another machine"
    expected = inside.contents.checksums if claim.whole_bundle else {}
    packed = {
        name.removeprefix(BUNDLE_FOLDER): sha256
        for name, sha256 in claim.members.items()
        if name.startswith(BUNDLE_FOLDER) and name != BUNDLE_FOLDER + BUNDLE_FILE
    }
    if packed != expected:
        yield "it holds other files of the bundle than the manifest lists"


def require_bundle_of(opened: OpenedClaim, bundle: Bundle) -> None:
    """Raises ArtifactError where a bundle is not the one that the claim is about.

    Args:
        opened: the claim.
        bundle: that somebody named; its files are compared with its manifest where they are used.
    """
    mine, claimed = bundle.contents.checksums, opened.inside.contents
    for name in dict.fromkeys(row.artifact for row in measured_rows(opened.report)):
        for file in claimed.needed_by(opened.inside.artifact(name)):
            if mine.get(file) != claimed.checksums.get(file):
                raise ArtifactError(
                    f"{bundle.folder}: is not the bundle of {opened.file.path}: {file!r}, which {name!r} needs, is "
                    "another file or not there"
                )


def verify_claim(
    path: Path, bundle: Bundle | None, options: ClaimOptions, progress: Progress | None = None
) -> tuple[ClaimVerification, OpenedClaim]:
    """Check a claim, and measure its rows again where this is a machine of the claimed kind.

    Args:
        path: of the claim.
        bundle: that it is about; None: the one inside, if it is.
        options: what holds, and for how long to measure.
        progress: where to say what is going on.

    Returns:
        What was found, and the claim (of whose bundle nothing is left on the disk).

    Raises:
        ArtifactError: the claim is damaged or contradicts itself; the bundle is another one, or a file of it is
            missing or changed.
    """
    began, here = time.perf_counter(), Machine.here()
    with _unpacked(path) as folder:
        opened = open_claim(path, folder)
        if bundle is not None:
            require_bundle_of(opened, bundle)
        elif opened.claim.whole_bundle:
            bundle = opened.inside
        cases = _cases(opened, bundle, here, options, progress or Silent()) if options.measure else ()
    told = opened.claim.environment.host
    inside = bundle is opened.inside
    return ClaimVerification(
        claim=str(path),
        sha256=opened.file.sha256,
        run=opened.report.run,
        device=opened.report.device,
        claimed_on=", ".join(str(told[name]) for name in ("cpu", "gpu") if told.get(name)) or "an unknown machine",
        host=dict(here.host),
        created=now(),
        seconds=time.perf_counter() - began,
        tolerance=options.again.tolerance,
        error=options.again.error,
        measured=options.measure,
        bundle=None if bundle is None else "inside the claim" if inside else str(bundle.folder),
        cases=tuple(cases),
        not_again=(not_again := not_measured_again(opened.report)),
        notes=(_SIGNATURE, *(TIMES_ALONE.format(rows, what) for what, rows in not_again.items())),
    ), opened


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """An empty folder for as long as it is needed; an error that names it names the claim instead."""
    with tempfile.TemporaryDirectory(prefix="edgeformer-claim-") as folder:
        try:
            yield Path(folder)
        except ArtifactError as error:
            raise ArtifactError(str(error).replace(folder, str(path))) from None


def _cases(
    opened: OpenedClaim, bundle: Bundle | None, here: Machine, options: ClaimOptions, progress: Progress
) -> Sequence[ClaimCase]:
    rows, environment = measured_rows(opened.report), opened.claim.environment
    refusals = [why_not_here(row, opened.inside.artifact(row.artifact), environment, here) for row in rows]
    if bundle is None:
        refusals = [refusal or _NO_BUNDLE for refusal in refusals]
        checked: dict[str, CheckedArtifact] = {}
    else:
        comparable = dict.fromkeys(row.artifact for row, why in zip(rows, refusals, strict=True) if why is None)
        checked = {name: CheckedArtifact.of(bundle, bundle.artifact(name)) for name in comparable}
    again = {
        place: Again(row, _spec(row, checked[row.artifact], here.gpu_uuid(row, environment), options))
        for place, (row, why) in enumerate(zip(rows, refusals, strict=True))
        if why is None
    }
    with bar(progress, "measuring the claim's rows in turn", None, "process"):
        measure_again(list(again.values()), options.again, lambda: progress.advance(1))
    factor = common_factor(list(again.values()), options.again.tolerance)
    found = []
    for place, (row, why) in enumerate(zip(rows, refusals, strict=True)):
        if why is not None:
            found.append(_case(row, "not comparable", why))
            continue
        doubts = list(differences(row, opened.inside.artifact(row.artifact), environment, here))
        doubts += unknown_speed(again[place], len(again))
        found.append(_judged(again[place], options.again, factor, doubts))
    return found


def _spec(row: Row, checked: CheckedArtifact, gpu_uuid: str | None, options: ClaimOptions) -> PaceSpec:
    assert row.phase != "cold"
    measure = MeasureSpec(
        checked=checked,
        provider=row.provider,
        threads=row.threads or 1,
        shapes=((row.batch, row.seq),),
        rules=options.rules or RULES,
        gpu_uuid=gpu_uuid,
    )
    return PaceSpec(
        threads=measure.threads,
        gpu_uuid=gpu_uuid,
        item=(row.phase, row.batch, row.seq),
        measure=measure,
        probes=provider_facts(row.provider).kind == "cpu",
    )


def _case(row: Row, status: CaseStatus, reason: str, **figures: object) -> ClaimCase:
    same = {name: getattr(row, name) for name in ("artifact", "provider", "phase", "batch", "seq", "threads")}
    facts = {**same, "claimed_ms": row.latency_ms.p50, "status": status, "reason": reason, **figures}
    return ClaimCase.model_validate(facts)


def _judged(again: Again, rules: AgainRules, factor: float | None, doubts: Sequence[str]) -> ClaimCase:
    """One row's verdict. What speaks against comparing excuses what does not hold, and spoils nothing that does."""
    if again.refusal is not None:
        return _case(again.row, "not comparable", f"it cannot be measured here: {again.refusal}")
    known, holds = again.known, again.holds(rules.tolerance)
    status, reason = _STATUSES[holds], ""
    if holds == "not known" and len(again.log_ratios) < again.fewest:
        rounds = len(again.log_ratios)
        reason = f"too little time: {rounds} of the {again.fewest} rounds that say anything; give --minutes more"
    elif holds == "not known":
        reason = "this machine is too noisy to say; measure again"
    elif holds == "another speed":
        reason = (
            f"this processor was {again.slowness:.2f} times as slow as the claim says that its own was, and at equal "
            "speed the time would hold: measure again when it is as fast"
        )
    elif holds == "no" and (excuses := [*doubts, *_speeds(factor)]):
        status, reason = "not comparable", f"the time is another one, but {'; '.join(excuses)}"
    elif holds == "no":
        reason = "the same files on a machine of the same kind, under the same conditions, take another time"
    if again.claimed_range != (1.0, 1.0):
        low, high = (end * again.claimed_ms for end in again.claimed_range)
        said = f"the claim calls this row not stable, and its time {shown(low, 'ms')} to {shown(high, 'ms')}"
        reason = "; ".join(filter(None, (said, reason)))
    change = known.middle if again.log_ratios else None
    told = {"here_ms": again.here_ms, "change": change, "rounds": len(again.log_ratios), "slowness": again.slowness}
    return _case(again.row, status, reason, **told, **known.ends)


_STATUSES: Mapping[Holds, CaseStatus] = {
    "yes": "confirmed",
    "no": "contradicted",
    "not known": "undecided",
    "another speed": "not comparable",
}


def _speeds(factor: float | None) -> Iterator[str]:
    if factor is not None:
        slower = f"{factor:.2f} times as long" if factor > 1 else f"{factor:.2f} of the time"
        yield f"every row takes {slower} here: this processor runs at another speed, and the rows agree with each other"
