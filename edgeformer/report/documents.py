"""A profile report on the terminal and as files: JSON, CSV, Markdown, HTML and a badge.

Every document is a layout of the same :class:`ReportContext`.
"""

import glob
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.report import Report
from edgeformer.artifacts.units import format_threads, markdown, markdown_line, visible
from edgeformer.report.canvas import NO_PICTURE, can_draw
from edgeformer.report.charts import draw_pictures
from edgeformer.report.columns import ABOUT, coloured
from edgeformer.report.context import (
    CHECKS,
    ESTIMATE_CHECKS,
    FACTS,
    PUBLISHED,
    SIZES,
    ReportContext,
    candidate_columns,
    candidate_style,
    metric_named,
)
from edgeformer.report.sentences import badge_markdown, checks_sentence
from edgeformer.run import Location

_BADGE_COLOURS = {"pass": "#2e7d46", "fail": "#b3372f", "unknown": "#69707a", "partial": "#8a6a12"}
_CHARACTER_WIDTH, _BADGE_PADDING = 6.6, 12
_STALE_AFTER_S = 3600.0  # no process takes longer between creating a temporary report file and renaming it
_BASES = {
    "measured": "times measured on the device",
    "estimated": "times with ≈ are estimates for the device",
    "host": "times of THIS HOST, not of the device",
}


