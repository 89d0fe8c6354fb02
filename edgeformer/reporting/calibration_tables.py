"""What a calibration was fitted on and how wrong its estimates are, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeformer.formats.device import Calibration, EstimateError, FittedCase
from edgeformer.formats.units import format_milliseconds
from edgeformer.reporting.tables import DASH, new_table


def print_calibration(calibration: Calibration, written: Path | None, console: Console) -> None:
    """Print the cases that were fitted, those that were only checked, the error, and where the profile lies."""
    threads = "1 thread" if calibration.threads == 1 else f"{calibration.threads} threads"
    where = f"{calibration.processor}, {threads}"
    if calibration.fitted_on:
        console.print(case_table(f"fitted on: {where}", calibration.fitted_on))
    if calibration.validated_on:
        console.print(case_table(f"checked on cases that were not fitted: {where}", calibration.validated_on))
    console.print(escape(error_in_words(calibration.error)), soft_wrap=True)
    if written is not None:
        console.print(f"profile {written}", soft_wrap=True)


def case_table(title: str, cases: Sequence[FittedCase]) -> Table:
    """Measured beside estimated, with their ratio and its logarithm to the base 2."""
    columns = ("run", "artifact", "batch × tokens", "measured", "estimated", "estimated / measured", "log2")
    table = new_table(title, *columns, right=columns[2:])
    for case in cases:
        ratio = case.estimated_ms / case.measured_ms if case.estimated_ms is not None and case.measured_ms else None
        table.add_row(
            escape(case.run),
            escape(case.artifact),
            f"{case.batch} × {case.seq}",
            f"{format_milliseconds(case.measured_ms)} ms",
            DASH if case.estimated_ms is None else f"≈ {format_milliseconds(case.estimated_ms)} ms",
            DASH if ratio is None else f"{ratio:.2f}",
            DASH if ratio is None else f"{log2(ratio):+.2f}",
        )
    return table


def error_in_words(error: EstimateError | None) -> str:
    """``estimates are off by 8 % typically …``: the median and the worst case as factors."""
    if error is None:
        return "estimates by this calibration were never checked: edgeformer profile --validate"
    typical, worst = (2**value for value in (error.median_log2, error.worst_log2))
    return (
        f"estimates of {error.cases} cases against measurements on {error.device}: typically within a factor of "
        f"{typical:.2f}, at worst {worst:.2f} (|log2| {error.median_log2:.2f} and {error.worst_log2:.2f})"
    )
