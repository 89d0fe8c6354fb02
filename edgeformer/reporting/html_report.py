"""A profile report as one HTML file that needs nothing else: verdict, pictures, tables, environment, and the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from edgeformer.formats.report import Candidate, Check, Report, Row
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.reporting.badge import badge_text
from edgeformer.reporting.caution import cautions
from edgeformer.reporting.html_pictures import draw_pictures
from edgeformer.reporting.report_words import (
    ABOUT,
    DASH,
    estimate_words,
    in_words,
    latency_words,
    memory_words,
    not_measured,
    numbered,
    quantity,
    rate_words,
    runtime_words,
    shape_words,
    split_sizes,
    state_words,
    value_words,
)


def as_html(report: Report) -> str:
    """The page. Everything that comes from the report is escaped; nothing in it is loaded from anywhere."""
    environment = Environment(
        loader=PackageLoader("edgeformer.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(**_context(report))


def _context(report: Report) -> dict[str, Any]:
    rows = [row for row in report.rows if row.where == "host"]
    device = [row for row in report.rows if row.where == "device"]
    return {
        "report": report,
        "badge": badge_text(report),
        "sentence": in_words(report),
        "cautions": cautions(report),
        "estimates": estimate_words(report),
        "checks": [(_check_cells(check), check) for check in report.verdict.checks],
        "pictures": draw_pictures(report),
        "measured": [(_cells(row, report), row.latency_ms.status) for row in rows],
        "device_rows": [(_device_cells(row, report), row.latency_ms.status) for row in device],
        "methods": dict.fromkeys(r.latency_ms.reason for r in device if r.latency_ms.status == "estimated"),
        "sizes": split_sizes(report),
        "candidates": _candidates(report),
        "environment": [*_environment(report), *_conditions(rows)],
        "facts": profile_facts(report.profile),
        "gaps": not_measured(report),
        "warnings": [
            f"{row.artifact} at {shape_words(row, report)}, {row.phase}: {'; '.join(row.latency_ms.warnings)}"
            for row in rows
            if row.latency_ms.warnings
        ],
        "bytes": format_bytes,
    }


def _check_cells(check: Check) -> list[str]:
    """Of a check, what stands beside its name and its result."""
    basis = (check.basis or DASH) if check.value is not None else DASH
    return [check.artifact, quantity(check.limit, check), value_words(check), basis, check.reason or ""]


def _ms(value: float | None) -> str:
    return DASH if value is None else format_milliseconds(value)


def _cells(row: Row, report: Report) -> list[str]:
    """One cell per column of the page's table of measurements."""
    t = row.latency_ms
    energy = f"{row.energy_mj.value:.3g} mJ" if row.energy_mj.value is not None else DASH
    throughput = f"{row.throughput_per_s:,.0f}" if row.throughput_per_s is not None else DASH
    spread = f"{t.cv:.1%}" if t.cv is not None else DASH
    about = [row.artifact, row.precision, runtime_words(row.provider), row.phase, shape_words(row, report), t.status]
    times = [latency_words(t), _ms(t.p90), _ms(t.p99), spread, f"{t.n:,}", throughput]
    # The reason of an absent figure can be long; it stands under "What was not measured".
    state = "see below" if row.latency_ms.status == "unavailable" else state_words(row)
    return [*about, *times, memory_words(row.memory_bytes), energy, format_bytes(row.size_bytes), state]


def _device_cells(row: Row, report: Report) -> list[str]:
    """One cell per column of the page's table of the device's rows; how an estimate was made is said once, below."""
    t = row.latency_ms
    shape = (row.artifact, row.precision, row.phase, shape_words(row, report))
    return [*shape, t.status, latency_words(t), memory_words(row.memory_bytes), _why_none(row)]


def _why_none(row: Row) -> str:
    return (row.latency_ms.reason or "no reason was given") if row.latency_ms.status == "unavailable" else ""


def _candidates(report: Report) -> list[tuple[list[str], bool, Candidate]]:
    """Cells, is it the pick, and the candidate; numbered as in the picture."""
    search = report.search
    if search is None:
        return []
    found = []
    for number, position, c in numbered(search):
        about = f"{ABOUT} " if c.latency_status == "estimated" else ""
        time = f"{about}{_ms(c.latency_ms)}{f' ms ({c.latency_status})' if c.latency_ms is not None else ''}"
        cells = [
            str(number), c.artifact, runtime_words(c.provider), str(c.threads) if c.threads else DASH,
            f"{c.score:.4f}" if c.score is not None else DASH, time, format_bytes(c.size_bytes),
            format_bytes(c.memory_bytes), "yes" if c.feasible else "no", "yes" if c.on_front else "no", c.reason or "",
        ]  # fmt: skip
        found.append((cells, position == search.pick, c))
    return found


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
    return [(f"while measuring: {name.replace('_', ' ')}", _some(list(values))) for name, values in seen.items()]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _some(values: list[str]) -> str:
    return "; ".join(values[:4]) + (f"; and {len(values) - 4} more" if len(values) > 4 else "")


def profile_facts(profile: dict[str, Any], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """name, value, checked on the device (yes or no), source of every fact, nested ones with their path."""
    facts: list[tuple[str, str, str, str]] = []
    for name, entry in profile.items():
        title = f"{prefix}{name}".replace("_bytes_per_s", "").replace("_bytes", "").replace("_", " ")
        if isinstance(entry, dict) and {"value", "source"} <= entry.keys():
            shown = _with_unit(f"{prefix}{name}", entry["value"])
            facts.append((title, shown, "yes" if entry.get("verified") else "no", str(entry["source"])))
        elif name == "peaks" and isinstance(entry, dict):
            facts += profile_facts(entry, "peak ")
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
