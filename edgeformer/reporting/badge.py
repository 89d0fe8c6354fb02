"""The verdict as a badge: a small SVG that needs nothing else, and the line of Markdown that shows it."""

from __future__ import annotations

from html import escape

from edgeformer.formats.report import Report
from edgeformer.reporting.report_words import has_estimates

_COLOURS = {"pass": "#2e7d46", "fail": "#b3372f", "unknown": "#69707a"}
_CHARACTER, _PADDING = 6.6, 12


def badge_text(report: Report) -> str:
    """``rtx4050: fail``; a verdict that rests on estimates says so."""
    rests = any(check.basis == "estimated" for check in report.verdict.checks) and report.verdict.status != "unknown"
    return f"{report.device}: {report.verdict.status}{' (estimated)' if rests and has_estimates(report) else ''}"


def badge_markdown(report: Report, file: str) -> str:
    """One line of GitHub-flavoured Markdown that shows the badge in ``file``."""
    return f"![edgeformer {badge_text(report)}]({file})"


def badge_svg(report: Report) -> str:
    """A self-contained SVG, 20 pixels high: green, red or grey. Its text has a fixed length, whatever the font."""
    right = badge_text(report)
    widths = [round(len(text) * _CHARACTER) + _PADDING for text in ("edgeformer", right)]
    total, colour = sum(widths), _COLOURS[report.verdict.status]
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
