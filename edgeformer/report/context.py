"""Report context: the columns, texts and facts of a profile report that the terminal, Markdown, HTML and CSV share.

An estimate is never written like a measurement: it starts with ≈ and has its range. A missing figure has its reason.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import attrgetter
from textwrap import shorten
from typing import Any, NamedTuple

from rich.text import Text

from edgeformer.artifacts.device import Fact, Peaks
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import cautions
from edgeformer.artifacts.report import (
    Candidate,
    Check,
    Choice,
    EstimateCheck,
    Figure,
    PublishedTime,
    Report,
    Row,
    SizeParts,
)
from edgeformer.artifacts.units import format_bytes, format_threads, format_time
from edgeformer.report import sentences
from edgeformer.report.columns import CHECK_UNITS, Column, TableColumns, figure_text, format_value
from edgeformer.report.sentences import NO_REASON, names_by_reason
from edgeformer.runtimes import provider_facts
from edgeformer.tasks import Metric, all_tasks

_REASON_WIDTH = 80  # characters of a reason in a terminal table; the files hold the full text
_PHASES = {"prefill": " prompt", "decode": " per token"}
UNSTABLE = (
    "unstable: the times changed during the measurement or differ in a second process; close other programs and "
    "measure again"
)
_MAX_WARNING_LINES = 2  # rows with warnings that get a line each in the terminal; more are counted in one line


def check_text(check: Check, *, range_only: bool = False) -> Text:
    """Format a check's value, as :func:`figure_text`."""
    figure = Figure(check.value, check.basis or "unavailable", check.low, check.high)
    return figure_text(figure, CHECK_UNITS.get(check.unit, ""), range_only=range_only)


def shape_text(row: Row, report: Report) -> str:
    """Batch × tokens of a row, with ``prompt`` or ``per token``, and the threads if the report compares thread counts.

    For an imported graph: the sizes of its largest input, and the number of its other inputs.
    """
    shape = f"{row.batch} × {row.seq}"
    if row.inputs:
        shape = " × ".join(map(str, max(row.inputs.values(), key=prod))) or "1"
        shape += f" (+{len(row.inputs) - 1})" if len(row.inputs) > 1 else ""
    # Host rows and device rows may have different thread counts without a comparison of thread counts.
    counts = {other.threads for other in report.rows if other.where == row.where and other.threads is not None}
    threads = f", {format_threads(row.threads)}" if len(counts) > 1 and row.threads is not None else ""
    per_call = _PHASES.get(row.phase, "")
    return f"{shape}{per_call}{threads}"


def names_of_rows(groups: Iterable[Sequence[Row]], *names: str) -> tuple[str, ...]:
    """Return the attributes that tell rows of a group apart: ``names``, and provider and threads if they must."""
    key_of = attrgetter(*names)
    is_enough = all(len({key_of(row) for row in rows}) == len(rows) for rows in groups)
    return names if is_enough else (*names, "provider", "threads")


# First what a narrow window shows without scrolling. In HTML a status is in the cell of its figure.
LAYOUTS = {
    "csv": "artifact precision provider where phase batch seq threads status p50 low high p90 p95 p99 mean cv n stable "
    "device throughput memory_status memory_peak memory_low memory_high energy size reason resident",
    "markdown": "artifact shape where phase status p50_status p90 memory_peak size",
    "html host": "artifact phase shape p50_status provider precision p90 p99 resident memory_peak throughput cv n "
    "energy size",
    "html device": "artifact phase shape p50_status provider precision memory_peak why_unavailable",
    "terminal host": "artifact size provider shape first_call resident p50 p90 throughput memory_peak state",
    "terminal device": "artifact provider shape p50 memory_peak",
}
"""Columns of each document, which :func:`measurement_columns` defines. Those of the CSV are an interface for scripts;
its ``status`` and ``reason`` are the latency's."""


