"""A profile report as files: JSON for scripts, Markdown for people and CI, CSV for spreadsheets, PNG to look at."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tabulate import tabulate

from edgeformer.reporting.caution import cautions
from edgeformer.reporting.report_tables import in_words, quantity
from edgeformer.schema.files import write_json, write_text
from edgeformer.schema.report import Report
from edgeformer.schema.units import format_bytes, format_milliseconds
from edgeformer.schema.workspace import Location

_COLUMNS = (
    "artifact", "precision", "provider", "where", "phase", "batch", "seq", "status", "p50_ms", "p90_ms", "p95_ms",
    "p99_ms", "mean_ms", "cv", "n", "stable", "throughput_per_s", "memory_peak_bytes", "size_bytes", "reason",
)  # fmt: skip


def write_report(report: Report, location: Location) -> list[Path]:
    """Write ``reports/<device>.{json,md,csv}`` and, where matplotlib is installed, a picture. Returns the paths."""
    base = location.run if location.run is not None else location.require_bundle()
    folder = base / "reports"
    written = [folder / f"{report.device}.{kind}" for kind in ("json", "md", "csv")]
    write_json(written[0], report)
    write_text(written[1], as_markdown(report))
    write_text(written[2], as_csv(report))
    try:
        from edgeformer.reporting.report_plot import draw_report
    except ModuleNotFoundError:
        return written  # the terminal and the Markdown hold the same figures
    return [*written, draw_report(report, folder / f"{report.device}.png")]


def as_csv(report: Report) -> str:
    """All rows, one line each, units in the column names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in report.rows:
        t, m = row.latency_ms, row.memory_bytes
        shape = (row.artifact, row.precision, row.provider, row.where, row.phase, row.batch, row.seq)
        times = (t.status, t.p50, t.p90, t.p95, t.p99, t.mean, t.cv, t.n, t.stable)
        writer.writerow((*shape, *times, row.throughput_per_s, m.peak, row.size_bytes, t.reason))
    return text.getvalue()


def as_markdown(report: Report) -> str:
    """GitHub-flavoured Markdown: verdict first."""
    warned = "".join(f"\n> **{caution}.**\n" for caution in cautions(report))
    host = f"{report.host.get('cpu')}, {report.host.get('cores')} cores, {report.host.get('system')}"
    checks = [
        (c.name, c.artifact, quantity(c.limit, c), quantity(c.value, c), c.status, c.reason or "")
        for c in report.verdict.checks
    ]
    rows = [
        (
            row.artifact, f"{row.batch} × {row.seq}", row.where, row.phase, row.latency_ms.status,
            format_milliseconds(row.latency_ms.p50), format_milliseconds(row.latency_ms.p90),
            format_bytes(row.memory_bytes.peak), format_bytes(row.size_bytes),
            "" if row.latency_ms.stable in (True, None) else "unstable",
        )
        for row in report.rows
    ]  # fmt: skip
    measured = ("artifact", "batch × tokens", "where", "phase", "status", "p50 ms", "p90 ms", "memory", "size", "")
    notes = "".join(f"- {note}\n" for note in report.notes)
    return (
        f"# {report.run} on {report.device_title}\n\n"
        f"**Verdict: {report.verdict.status}.** {in_words(report)}\n{warned}\n"
        f"{report.parameters:,} parameters. Rows `host` were measured on: {host}. {report.created}\n\n"
        "## Budget\n\n"
        f"{tabulate(checks, ('check', 'artifact', 'limit', 'value', 'status', 'reason'), tablefmt='github')}\n\n"
        f"## Measurements\n\n{tabulate(rows, measured, tablefmt='github', disable_numparse=True)}\n"
        f"{chr(10) + '## Notes' + chr(10) * 2 + notes if notes else ''}"
    )
