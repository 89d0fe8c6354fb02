"""A profile report as one HTML file that needs nothing else: verdict, pictures, tables, environment, and the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from edgeformer.artifacts.data_warnings import cautions
from edgeformer.artifacts.report import Check, Report, Row
from edgeformer.artifacts.units import format_bytes, visible
from edgeformer.report.columns import Column, Columns, PageTable
from edgeformer.report.pictures import draw_pictures
from edgeformer.report.report_tables import CHECKS, SIZES, Numbered, candidates, measurements
from edgeformer.report.words import (
    badge_text,
    estimate_words,
    in_words,
    not_measured,
    numbered,
    rate_words,
    shape_words,
    split_sizes,
    verdict_words,
)

# What a narrow window shows without scrolling comes first; a status stands in the cell of its figure.
_NOT_MEASURED = ("artifact", "shape", "p50_status", "phase", "precision", "memory_peak", "why_not")
_MEASURED = (
    "artifact", "shape", "p50_status", "phase", "provider", "precision", "p90", "p99", "memory_peak", "throughput",
    "cv", "n", "energy", "size",
)  # fmt: skip


Fact = tuple[str, str, str, str]
"""Name, value, checked on the device (yes or no), source."""

FACTS: Columns[Fact] = Columns(
    [
        Column("fact", lambda fact: fact[0]),
        Column("value", lambda fact: fact[1]),
        Column("checked_on_the_device", lambda fact: fact[2]),
        Column("source", lambda fact: fact[3], wraps=True),
    ]
)


def as_html(report: Report) -> str:
    """The page. Everything that comes from the report is escaped; nothing in it is loaded from anywhere."""
    environment = Environment(
        loader=PackageLoader("edgeformer.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(**_context(report))


def _finalize(value: Any) -> Any:
    """Before it is escaped; a drawing is no ``str`` but Markup, and stays as it is."""
    return visible(value) if type(value) is str else value


def _context(report: Report) -> dict[str, Any]:
    rows = [row for row in report.rows if row.where == "host"]
    device = [row for row in report.rows if row.where == "device"]
    columns, status = (
        measurements(report),
        attrgetter("latency_ms.status"),
    )  # rows look like what is known of their time
    return {
        "report": report,
        "badge": badge_text(report),
        "verdict": verdict_words(report),
        "mark": "partial" if report.verdict.is_partial else report.verdict.status,
        "sentence": in_words(report),
        "cautions": cautions(report),
        "estimates": estimate_words(report),
        "checks": CHECKS.page(report.verdict.checks, _estimated),
        "pictures": draw_pictures(report),
        "measured": columns.pick(*_MEASURED).known_in(rows, "p90", "p99", "energy").page(rows, status),
        # How an estimate was made is said once, below the table.
        "device_rows": columns.pick(*_NOT_MEASURED).page(device, status),
        "methods": dict.fromkeys(r.latency_ms.reason for r in device if r.latency_ms.status == "estimated"),
        "sizes": SIZES.page(split_sizes(report)),
        "candidates": _candidates(report),
        "refusals": _refusals(report),
        "environment": [*_environment(report), *_conditions(rows)],
        "facts": FACTS.page(_profile_facts(report.profile)),
        "gaps": not_measured(report),
        "warnings": [
            f"{row.artifact} at {shape_words(row, report)}, {row.phase}: {'; '.join(row.latency_ms.warnings)}"
            for row in rows
            if row.latency_ms.warnings
        ],
    }


def _estimated(check: Check) -> str:
    return "estimated" if check.basis == "estimated" and check.value is not None else ""


def _candidates(report: Report) -> PageTable | None:
    """Numbered as in the picture."""
    search = report.search
    if search is None:
        return None

    def kind(row: Numbered) -> str:
        estimated = ["estimated"] if row[2].latency_status == "estimated" else []
        return " ".join([*estimated, *(["pick"] if row[1] == search.pick else [])])

    about = ("number", "artifact", "feasible", "runtime", "threads", "score", "latency", "size", "memory", "energy")
    return candidates(search, *about, "front").page(numbered(search), kind)


def _refusals(report: Report) -> list[tuple[str, str]]:
    """Return why candidates are not feasible: numbers and names as in their table, equal reasons together."""
    by_reason: dict[str, list[str]] = {}
    for number, _, candidate in numbered(report.search) if report.search is not None else ():
        if not candidate.feasible:
            by_reason.setdefault(candidate.reason or "no reason was given", []).append(
                f"{number} ({candidate.artifact})"
            )
    return [(", ".join(names), reason) for reason, names in by_reason.items()]


def _environment(report: Report) -> list[tuple[str, str]]:
    """Host facts and library versions, one line each."""
    lines = []
    for name, value in report.host.items():
        if isinstance(value, dict):
            lines += [(f"{name}: {key}", str(entry)) for key, entry in value.items() if entry is not None]
        elif value is not None:
            shown = format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
            lines.append((name.removesuffix("_bytes").replace("_", " "), shown))
    return lines


def _conditions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What was the same, and the different values of what was not, while rows were measured."""
    seen: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, value in row.conditions.items():
            if value is not None and value != [] and value != {}:
                seen.setdefault(name, {})[_plain(value)] = None
    lines = []
    for name, values in seen.items():
        more = [f"and {len(values) - 4} more"] if len(values) > 4 else []
        lines.append((f"while measuring: {name.replace('_', ' ')}", "; ".join([*[*values][:4], *more])))
    return lines


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _profile_facts(profile: dict[str, Any], prefix: str = "") -> list[Fact]:
    """Every fact of a device profile as it was used, nested ones with their path."""
    facts: list[Fact] = []
    for name, entry in profile.items():
        title = f"{prefix}{name}".replace("_bytes_per_s", "").replace("_bytes", "").replace("_", " ")
        if isinstance(entry, dict) and {"value", "source"} <= entry.keys():
            shown = _with_unit(f"{prefix}{name}", entry["value"])
            facts.append((title, shown, "yes" if entry.get("verified") else "no", str(entry["source"])))
        elif name == "peaks" and isinstance(entry, dict):
            facts += _profile_facts(entry, "peak ")
        elif isinstance(entry, (str, int, float)) and not isinstance(entry, bool):
            facts.append((title, _plain(entry), "", ""))
    return facts


def _with_unit(name: str, value: object) -> str:
    """Rates and sizes with the unit that people know them in."""
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if name.endswith("bytes_per_s") and isinstance(value, (int, float)):
        return f"{value / 1e9:.4g} GB/s"
    if name.startswith("peak ") and isinstance(value, (int, float)):
        return rate_words(float(value))
    return _plain(value)