def measurement_columns(report: Report) -> TableColumns[Row]:
    """Return a column for every figure of a row; each document picks the columns that it has space for."""

    # 1. Texts of figures.
    def first_call(row: Row, figure: str) -> Any:
        """Return a figure of the first call of the process that measured ``row``, for the first row of that process."""
        process = attrgetter("where", "artifact", "provider", "threads")
        rows = [other for other in report.rows if other.where == "host" and process(other) == process(row)]
        first = next((other for other in rows if other.phase != "cold"), None)
        cold_row = next((other for other in reversed(rows) if other.phase == "cold"), None)
        return attrgetter(figure)(cold_row) if first is row and cold_row is not None else None

    def latency_with_status(row: Row) -> str:
        if row.latency_ms.status == "unavailable":
            return "unavailable"
        return f"{figure_text(row.latency_ms.figure, 'ms')}{' (unstable)' if row.latency_ms.stable is False else ''}"

    def throughput(row: Row) -> str:
        tokens = " tokens" if row.phase in _PHASES and row.throughput_per_s is not None else ""
        return f"{format_value(row.throughput_per_s, 'per_s')}{tokens}"

    def state(row: Row) -> Text:
        words = {"unavailable": "not measured, see below", "estimated": "estimated"}
        return Text(words.get(row.latency_ms.status, "unstable" if row.latency_ms.stable is False else ""), "yellow")

    # 2. The columns.
    return TableColumns(
        *map(Column, ("artifact", "precision", "where", "phase", "batch", "seq", "threads")),
        Column("provider", heading="runtime", text=lambda row: provider_facts(row.provider).label, leaves=5),
        Column("shape", lambda row: shape_text(row, report), number=True,
               heading="largest input" if any(row.inputs for row in report.rows) else "batch × tokens"),
        Column("status", "latency_ms.status"),
        Column("first_call", lambda row: first_call(row, "latency_ms.p50"), "ms", leaves=2, dash=""),
        Column("resident", lambda row: first_call(row, "conditions.resident_bytes"), "bytes", "opened", leaves=3,
               dash=""),
        Column("p50", "latency_ms.p50", "ms", "typical (p50)", figure=lambda row: row.latency_ms.figure),
        Column("p50_status", "latency_ms.p50", "ms", "typical (p50)", latency_with_status),
        Column("p90", "latency_ms.p90", "ms", "slow (p90)", leaves=4),
        *(Column(name, f"latency_ms.{name}", "ms") for name in ("low", "high", "p95", "p99", "mean")),
        Column("cv", "latency_ms.cv", "share"),
        Column("n", "latency_ms.n", heading="calls", number=True),
        Column("stable", "latency_ms.stable"),
        Column("device", "device_ms", "ms", "on the card"),
        Column("throughput", "throughput_per_s", "per_s", "per second", throughput, leaves=1),
        Column("memory_status", "memory_bytes.status"),
        Column("memory_peak", "memory_bytes.peak", "bytes", "memory", figure=lambda row: Figure(
            row.memory_bytes.peak, row.memory_bytes.status, row.memory_bytes.low, row.memory_bytes.high)),
        *(Column(f"memory_{end}", f"memory_bytes.{end}", "bytes") for end in ("low", "high")),
        Column("energy", "energy_mj.value", "mj"),
        Column("size", "size_bytes", "bytes", leaves=3),
        Column("reason", "latency_ms.reason"),
        Column("why_unavailable", heading="", flows=True, text=lambda row: (
            (row.latency_ms.reason or NO_REASON) if row.latency_ms.status == "unavailable" else "")),
        Column("state", heading="", text=state, flows=True),
    )  # fmt: skip


CHECKS: TableColumns[Check] = TableColumns(
    Column("check", "name"),
    Column("result", "status", mark=True),
    Column("artifact"),
    Column("value", text=check_text, number=True, narrow=lambda check: check_text(check, range_only=True)),
    Column("limit", number=True, text=lambda check: format_value(check.limit, CHECK_UNITS.get(check.unit, ""))),
    Column("at", lambda check: f"{check.batch} × {check.seq}" if check.batch is not None else None, dash=""),
    Column("known_by", lambda check: check.basis if check.value is not None else None, leaves=1),
    Column("why", "reason", flows=True, dash=""),
)
"""Each budget limit of the device with the value that it is compared with."""

SIZES: TableColumns[SizeParts] = TableColumns(
    Column("artifact"),
    Column("embeddings", unit="bytes"),
    Column("block", unit="bytes", heading="layers or shared block"),
    Column("heads", unit="bytes"),
    Column("other", unit="bytes"),
)


FACTS: TableColumns[dict[str, Any]] = TableColumns(
    Column("fact"), Column("value"), Column("checked", heading="checked by"), Column("source", flows=True)
)
"""Facts of the device profile that was used."""


