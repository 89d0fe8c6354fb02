"""What a claim holds, and what this machine says of it, for the terminal."""

from __future__ import annotations

from operator import attrgetter

from rich.console import Console
from rich.text import Text

from edgeformer.backends import provider_facts
from edgeformer.formats.claim import ClaimCase, ClaimVerification
from edgeformer.formats.claim_file import ClaimFile
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.reporting.columns import DASH, Column, Columns

_WORST_FIRST = ("contradicted", "undecided", "not comparable", "confirmed")


def print_claim(file: ClaimFile, console: Console) -> None:
    """Print what was packed, and where it lies.

    Args:
        file: as it was written.
        console: of the terminal.
    """
    claim, path = file.claim, file.path
    told = claim.environment.host
    machine = ", ".join(str(told[name]) for name in ("cpu", "gpu") if told.get(name))
    bundle = "the whole bundle" if claim.whole_bundle else "the bundle's checksums"
    calibration = "its calibration" if claim.profile is not None else "no calibration (profile --calibrate makes one)"
    lines = (
        f"{claim.run} on {machine}: the report, {bundle}, {calibration}",
        f"claim {path} ({format_bytes(path.stat().st_size)}), sha256 {file.sha256}",
        "check it anywhere: edgeformer verify-claim",
    )
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def print_claim_verification(found: ClaimVerification, console: Console) -> None:
    """Print every row of the claim, the worst first, why, and the conclusion.

    Args:
        found: what `verify-claim` found.
        console: of the terminal.
    """
    console.print(Text(f"{found.claim}: whole, and agrees with itself; sha256 {found.sha256}"), soft_wrap=True)
    if found.measured:
        ordered = sorted(found.cases, key=lambda case: _WORST_FIRST.index(case.status))
        title = f"{found.run}, claimed on {found.claimed_on}\nmeasured again on {found.host.get('cpu')}"
        console.print(CASES.known_in(ordered, "speed").terminal(title, ordered))
    for reason, names in _reasons(found).items():
        console.print(Text.assemble(("note ", "yellow"), f"{', '.join(names)}: {reason}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text.assemble(("note ", "yellow"), note), soft_wrap=True)
    console.print(Text(_conclusion(found)), soft_wrap=True)


def _reasons(found: ClaimVerification) -> dict[str, list[str]]:
    """Why what was not confirmed was not, equal reasons once: reason → rows."""
    reasons: dict[str, list[str]] = {}
    for case in found.cases:
        if case.reason:
            reasons.setdefault(case.reason, []).append(f"{case.artifact} {_shape(case)}")
    return reasons


def _conclusion(found: ClaimVerification) -> str:
    if not found.measured:
        return "Nothing was measured again."
    counts = {status: sum(case.status == status for case in found.cases) for status in reversed(_WORST_FIRST)}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"Of {len(found.cases)} times: {told} (within {found.tolerance:.0%}; {found.seconds:.0f} s)."


def _shape(case: ClaimCase) -> str:
    return f"{case.batch} × {case.seq}{' per token' if case.phase == 'decode' else ''}"


def _change(case: ClaimCase) -> str:
    return DASH if case.change is None else f"{case.change:+.1%}"


def _range(case: ClaimCase) -> str:
    return "" if case.low is None or case.high is None else f"{case.low:+.1%} to {case.high:+.1%}"


def _ms(value: float | None) -> str:
    return DASH if value is None else f"{format_milliseconds(value)} ms"


def _speed(case: ClaimCase) -> str:
    """Of this processor, of the claimed one's."""
    return DASH if case.slowness is None else f"{1 / case.slowness:.0%}"


CASES: Columns[ClaimCase] = Columns(
    [
        Column("result", attrgetter("status"), mark=True),
        Column("artifact", attrgetter("artifact")),
        Column("at", _shape, text=_shape),
        Column("with", lambda case: provider_facts(case.provider).label, leaves=3),
        Column("threads", attrgetter("threads"), number=True, leaves=2),
        Column("claimed", attrgetter("claimed_ms"), text=lambda case: _ms(case.claimed_ms), number=True),
        Column("here", attrgetter("here_ms"), text=lambda case: _ms(case.here_ms), number=True),
        Column("change", attrgetter("change"), text=_change, number=True),
        Column("range", attrgetter("low"), text=_range, number=True, leaves=1),
        Column("speed", attrgetter("slowness"), text=_speed, number=True, leaves=3),
        Column("rounds", attrgetter("rounds"), number=True, leaves=4),
    ]
)
