"""What was held against what: artifacts against torch FP32 (`verify`), estimates against measurements (`profile`)."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from edgeformer.artifacts.device import Calibration, EstimateError, FittedCase
from edgeformer.artifacts.units import format_milliseconds
from edgeformer.artifacts.verification import ArtifactCheck, Verification
from edgeformer.report.columns import DASH, Column, Columns
from edgeformer.report.words import ABOUT, thread_words
from edgeformer.runtimes import provider_facts

CHECKS: Columns[ArtifactCheck] = Columns(
    [
        Column("artifact", attrgetter("artifact")),
        Column(
            "ran on", lambda check: provider_facts(_of(check, "provider")).label if _of(check, "provider") else None
        ),
        Column("n", lambda check: _of(check, "n"), number=True),
        Column("max error", lambda check: _of(check, "max_abs_error"), "error"),
        Column("relative", lambda check: _of(check, "relative_error"), "error"),
        Column("top-1 agreement", lambda check: _of(check, "top1_agreement"), "share"),
        Column("held to", lambda check: check.tolerance or None),
        Column("status", attrgetter("status"), mark=True),
    ]
)
"""What ran each artifact, how far it is from torch FP32, what it was held to."""


def _of(check: ArtifactCheck, name: str) -> Any:
    """A figure of the comparison; None where nothing was compared."""
    return getattr(check.parity, name, None)


def print_verification(found: Verification, console: Console) -> None:
    """Print every artifact, reasons, files that are not intact, and the conclusion.

    Args:
        found: what `verify` found.
        console: of the terminal.
    """
    what = "torch FP32" if found.wrapped is None else f"ONNX Runtime's FP32 answers of {found.wrapped}"
    console.print(CHECKS.terminal(f"{found.run}: golden inputs against {what}", found.artifacts))
    for check in found.artifacts:
        if check.reason:
            console.print(f"{escape(check.artifact)}: {escape(check.reason)}", soft_wrap=True)
        for note in check.notes:
            console.print(f"note: {escape(check.artifact)}: {escape(note)}", soft_wrap=True)
    for file in found.damaged:
        detail = f" ({escape(file.detail)})" if file.detail else ""
        console.print(f"[red]{file.status}[/]: {escape(file.file)}{detail}", soft_wrap=True)
    intact = len(found.files) - len(found.damaged)
    artifacts = {check.artifact for check in found.artifacts}  # one that several runtimes compute has several checks
    verified = len(artifacts - {check.artifact for check in found.artifacts if check.status != "verified"})
    console.print(
        f"{intact} of {len(found.files)} files intact, {verified} of {len(artifacts)} artifacts verified; "
        f"bundle.json is sha256 {found.manifest_sha256}",
        soft_wrap=True,
    )
    for line in (*found.stale, *_recorded(found)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if not found.manifest_protected:
        console.print(
            "bundle.json itself is not protected: an older version wrote it without a checksum of itself; compare its "
            "sha256 with the origin's, or export the run again",
            soft_wrap=True,
        )


def _recorded(found: Verification) -> Iterator[str]:
    """What `--write` wrote, a line for each artifact."""
    if (written := found.recorded) is None:
        return
    for record in written.records:
        told = record.reason or (f"no score on the validation split: {record.unscored}" if record.unscored else None)
        yield f"recorded: {record.artifact} on {record.device}: {record.status}" + (f" ({told})" if told else "")
    yield f"written: {written.file}" if written.file is not None else str(written.reason)


def _ratio(case: FittedCase) -> float | None:
    return case.estimated_ms / case.measured_ms if case.estimated_ms is not None and case.measured_ms else None


def _about(case: FittedCase) -> str:
    return DASH if case.estimated_ms is None else f"{ABOUT} {format_milliseconds(case.estimated_ms)} ms"


CASES: Columns[FittedCase] = Columns(
    [
        Column("run", attrgetter("run")),
        Column("artifact", attrgetter("artifact")),
        Column("batch × tokens", lambda case: f"{case.batch} × {case.seq}", number=True),
        Column("measured", attrgetter("measured_ms"), "ms"),
        Column("estimated", attrgetter("estimated_ms"), "ms", text=_about),
        Column("estimated / measured", lambda c: f"{_ratio(c):.2f}" if _ratio(c) is not None else None, number=True),
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
    if calibration.left_out:
        console.print(CASES.terminal(f"each model by what the others taught: {where}", calibration.left_out))
    if calibration.validated_on:
        console.print(CASES.terminal(f"checked on cases that were not fitted: {where}", calibration.validated_on))
    console.print(escape(error_in_words(calibration.error)), soft_wrap=True)
    if written is not None:
        console.print(f"profile {written}", soft_wrap=True, markup=False)


def error_in_words(error: EstimateError | None) -> str:
    """``estimates are off by 8 % typically …``: the median and the worst case as factors."""
    if error is None:
        return "estimates by this calibration were never checked: edgeformer calibrate --validate-only"
    typical, worst = (2**value for value in (error.median_log2, error.worst_log2))
    return (
        f"estimates of {error.cases} cases against measurements on {error.device}: typically within a factor of "
        f"{typical:.2f}, at worst {worst:.2f} (|log2| {error.median_log2:.2f} and {error.worst_log2:.2f})"
    )