class RankedCandidate(NamedTuple):
    """A candidate of a choice; ``number``: in tables and pictures; ``is_pick``: whether it is the pick."""

    number: int
    is_pick: bool
    candidate: Candidate


def candidate_style(row: RankedCandidate) -> str:
    """Return the CSS classes of a candidate's row."""
    classes = {"estimated": row.candidate.latency_status == "estimated", "pick": row.is_pick}
    return " ".join(name for name, applies in classes.items() if applies)


def ranked_candidates(choice: Choice) -> list[RankedCandidate]:
    """Number the candidates: feasible first, then by latency."""
    order = sorted(
        enumerate(choice.candidates), key=lambda c: (not c[1].feasible, c[1].latency_ms is None, c[1].latency_ms or 0.0)
    )
    return [RankedCandidate(number, index == choice.pick, c) for number, (index, c) in enumerate(order, start=1)]


def metric_named(name: str) -> Metric:
    """Return the metric of a choice. Raises ArtifactError if no registered task has it."""
    for task in all_tasks():
        if task.metric.name == name:
            return task.metric
    raise ArtifactError(f"metric {name!r} belongs to no installed task")


def candidate_columns(choice: Choice, *omitted: str) -> TableColumns[RankedCandidate]:
    """Return the columns of a choice's candidates; runtime, threads and energy only if a candidate has them."""
    metric, providers = metric_named(choice.metric), {c.provider for c in choice.candidates}
    has_intervals = any(candidate.score_low is not None for candidate in choice.candidates)

    def score(row: RankedCandidate) -> str:
        candidate, text = row.candidate, metric.text(row.candidate.score)
        if candidate.score_low is None:
            return text
        return f"{text} ({metric.text(candidate.score_low)} to {metric.text(candidate.score_high)})"

    def latency(row: RankedCandidate) -> str:
        is_shaky = row.candidate.stable is False and row.candidate.latency_status == "measured"
        return f"{figure_text(row.candidate.latency, 'ms', range_only=True)}{' (unstable)' if is_shaky else ''}"

    def verdict(row: RankedCandidate) -> Text:
        candidate = row.candidate
        if not candidate.feasible:
            return Text(shorten(candidate.reason or "not feasible", _REASON_WIDTH, placeholder=" …"), "red")
        remarks = [f"unknown: {', '.join(candidate.unknown)}"] if candidate.unknown else []
        remarks += [f"score of {candidate.scored_as}"] if candidate.scored_as else []
        remarks += [f"scored on {candidate.scored_on}"] if candidate.scored_on else []
        return Text("; ".join(remarks), "yellow") if remarks else Text("feasible", "green")

    columns: TableColumns[RankedCandidate] = TableColumns(
        Column("number", heading="",
               text=lambda row: Text(f"▶ {row.number}", "green") if row.is_pick else Text(f"  {row.number}")),
        Column("artifact", "candidate.artifact"),
        Column("feasible", "candidate.feasible"),
        Column("runtime", lambda row: provider_facts(row.candidate.provider).label if len(providers) > 1 else None),
        Column("threads", "candidate.threads", number=True, leaves=2),
        Column("score", "candidate.score", text=score, number=True,
               heading=f"{metric.name} (95% interval)" if has_intervals else metric.name,
               narrow=lambda row: metric.text(row.candidate.score)),
        Column("latency", "candidate.latency_ms", "ms", text=latency),
        Column("size", "candidate.size_bytes", "bytes"),
        Column("memory", "candidate.memory_bytes", "bytes", leaves=1, text=lambda row: figure_text(
            Figure(row.candidate.memory_bytes, row.candidate.latency_status), "bytes")),
        Column("energy", "candidate.energy_mj", "mj", leaves=1),
        Column("front", "candidate.on_front", text=lambda row: "●" if row.candidate.on_front else "", leaves=3),
        Column("verdict", "candidate.reason", heading="", text=verdict, flows=True),
    )  # fmt: skip
    return columns.omit(*omitted).drop_empty(ranked_candidates(choice), "runtime", "threads", "energy")


ESTIMATE_CHECKS: TableColumns[EstimateCheck] = TableColumns(
    Column("artifact"),
    Column("shape", lambda check: f"{check.batch} × {check.seq}", heading="batch × tokens", number=True),
    Column("phase"),
    Column("measured", "measured_ms", "ms"),
    Column("estimated", "estimated_ms", "ms",
           figure=lambda check: Figure(check.estimated_ms, "estimated", check.low_ms, check.high_ms)),
    Column("error", layout="{:+.0%}"),
    Column("inside", "is_inside", heading="inside the range"),
)  # fmt: skip
"""Estimates beside measurements on the device."""


