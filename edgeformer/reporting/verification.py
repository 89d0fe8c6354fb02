"""What was held against what: artifacts against torch FP32 (`verify`), estimates against measurements (`profile`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeformer.backends import provider_facts
from edgeformer.formats.device import Calibration, EstimateError, FittedCase
from edgeformer.formats.manifest import Parity
from edgeformer.formats.report import ArtifactCheck, Verification
from edgeformer.formats.units import format_milliseconds
from edgeformer.reporting.columns import DASH, Column, Columns
from edgeformer.reporting.words import ABOUT, thread_words


def _error(value: float | None) -> str:
    return DASH if value is None else f"{value:.1e}"


def _of_parity(take: Callable[[Parity], str | None]) -> Callable[[ArtifactCheck], str | None]:
    """The same of a check; None where nothing was compared."""
    return lambda check: take(check.parity) if check.parity is not None else None


CHECKS: Columns[ArtifactCheck] = Columns(
    [
        Column("artifact", lambda check: check.artifact),
        Column("ran on", _of_parity(lambda found: provider_facts(found.provider).label if found.provider else None)),
        Column("n", _of_parity(lambda found: f"{found.n:,}"), number=True),
        Column("max error", _of_parity(lambda found: _error(found.max_abs_error)), number=True),
        Column("relative", _of_parity(lambda found: _error(found.relative_error)), number=True),
        Column("top-1 agreement", lambda check: check.parity.top1_agreement if check.parity else None, "share"),
        Column("held to", lambda check: check.tolerance or None),
        Column("status", lambda check: check.status, mark=True),
    ]
)


def verification_table(found: Verification) -> Table:
    """One row per artifact: what ran it, how far it is from torch FP32, what it was held to."""
    return CHECKS.terminal(f"{found.run}: golden inputs against torch FP32", found.artifacts)


def verification_lines(found: Verification) -> Iterator[str]:
    """Reasons, files that are not intact, and the conclusion."""
    for check in found.artifacts:
        if check.reason:
            yield f"{escape(check.artifact)}: {escape(check.reason)}"
    for file in found.damaged:
        detail = f" ({escape(file.detail)})" if file.detail else ""
        yield f"[red]{file.status}[/]: {escape(file.file)}{detail}"
    intact = len(found.files) - len(found.damaged)
    verified = sum(check.status == "verified" for check in found.artifacts)
    yield (
        f"{intact} of {len(found.files)} files intact, {verified} of {len(found.artifacts)} artifacts verified; "
        f"bundle.json is sha256 {found.manifest_sha256}"
    )


def _ratio(case: FittedCase) -> float | None:
    return case.estimated_ms / case.measured_ms if case.estimated_ms is not None and case.measured_ms else None


def _about(case: FittedCase) -> str:
    return DASH if case.estimated_ms is None else f"{ABOUT} {format_milliseconds(case.estimated_ms)} ms"


def _written_ratio(case: FittedCase) -> str:
    ratio = _ratio(case)
    return DASH if ratio is None else f"{ratio:.2f}"


CASES: Columns[FittedCase] = Columns(
    [
        Column("run", lambda case: case.run),
        Column("artifact", lambda case: case.artifact),
        Column("batch × tokens", lambda case: f"{case.batch} × {case.seq}", number=True),
        Column("measured", lambda case: case.measured_ms, "ms"),
        Column("estimated", lambda case: case.estimated_ms, "ms", text=_about),
        Column(
            "estimated / measured",
            _ratio,
            text=lambda case: DASH if (ratio := _ratio(case)) is None else f"{ratio:.2f}",
            number=True,
        ),
        Column("log2", lambda case: f"{log2(ratio):+.2f}" if (ratio := _ratio(case)) else None, number=True),
    ]
)
"""Measured beside estimated, with their ratio and its logarithm to the base 2."""


def print_calibration(calibration: Calibration, written: Path | None, console: Console) -> None:
    """Print the cases that were fitted, those that were only checked, the error, and where the profile lies.

    Args:
        calibration: what was learned.
        written: the profile that holds it; None: none was written.
        console: of the terminal.
    """
    where = f"{calibration.processor}, {thread_words(calibration.threads)}"
    if calibration.fitted_on:
        console.print(CASES.terminal(f"fitted on: {where}", calibration.fitted_on))
    if calibration.validated_on:
        console.print(CASES.terminal(f"checked on cases that were not fitted: {where}", calibration.validated_on))
    console.print(escape(error_in_words(calibration.error)), soft_wrap=True)
    if written is not None:
        console.print(f"profile {written}", soft_wrap=True)


def error_in_words(error: EstimateError | None) -> str:
    """``estimates are off by 8 % typically …``: the median and the worst case as factors."""
    if error is None:
        return "estimates by this calibration were never checked: edgeformer profile --validate"
    typical, worst = (2**value for value in (error.median_log2, error.worst_log2))
    return (
        f"estimates of {error.cases} cases against measurements on {error.device}: typically within a factor of "
        f"{typical:.2f}, at worst {worst:.2f} (|log2| {error.median_log2:.2f} and {error.worst_log2:.2f})"
    )
