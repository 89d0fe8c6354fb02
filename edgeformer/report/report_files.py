"""A profile report as files: JSON for scripts, Markdown and HTML for people, CSV for spreadsheets, a badge, a PNG."""

from __future__ import annotations

import glob
import time
from contextlib import suppress
from html import escape
from pathlib import Path

from edgeformer.artifacts.data_warnings import cautions
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.report import Report
from edgeformer.artifacts.units import markdown, markdown_line, visible
from edgeformer.report.html_report import as_html
from edgeformer.report.pictures import draw_report
from edgeformer.report.report_tables import CHECKS, MEASUREMENTS_CSV, candidates, measurements
from edgeformer.report.words import (
    badge_markdown,
    badge_text,
    estimate_words,
    in_words,
    not_measured,
    numbered,
    verdict_words,
)
from edgeformer.run import Location

_COLOURS = {"pass": "#2e7d46", "fail": "#b3372f", "unknown": "#69707a", "partial": "#8a6a12"}
_CHARACTER, _PADDING = 6.6, 12
_LEFT_S = 3600.0  # no living process takes that long from making a file of a report to giving it its name


def write_report(report: Report, location: Location) -> list[Path]:
    """Write ``reports/<device>.{json,md,csv,html,svg}`` and, where matplotlib is installed, a PNG.

    The answer to another question than the device's own budget (a search, other limits, one artifact) has its own
    name, ``<device>-<question>``, and overwrites only its own earlier answer.

    Args:
        report: what `profile` found.
        location: the run that was measured, or a bundle without one.

    Returns:
        The paths, in that order.
    """
    folder = location.reports
    _remove_leftovers(folder, report.stem)
    write_json(folder / f"{report.stem}.json", report)
    texts = {"md": as_markdown, "csv": as_csv, "html": as_html, "svg": badge_svg}
    for kind, made in texts.items():
        write_text(folder / f"{report.stem}.{kind}", made(report))
    written = [folder / f"{report.stem}.{kind}" for kind in ("json", *texts)]
    picture = draw_report(report, folder / f"{report.stem}.png")
    return [*written, *([picture] if picture is not None else [])]


def write_interrupted(report: Report, location: Location) -> Path:
    """Write what was measured before Ctrl-C to ``reports/interrupted/<device>.json``, and return its path.

    The folder keeps it apart from finished reports, which it does not overwrite.
    """
    path = location.reports / "interrupted" / f"{report.stem}.json"
    write_json(path, report)
    return path


def _remove_leftovers(folder: Path, stem: str) -> None:
    """What killed processes began to write. Several may profile at once, so what is young stays."""
    for left in folder.glob(f".{glob.escape(stem)}.*.tmp.*"):
        with suppress(OSError):  # rubbish that cannot be deleted is in nobody's way
            if time.time() - left.stat().st_mtime > _LEFT_S:
                left.unlink()


def as_csv(report: Report) -> str:
    """All rows, one line each, units in the column names. ``status`` is the latency's."""
    return measurements(report).pick(*MEASUREMENTS_CSV).csv(report.rows)


def as_markdown(report: Report) -> str:
    """GitHub-flavoured Markdown: badge and verdict first."""
    warned = "".join(f"\n> **{markdown(caution)}.**\n" for caution in cautions(report))
    if estimate_words(report):
        warned += f"\n> Figures with ≈ are {markdown(estimate_words(report) or '')}.\n"
    host = f"{report.host.get('cpu')}, {report.host.get('cores')} cores, {report.host.get('system')}"
    shown = measurements(report).pick(
        "artifact", "shape", "where", "phase", "status", "p50_status", "p90", "memory_peak", "size"
    )
    notes = "".join(f"- {markdown_line(note)}\n" for note in report.notes)
    gaps = "".join(f"- {markdown(what)}: {markdown(why)}\n" for what, why in not_measured(report))
    return (
        f"# {markdown(report.run)} on {markdown(report.device_title)}\n\n"
        f"{badge_markdown(report, f'{report.stem}.svg')}\n\n"
        f"**Verdict: {verdict_words(report)}.** {markdown(in_words(report))}\n{warned}\n"
        f"{report.parameters:,} parameters. Rows `host` were measured on: {markdown(host)}. "
        f"{markdown(report.created)}\n\n"
        f"## Budget\n\n{CHECKS.markdown(report.verdict.checks)}\n\n"
        f"## Measurements\n\n{shown.markdown(report.rows)}\n"
        f"{_search(report)}"
        f"{chr(10) + '## What was not measured, and why' + chr(10) * 2 + gaps if gaps else ''}"
        f"{chr(10) + '## Notes' + chr(10) * 2 + notes if notes else ''}"
    )


def _search(report: Report) -> str:
    """What was found: the Pareto front, and the pick in bold."""
    search = report.search
    if search is None:
        return ""
    rows = [row for row in numbered(search) if row[2].on_front or row[1] == search.pick]
    shown = candidates(
        search, "number", "artifact", "runtime", "threads", "score", "latency", "size", "memory", "energy", "feasible"
    )
    table = shown.markdown(rows, strong=lambda row: row[1] == search.pick)
    absent = "".join(f"- not in the bundle: {markdown(what)}\n" for what in search.not_in_bundle)
    front = "On the Pareto front of score, latency and size:"
    return f"\n## Search\n\n{markdown_line(search.reason)}\n\n{front}\n\n{table}\n{chr(10) + absent if absent else ''}"


def badge_svg(report: Report) -> str:
    """A self-contained SVG, 20 pixels high: green, red or grey; brown for a pass that leaves a kind of check unjudged.

    Its text has a fixed length, whatever the font.
    """
    right = visible(badge_text(report))
    widths = [round(len(text) * _CHARACTER) + _PADDING for text in ("edgeformer", right)]
    total, colour = sum(widths), _COLOURS["partial" if report.verdict.is_partial else report.verdict.status]
    texts = "".join(
        f'<text x="{x:g}" y="14" textLength="{width - _PADDING}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
        for x, width, text in ((widths[0] / 2, widths[0], "edgeformer"), (widths[0] + widths[1] / 2, widths[1], right))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" '
        f'aria-label="edgeformer {escape(right)}"><title>edgeformer {escape(right)}</title>'
        f'<clipPath id="r"><rect width="{total}" height="20" rx="3"/></clipPath><g clip-path="url(#r)">'
        f'<rect width="{widths[0]}" height="20" fill="#3b424b"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/></g>'
        f'<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g>'
        "</svg>\n"
    )