PUBLISHED: TableColumns[PublishedTime] = TableColumns(
    Column("model"),
    Column("runtime"),
    Column("precision"),
    Column("shape", lambda time: f"{time.batch} × {time.size}", heading="batch × tokens or pixels", number=True),
    Column("phase"),
    Column("published", "ms", "ms"),
    Column("source", flows=True),
)
"""Published times of the device."""


def missing_measurements(report: Report) -> list[tuple[str, str]]:
    """Return what was not measured, and why; equal reasons together."""
    gaps: list[tuple[str, str]] = []
    for row in report.rows:
        device = " on the device" if row.where == "device" else ""
        name, latency = f"{row.artifact} at {shape_text(row, report)}{device}", row.latency_ms
        if latency.status != "measured":  # the figures below are missing for the same reason
            is_absent = latency.status == "estimated" and not report.on_target
            absent = f"; this machine has no {report.device_title}" if is_absent else ""
            gaps.append((f"latency of {name}", (latency.reason or NO_REASON) + absent))
        elif row.phase != "cold":  # a cold row is a single call
            if latency.reason:
                # The table has the number of calls; without it rows have the same reason.
                missing = re.sub(r"^[\d,]+ calls?: (.*)", r"too few calls: \1", latency.reason)
                gaps.append((f"percentiles of {name}", missing))
            for kind, figure in (("memory", row.memory_bytes), ("energy", row.energy_mj)):
                if figure.status == "unavailable":
                    gaps.append((f"{kind} of {name}", figure.reason or NO_REASON))
    unsplit = dict.fromkeys(row.artifact for row in report.rows if row.artifact not in report.split_sizes)
    reason = "bundle.json does not record it for engines, imported ONNX files and exports of earlier versions"
    gaps += [(f"parts of the size of {artifact}", reason) for artifact in unsplit]
    unknown = [check for check in report.verdict.checks if check.status == "unknown"]
    gaps += [(f"check of {check.name} of {check.artifact}", check.reason or NO_REASON) for check in unknown]
    return [
        (", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more", reason)
        for reason, names in names_by_reason(gaps).items()
    ]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_FACT_TEXTS: dict[str, Callable[[Any], str]] = {
    "bandwidth_bytes_per_s": lambda rate: f"{rate / 1e9:.4g} GB/s",
    "launch_overhead_us": lambda us: f"{us:g} µs",
    "power": lambda power: f"{power.low_w:g} to {power.high_w:g} W",
    "clocks_hz": lambda clocks: (
        f"{clocks.at_low_w / 1e9:.4g} to {clocks.at_high_w / 1e9:.4g} GHz; "
        f"{clocks.at_peaks / 1e9:.4g} GHz for the peaks"
    ),
    "peaks": lambda rate: f"{rate / 1e12:.3g} T/s" if rate >= 1e12 else f"{rate / 1e9:.3g} G/s",
}


