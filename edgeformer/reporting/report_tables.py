"""A profile report on the terminal: what was measured, the checks, the verdict, and where the files are."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeformer.reporting.caution import cautions
from edgeformer.reporting.tables import DASH, coloured, new_table
from edgeformer.schema.report import Check, Report, Row
from edgeformer.schema.units import format_bytes, format_milliseconds


def print_report(report: Report, files: list[Path], console: Console) -> None:
    """Print the whole report."""
    console.print(measurement_table(report))
    console.print(check_table(report))
    console.print(f"[bold]Verdict for {report.device}:[/bold] {coloured(report.verdict.status)}. {in_words(report)}\n")
    warnings = [f"{r.artifact} {r.batch} × {r.seq}: {w}" for r in report.rows for w in r.latency_ms.warnings]
    for note in (*report.notes, *warnings):
        console.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True)
    if not any(path.suffix == ".png" for path in files):
        console.print("no picture: matplotlib is not installed (it comes with edgeformer[train])")
    for path in files:
        console.print(f"{'picture' if path.suffix == '.png' else 'report '} {path}", soft_wrap=True)


def in_words(report: Report) -> str:
    """One sentence that a newcomer understands."""
    failed = [check for check in report.verdict.checks if check.status == "fail"]
    unknown = sorted({check.name for check in report.verdict.checks if check.status == "unknown"})
    if failed:
        return "Over budget: " + ", ".join(f"{c.name} of {c.artifact}" for c in failed) + "."
    if unknown:
        passed = sorted({check.name for check in report.verdict.checks if check.status == "pass"})
        done = f"{' and '.join(passed)} within budget; " if passed else ""
        where = "" if report.on_target else f", because no {report.device_title} is in this machine"
        return f"{done}{' and '.join(unknown)} not known{where}."
    return "Every check is within budget." if report.verdict.checks else "Nothing was checked."


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
    table = new_table(title, *columns, right=columns[1:8])
    cold = {row.artifact: row for row in report.rows if row.phase == "cold" and row.where == "host"}
    seen: set[str] = set()
    for row in report.rows:
        if row.where != "host" or row.phase == "cold":
            continue
        first = cold.get(row.artifact) if row.artifact not in seen else None
        seen.add(row.artifact)
        table.add_row(*_cells(row, first))
    return table


def _cells(row: Row, cold: Row | None) -> list[str]:
    latency = row.latency_ms
    if latency.status != "measured":
        reason = f"[yellow]{latency.status}: {escape(latency.reason or '')}[/]"
        shape = f"{row.batch} × {row.seq}"
        return [row.artifact, format_bytes(row.size_bytes), shape, DASH, DASH, DASH, DASH, DASH, reason]
    first = _ms(cold.latency_ms.p50) if cold else ""
    state = "" if latency.stable else "[yellow]unstable[/]"
    throughput = f"{row.throughput_per_s:,.0f}" if row.throughput_per_s is not None else DASH
    memory = format_bytes(row.memory_bytes.peak)
    shape = f"{row.batch} × {row.seq}"
    times = [first, _ms(latency.p50), _ms(latency.p90)]
    return [row.artifact, format_bytes(row.size_bytes), shape, *times, throughput, memory, state]


def _ms(value: float | None) -> str:
    return DASH if value is None else f"{format_milliseconds(value)} ms"


def check_table(report: Report) -> Table:
    """Each limit of the device against what is known."""
    table = new_table(
        f"Budget of {report.device}", "check", "artifact", "limit", "value", "result", right=("limit", "value")
    )
    for check in report.verdict.checks:
        result = coloured(check.status)
        table.add_row(check.name, check.artifact, quantity(check.limit, check), quantity(check.value, check), result)
    return table


def quantity(value: float | None, check: Check) -> str:
    """A check's limit or value in its unit."""
    if value is None:
        return DASH
    return format_bytes(value) if check.unit == "bytes" else f"{format_milliseconds(value)} {check.unit}"
