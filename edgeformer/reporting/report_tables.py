"""A profile report on the terminal: what was measured and estimated, the checks, the verdict, the files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeformer.formats.errors import install_hint
from edgeformer.formats.report import Report, Row
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.reporting.badge import badge_markdown
from edgeformer.reporting.caution import cautions
from edgeformer.reporting.report_words import (
    estimate_words,
    in_words,
    latency_words,
    memory_words,
    quantity,
    shape_words,
    state_words,
    value_words,
)
from edgeformer.reporting.tables import DASH, coloured, new_table

_KINDS = {".png": "picture", ".svg": "badge  "}


def print_report(report: Report, files: list[Path], console: Console) -> None:
    """Print the whole report."""
    console.print(measurement_table(report))
    if estimated_rows(report):
        console.print(estimate_table(report))
    console.print(check_table(report))
    console.print(f"[bold]Verdict for {report.device}:[/bold] {coloured(report.verdict.status)}. {in_words(report)}\n")
    warned = [row for row in report.rows if row.latency_ms.warnings]
    warnings = [f"{r.artifact} {shape_words(r, report)}: {'; '.join(r.latency_ms.warnings)}" for r in warned]
    absent = {f"{r.artifact}: {state_words(r)}": None for r in report.rows if r.latency_ms.status == "unavailable"}
    for note in (*report.notes, *absent, *warnings):
        console.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True)
    if not any(path.suffix == ".png" for path in files):
        console.print(
            f"no pictures: matplotlib is not installed: {install_hint('plots')}", soft_wrap=True, markup=False
        )
    for path in files:
        console.print(f"{_KINDS.get(path.suffix, 'report ')} {path}", soft_wrap=True, markup=False)
        if path.suffix == ".svg":
            console.print(f"        {badge_markdown(report, f'reports/{path.name}')}", soft_wrap=True, markup=False)


def estimated_rows(report: Report) -> list[Row]:
    """Rows of the device that the estimator filled."""
    return [row for row in report.rows if row.where == "device" and row.latency_ms.status == "estimated"]


def measurement_table(report: Report) -> Table:
    """Rows measured on this host; cold and steady side by side."""
    warned = "".join(f"; {caution}" for caution in cautions(report))
    title = (
        f"{report.run} for {report.device_title}\n"
        f"measured on this host: {report.host.get('cpu', 'CPU')}, {report.host.get('cores', '?')} cores{warned}"
    )
    columns = (
        "artifact",
        "size",
        "batch × tokens",
        "first call",
        "typical (p50)",
        "slow (p90)",
        "per second",
        "memory",
        "",
    )
    table = new_table(escape(title), *columns, right=columns[1:8])
    cold = {(row.artifact, row.threads): row for row in report.rows if row.phase == "cold" and row.where == "host"}
    seen: set[tuple[str, int | None]] = set()
    for row in report.rows:
        if row.where != "host" or row.phase == "cold":
            continue
        key = (row.artifact, row.threads)
        first = cold.get(key) if key not in seen else None
        seen.add(key)
        table.add_row(*_cells(row, first, shape_words(row, report)))
    return table


def _cells(row: Row, cold: Row | None, shape: str) -> list[str]:
    latency = row.latency_ms
    start = [escape(row.artifact), format_bytes(row.size_bytes), shape]
    # A long reason would make the table a narrow tower; it stands below it.
    word = latency.status if latency.status == "unavailable" else state_words(row)
    state = f"[yellow]{escape(word)}[/]" if word else ""
    if latency.status != "measured":
        return [*start, DASH, DASH, DASH, DASH, DASH, state]
    first = _ms(cold.latency_ms.p50) if cold else ""
    throughput = f"{row.throughput_per_s:,.0f}" if row.throughput_per_s is not None else DASH
    return [*start, first, _ms(latency.p50), _ms(latency.p90), throughput, memory_words(row.memory_bytes), state]


def _ms(value: float | None) -> str:
    return DASH if value is None else f"{format_milliseconds(value)} ms"


def estimate_table(report: Report) -> Table:
    """Rows that were estimated for the device: middle and range, never a percentile."""
    columns = ("artifact", "batch × tokens", "typical, estimated", "memory, estimated")
    title = f"NOT MEASURED: estimated for {report.device_title}"
    table = new_table(escape(title), *columns, right=columns[1:])
    for row in estimated_rows(report):
        latency, memory = latency_words(row.latency_ms), memory_words(row.memory_bytes)
        table.add_row(
            *(escape(row.artifact), shape_words(row, report), f"[italic]{latency}[/]", f"[italic]{memory}[/]")
        )
    table.caption = escape(estimate_words(report) or "")
    table.caption_justify = "left"
    return table


def check_table(report: Report) -> Table:
    """Each limit of the device against what is known."""
    columns = ("check", "artifact", "limit", "value", "known by", "result")
    table = new_table(f"Budget of {escape(report.device)}", *columns, right=("limit", "value"))
    for check in report.verdict.checks:
        basis = check.basis if check.value is not None else None
        cells = (check.name, escape(check.artifact), quantity(check.limit, check), value_words(check), basis or DASH)
        table.add_row(*cells, coloured(check.status))
    return table