class ReportContext:
    """Everything that the documents of one report show; ``mark`` is the verdict's CSS class."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.status, self.sentence = sentences.verdict_status(report), sentences.verdict_sentence(report)
        self.badge = f"{report.device}: {self.status}"
        self.parameters = f"{report.parameters:,}"
        self.mark = "partial" if report.verdict.is_partial else report.verdict.status
        self.cautions, self.estimates = cautions(report), sentences.estimate_note(report)
        self.host = f"{report.host.get('cpu')}, {report.host.get('cores')} cores, {report.host.get('system')}"
        self.host_rows = [row for row in report.rows if row.where == "host"]
        self.device_rows = [row for row in report.rows if row.where == "device"]
        reasons = [row.latency_ms.reason for row in self.device_rows if row.latency_ms.status == "estimated"]
        self.methods = [reason for reason in dict.fromkeys(reasons) if reason]
        self.measurements = measurement_columns(report)
        self.candidates = ranked_candidates(report.search) if report.search is not None else []
        refused = [row for row in self.candidates if not row.candidate.feasible]
        self.refusals = names_by_reason(
            (f"{row.number} ({row.candidate.artifact})", row.candidate.reason or NO_REASON) for row in refused
        )
        self.warnings = [
            f"{row.artifact} at {shape_text(row, report)}, {row.phase}: {'; '.join(row.latency_ms.warnings)}"
            for row in self.host_rows
            if row.latency_ms.warnings
        ]
        self.unstable = None
        if any(row.latency_ms.stable is False for row in self.host_rows):
            self.unstable = UNSTABLE + ("" if report.on_target else "; the verdict uses the estimates instead")
        self.gaps = missing_measurements(report)
        # Host facts, library versions, and the conditions while the rows were measured, a line each.
        self.environment: list[tuple[str, str]] = []
        for name, value in report.host.items():
            if isinstance(value, dict):
                self.environment += [(f"{name}: {key}", str(e)) for key, e in value.items() if e is not None]
            elif value is not None:
                text = format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
                self.environment.append((name.removesuffix("_bytes").replace("_", " "), text))
        conditions: dict[str, dict[str, None]] = {}
        for name, value in (condition for row in self.host_rows for condition in row.conditions):
            if value is not None and value not in ((), [], {}):
                conditions.setdefault(name, {})[_plain(value)] = None
        for name, values in conditions.items():
            more = [f"and {len(values) - 4} more"] if len(values) > 4 else []
            text = "; ".join([*[*values][:4], *more])
            self.environment.append((f"while measuring: {name.replace('_', ' ')}", text))
        # Every fact of the device profile, with its unit, and what checks it.
        self.facts: list[dict[str, str]] = []
        for name, value in report.profile or ():
            facts = [*value] if isinstance(value, Peaks) else [(name, value)]
            for key, fact in facts:
                quantity = re.sub("_(bytes_per_s|bytes|hz|us)$", "", key if key == name else f"peak {key}")
                entry = {"fact": quantity.replace("_", " "), "checked": "", "source": ""}
                if isinstance(fact, Fact):
                    write = _FACT_TEXTS.get(name, format_bytes if name.endswith("_bytes") else _plain)
                    source = "; published: ".join(filter(None, (fact.source, fact.published)))
                    self.facts.append({**entry, "value": write(fact.value), "checked": fact.verified, "source": source})
                elif isinstance(fact, (str, int, float)) and not isinstance(fact, bool):
                    self.facts.append({**entry, "value": _plain(fact)})
        self.created = format_time(report.created)

    def columns(self, layout: str) -> TableColumns[Row]:
        """Return the columns of a document in :data:`LAYOUTS`."""
        return self.measurements.pick(*LAYOUTS[layout].split())

    def terminal_notes(self, *, has_files: bool) -> list[str]:
        """Return the lines below the terminal's tables; without report files also why checks are unknown."""
        report, notes = self.report, [*self.report.notes, *filter(None, [sentences.checks_sentence(self.report)])]
        if not has_files:
            unknown = [check for check in report.verdict.checks if check.status == "unknown"]
            reasons = names_by_reason((f"{c.name} of {c.artifact}", c.reason or NO_REASON) for c in unknown)
            notes += [f"unknown: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
        # The report's notes already say what was left out of the verdict.
        absent = [r for r in report.rows if r.latency_ms.status == "unavailable" and r.artifact not in report.left_out]
        reasons = names_by_reason((row.artifact, row.latency_ms.reason or NO_REASON) for row in absent)
        notes += [f"{', '.join(names)}: not measured: {reason}" for reason, names in reasons.items()]
        # Warnings of measured and of estimated rows apart, since only a measurement is noisy. Cold rows are single
        # calls, whose warnings the other rows of their process repeat.
        for status in ("measured", "estimated"):
            rows = [row for row in report.rows if row.phase != "cold" and row.latency_ms.status == status]
            warned = [row for row in rows if row.latency_ms.warnings]
            if len(warned) <= _MAX_WARNING_LINES:
                estimate = "estimate of " if status == "estimated" else ""
                notes += [
                    f"{estimate}{row.artifact} {shape_text(row, report)}: {'; '.join(row.latency_ms.warnings)}"
                    for row in warned
                ]
                continue
            kind = "estimates have a warning"
            if status == "measured":
                kind = f"rows have a warning, {sum(row.latency_ms.stable is False for row in warned)} are unstable"
            where = "in the report" if has_files else "in the rows of the report"
            example = warned[0].latency_ms.warnings[0]
            notes.append(f"{len(warned)} of {len(rows)} {kind}, e.g. {example}; all warnings are {where}")
        return notes