def write_report(report: Report, location: Location) -> list[Path]:
    """Write ``reports/<device>.{json,md,csv,html,svg}`` of a run or bundle and return the paths in that order.

    A report for another question than the device's own budget (a choice, other limits, one artifact) is named
    ``<device>-<question>`` and overwrites only its own earlier version.
    """
    folder, stem, context = location.reports, report.stem, ReportContext(report)
    # Temporary files of killed processes. Recent ones stay: another process may be writing them.
    for leftover in folder.glob(f".{glob.escape(stem)}.*.tmp.*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _STALE_AFTER_S:
                leftover.unlink()
    write_json(folder / f"{stem}.json", report)
    write_text(folder / f"{stem}.md", as_markdown(context))
    write_text(folder / f"{stem}.csv", context.columns("csv").csv(report.rows))
    write_text(folder / f"{stem}.html", as_html(context))
    write_text(folder / f"{stem}.svg", badge_svg(context))
    return report_files(report, location)


def report_files(report: Report, location: Location) -> list[Path]:
    """Return the paths of :func:`write_report`."""
    return [location.reports / f"{report.stem}.{kind}" for kind in ("json", "md", "csv", "html", "svg")]


def as_markdown(context: ReportContext) -> str:
    """Return GitHub-flavoured Markdown, with the badge and the verdict first. The template escapes all text."""
    report, candidates = context.report, ""
    if report.search is not None:
        rows = [row for row in context.candidates if row.candidate.on_front or row.is_pick]
        columns = candidate_columns(report.search, "front", "verdict")
        candidates = columns.markdown(rows, attrgetter("is_pick"))
    return render_template(
        "report.md", context=context, report=report, badge=Markup(badge_markdown(report, f"{report.stem}.svg")),
        checks=Markup(CHECKS.markdown(report.verdict.checks)),
        measurements=Markup(context.columns("markdown").markdown(report.rows)), candidates=Markup(candidates),
    )  # fmt: skip


def as_html(context: ReportContext) -> str:
    """Return the page. The template escapes all text; the page loads nothing."""
    report, host_rows, device_rows = context.report, context.host_rows, context.device_rows
    checks = report.verdict.checks
    published_checks = [row.latency_ms.check for row in report.rows if row.latency_ms.check is not None]
    published = [*dict.fromkeys(time for check in published_checks for time in check.nearest)]
    check_classes = ["estimated" if c.basis == "estimated" and c.value is not None else "" for c in checks]
    host_columns = context.columns("html host").drop_empty(host_rows, "p90", "p99", "energy")
    candidates = None
    if report.search is not None:
        columns = candidate_columns(report.search, "verdict")
        candidates = columns.html(context.candidates, map(candidate_style, context.candidates))
    return render_template(
        "report.html", context=context, report=report, pictures=draw_pictures(report),
        checks=CHECKS.html(checks, check_classes), candidates=candidates,
        measured=host_columns.html(host_rows, [row.latency_ms.status for row in host_rows]),
        device_rows=context.columns("html device").html(device_rows, [row.latency_ms.status for row in device_rows]),
        sizes=SIZES.html([*report.split_sizes.values()]), facts=FACTS.html(context.facts),
        estimate_checks=ESTIMATE_CHECKS.html(report.estimate_checks), checks_sentence=checks_sentence(report),
        published=PUBLISHED.html(published),
    )  # fmt: skip


def badge_svg(context: ReportContext) -> str:
    """Return a self-contained SVG, 20 pixels high, whose text has a fixed length in every font."""
    labels = "edgeformer", visible(context.badge)
    widths = [round(len(label) * _CHARACTER_WIDTH) + _BADGE_PADDING for label in labels]
    centres = (f"{widths[0] / 2:g}", f"{widths[0] + widths[1] / 2:g}")
    lengths = [width - _BADGE_PADDING for width in widths]
    return render_template(
        "badge.svg", title=" ".join(labels), width=sum(widths), widths=widths,
        labels=list(zip(labels, centres, lengths, strict=True)), colour=_BADGE_COLOURS[context.mark],
    )  # fmt: skip


def render_template(template: str, **content: Any) -> str:
    """Return a document of the folder ``templates``: Markdown, HTML or SVG, with all text escaped."""
    is_markdown = template.endswith(".md")

    def finalize(value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return markdown(str(value)) if is_markdown else visible(value) if isinstance(value, str) else value

    environment = Environment(
        loader=PackageLoader("edgeformer.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=not is_markdown, finalize=finalize,
    )  # fmt: skip
    environment.filters["line"] = lambda text: Markup(markdown_line(text))
    return environment.get_template(template).render(**content)


def print_report(report: Report, files: Sequence[Path], console: Console, *, has_verdict: bool = False) -> None:
    """Print the tables, the verdict, the notes, the report's files, and the candidates of a choice.

    ``has_verdict``: :func:`print_verdict` has printed estimates and verdict already.
    """
    context = ReportContext(report)
    rows = [row for row in context.host_rows if row.phase != "cold"]
    # An artifact that was left out of the verdict and did not run on this host has a note and no figures.
    rows = [row for row in rows if row.artifact not in report.left_out or row.latency_ms.status != "unavailable"]
    has_runtimes = len({row.provider for row in rows}) > 1
    columns = context.columns("terminal host").omit(*([] if has_runtimes else ["provider"]))
    host = f"{report.host.get('cpu', 'CPU')}, {report.host.get('cores', '?')} cores"
    where = "on this host" if report.judged_from is None else "elsewhere"
    title = f"{report.run} for {report.device_title}\nmeasured {where}: {'; '.join([host, *context.cautions])}"
    if rows:
        console.print(columns.terminal(title, rows, Text(context.unstable) if context.unstable else None))
    if not has_verdict:
        print_verdict(report, console)
    for note in context.terminal_notes(has_files=bool(files)):
        console.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True)
    if files and not can_draw():
        console.print(f"no pictures: {NO_PICTURE}", soft_wrap=True, markup=False)
    for path in files:
        console.print(f"{'badge  ' if path.suffix == '.svg' else 'report '} {path}", soft_wrap=True, markup=False)
        if path.suffix == ".svg":
            console.print(f"        {badge_markdown(report, f'reports/{path.name}')}", soft_wrap=True, markup=False)

    choice = report.search
    if choice is not None:
        sign = "≥" if metric_named(choice.metric).higher_is_better else "≤"
        bound = f" with {choice.metric} {sign} {choice.bound:g}" if choice.bound is not None else ""
        title = f"Choice: least {choice.minimize}{bound}; {_BASES[choice.basis]}"
        console.print(candidate_columns(choice, "feasible").terminal(title, context.candidates))
        pick = "[green]pick[/green]" if choice.pick is not None else "[red]no pick[/red]"
        console.print(f"{pick} {escape(choice.reason)}", soft_wrap=True)
        for line in choice.not_in_bundle:
            console.print(f"[dim]not in the bundle[/dim] {escape(line)}", soft_wrap=True, highlight=False)


def print_verdict(report: Report, console: Console) -> None:
    """Print the table of estimates, the checks and the verdict."""
    context, checks = ReportContext(report), report.verdict.checks
    estimated = [row for row in context.device_rows if row.latency_ms.status == "estimated"]
    if estimated:
        counts = sorted({row.threads for row in estimated if row.threads is not None})
        threads = f", with {', '.join(map(format_threads, counts))}" if counts else ""
        title = f"NOT MEASURED: estimated for {report.device_title}{threads}"
        caption = Text(f"Figures with {ABOUT} are {context.estimates}.")
        columns = context.columns("terminal device")
        columns = columns.omit(*([] if len({row.provider for row in estimated}) > 1 else ["provider"]))
        console.print(columns.terminal(title, estimated, caption))

    shapes = {f"{check.batch} × {check.seq}" for check in checks if check.batch is not None}
    is_imported = any(row.inputs for row in report.rows)
    shape = f", at {next(iter(shapes))} (batch × tokens)" if len(shapes) == 1 and not is_imported else ""
    shape_column = ("at",) if len(shapes) > 1 else ()
    check_columns = CHECKS.pick("check", "artifact", *shape_column, "limit", "value", "known_by", "result")
    console.print(check_columns.terminal(f"Budget of {report.device}{shape}", checks))
    verdict = (f"Verdict for {report.device}: ", "bold"), (context.status, coloured(context.mark).style)
    console.print(Text.assemble(*verdict, f". {context.sentence}\n"))
