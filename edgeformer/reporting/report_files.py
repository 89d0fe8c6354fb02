"""A profile report as files: JSON for scripts, Markdown and HTML for people, CSV for spreadsheets, a badge, a PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from edgeformer.formats.files import write_json, write_text
from edgeformer.formats.report import Report
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.formats.workspace import REPORTS_FOLDER
from edgeformer.reporting.badge import badge_markdown, badge_svg
from edgeformer.reporting.caution import cautions
from edgeformer.reporting.html_report import as_html
from edgeformer.reporting.report_words import (
    estimate_words,
    in_words,
    latency_words,
    memory_words,
    not_measured,
    quantity,
    shape_words,
    state_words,
    value_words,
)
from edgeformer.run import Location

_COLUMNS = (
    "artifact", "precision", "provider", "where", "phase", "batch", "seq", "threads", "status", "p50_ms", "low_ms",
    "high_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms", "cv", "n", "stable", "device_ms", "throughput_per_s",
    "memory_status", "memory_peak_bytes", "memory_low_bytes", "memory_high_bytes", "energy_mj", "size_bytes", "reason",
)  # fmt: skip


def write_report(report: Report, location: Location) -> list[Path]:
    """Write ``reports/<device>.{json,md,csv,html,svg}`` and, where matplotlib is installed, a PNG; return the paths."""
    base = location.run if location.run is not None else location.require_bundle()
    folder = base / REPORTS_FOLDER
    write_json(folder / f"{report.device}.json", report)
    texts = {"md": as_markdown, "csv": as_csv, "html": as_html, "svg": badge_svg}
    for kind, made in texts.items():
        write_text(folder / f"{report.device}.{kind}", made(report))
    written = [folder / f"{report.device}.{kind}" for kind in ("json", *texts)]
    try:
        from edgeformer.reporting.report_plot import draw_report
    except ModuleNotFoundError:
        return written  # the HTML says so, and its tables hold the same figures
    return [*written, draw_report(report, folder / f"{report.device}.png")]


def as_csv(report: Report) -> str:
    """All rows, one line each, units in the column names. ``status`` is the latency's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for row in report.rows:
        t, m = row.latency_ms, row.memory_bytes
        shape = (row.artifact, row.precision, row.provider, row.where, row.phase, row.batch, row.seq, row.threads)
        times = (t.status, t.p50, t.low, t.high, t.p90, t.p95, t.p99, t.mean, t.cv, t.n, t.stable, row.device_ms)
        rest = (m.status, m.peak, m.low, m.high, row.energy_mj.value, row.size_bytes, t.reason)
        writer.writerow((*shape, *times, row.throughput_per_s, *rest))
    return text.getvalue()


def as_markdown(report: Report) -> str:
    """GitHub-flavoured Markdown: badge and verdict first."""
    warned = "".join(f"\n> **{caution}.**\n" for caution in cautions(report))
    if estimate_words(report):
        warned += f"\n> Figures with ≈ are {estimate_words(report)}.\n"
    host = f"{report.host.get('cpu')}, {report.host.get('cores')} cores, {report.host.get('system')}"
    checks = [
        (c.name, c.artifact, quantity(c.limit, c), value_words(c), c.basis or "", c.status, c.reason or "")
        for c in report.verdict.checks
    ]
    heads = ("check", "artifact", "limit", "value", "known by", "status", "reason")
    notes = "".join(f"- {note}\n" for note in report.notes)
    gaps = "".join(f"- {what}: {why}\n" for what, why in not_measured(report))
    return (
        f"# {report.run} on {report.device_title}\n\n"
        f"{badge_markdown(report, f'{report.device}.svg')}\n\n"
        f"**Verdict: {report.verdict.status}.** {in_words(report)}\n{warned}\n"
        f"{report.parameters:,} parameters. Rows `host` were measured on: {host}. {report.created}\n\n"
        f"## Budget\n\n{_github(checks, heads)}\n\n"
        f"## Measurements\n\n{_measurements(report)}\n"
        f"{_search(report)}"
        f"{chr(10) + '## What was not measured, and why' + chr(10) * 2 + gaps if gaps else ''}"
        f"{chr(10) + '## Notes' + chr(10) * 2 + notes if notes else ''}"
    )


def _github(rows: Sequence[tuple[str, ...]], headers: tuple[str, ...]) -> str:
    safe = [tuple(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return tabulate(safe, headers, tablefmt="github", disable_numparse=True)


def _measurements(report: Report) -> str:
    rows = [
        (
            row.artifact, shape_words(row, report), row.where, row.phase, row.latency_ms.status,
            latency_words(row.latency_ms), format_milliseconds(row.latency_ms.p90),
            memory_words(row.memory_bytes), format_bytes(row.size_bytes),
            "unstable" if state_words(row) == "unstable" else "",
        )
        for row in report.rows
    ]  # fmt: skip
    return _github(
        rows, ("artifact", "batch × tokens", "where", "phase", "status", "p50", "p90 ms", "memory", "size", "")
    )


def _search(report: Report) -> str:
    """What was found, the pick in bold, and the Pareto front."""
    search = report.search
    if search is None:
        return ""
    rows = []
    for position, c in enumerate(search.candidates):
        if not (c.on_front or position == search.pick):
            continue
        about = "≈ " if c.latency_status == "estimated" else ""
        name = f"**{c.artifact}**" if position == search.pick else c.artifact
        score = f"{c.score:.4f}" if c.score is not None else "–"
        time = f"{about}{format_milliseconds(c.latency_ms)} ms" if c.latency_ms is not None else "–"
        rows.append(
            (name, str(c.threads or ""), score, time, format_bytes(c.size_bytes), "yes" if c.feasible else "no")
        )
    heads = ("on the Pareto front", "threads", search.metric, "latency", "size", "feasible")
    absent = "".join(f"- not in the bundle: {what}\n" for what in search.not_in_bundle)
    return f"\n## Search\n\n{search.reason}\n\n{_github(rows, heads)}\n{chr(10) + absent if absent else ''}"
