"""The tables of a profile report: measurements, checks, what a search compared, sizes, facts; and its terminal form."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from textwrap import shorten

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from edgeformer.artifacts.data_warnings import cautions
from edgeformer.artifacts.report import Candidate, Check, Report, Row, Search, SizeParts
from edgeformer.artifacts.units import format_bytes, format_milliseconds
from edgeformer.report.canvas import NO_PICTURE
from edgeformer.report.columns import DASH, Column, Columns, coloured
from edgeformer.report.words import (
    ABOUT,
    absent_words,
    at_words,
    badge_markdown,
    estimate_words,
    in_words,
    latency_range,
    latency_words,
    memory_range,
    memory_words,
    metric_named,
    numbered,
    quantity,
    shape_heading,
    shape_words,
    state_words,
    thread_words,
    value_range,
    value_words,
    verdict_words,
    warning_words,
)
from edgeformer.runtimes import provider_facts

MEASUREMENTS_CSV = (
    "artifact", "precision", "provider", "where", "phase", "batch", "seq", "threads", "status", "p50", "low",
    "high", "p90", "p95", "p99", "mean", "cv", "n", "stable", "device", "throughput", "memory_status", "memory_peak",
    "memory_low", "memory_high", "energy", "size", "reason",
)  # fmt: skip
"""Scripts rely on these; ``status`` and ``reason`` are the latency's."""

_KINDS = {".png": "picture", ".svg": "badge  "}
_BASES = {
    "measured": "times measured on the device",
    "estimated": "times marked ≈ are estimates for the device",
    "host": "times of THIS HOST, which say nothing certain of the device",
}
_REASON = 80
"""Characters of a reason on the terminal; the whole one is in the files."""


def measurements(report: Report) -> Columns[Row]:
    """Every figure of a row; each document picks those that it has room for."""
    starts = _first_calls(report)

    def first_call(row: Row) -> str:
        return f"{format_milliseconds(starts[id(row)])} ms" if id(row) in starts else ""

    return Columns(
        [
            *(Column(name, attrgetter(name)) for name in ("artifact", "precision")),
            Column("provider", attrgetter("provider"), "", "runtime", _runtime, leaves=5),
            *(Column(name, attrgetter(name)) for name in ("where", "phase", "batch", "seq")),
            Column("shape", lambda row: shape_words(row, report), heading=shape_heading(report), number=True),
            Column("threads", attrgetter("threads")),
            Column("status", attrgetter("latency_ms.status")),
            Column("first_call", lambda row: starts.get(id(row)), "ms", text=first_call, leaves=2),
            Column("p50", attrgetter("latency_ms.p50"), "ms", "typical (p50)", _typical, narrow=_within),
            Column("p50_status", attrgetter("latency_ms.p50"), "ms", "typical (p50)", _typical_with_status),
            *(Column(name, attrgetter(f"latency_ms.{name}"), "ms") for name in ("low", "high")),
            Column("p90", attrgetter("latency_ms.p90"), "ms", "slow (p90)", leaves=4),
            *(Column(name, attrgetter(f"latency_ms.{name}"), "ms") for name in ("p95", "p99", "mean")),
            Column("cv", attrgetter("latency_ms.cv"), "share"),
            Column("n", attrgetter("latency_ms.n"), heading="calls", number=True),
            Column("stable", attrgetter("latency_ms.stable")),
            Column("device", attrgetter("device_ms"), "ms", "on the card"),
            Column("throughput", attrgetter("throughput_per_s"), "per_s", "per second", leaves=1),
            Column("memory_status", attrgetter("memory_bytes.status")),
            Column("memory_peak", attrgetter("memory_bytes.peak"), "bytes", "memory", _memory, narrow=_memory_within),
            *(Column(f"memory_{end}", attrgetter(f"memory_bytes.{end}"), "bytes") for end in ("low", "high")),
            Column("energy", attrgetter("energy_mj.value"), "mj"),
            Column("size", attrgetter("size_bytes"), "bytes", leaves=3),
            Column("reason", attrgetter("latency_ms.reason")),
            Column("why_not", _why_not, heading="", wraps=True),
            Column("state", _state, heading="", text=lambda row: Text(_state(row), "yellow"), flows=True),
        ]
    )


def _first_calls(report: Report) -> dict[int, float]:
    """Identity of a process's first steady row → milliseconds of its first call."""

    def process(row: Row) -> tuple[str, str, int | None]:
        return row.artifact, row.provider, row.threads

    here = [row for row in report.rows if row.where == "host"]
    cold = {process(row): row.latency_ms.p50 for row in here if row.phase == "cold"}
    found: dict[int, float] = {}
    for row in here:
        if row.phase != "cold":
            first = cold.pop(process(row), None)
            if first is not None:
                found[id(row)] = first
    return found


def _runtime(row: Row) -> str:
    return provider_facts(row.provider).label


def _typical(row: Row) -> Text:
    return _styled(latency_words(row.latency_ms), row.latency_ms.status)


def _typical_with_status(row: Row) -> str:
    """The figure and its status in one cell, so that no layout can part them; estimates are marked by their sign."""
    latency = row.latency_ms
    if latency.status == "unavailable":
        return "unavailable"
    return latency_words(latency) + (" (unstable)" if latency.stable is False else "")


def _within(row: Row) -> Text:
    return _styled(latency_range(row.latency_ms), row.latency_ms.status)


def _memory(row: Row) -> Text:
    return _styled(memory_words(row.memory_bytes), row.memory_bytes.status)


def _memory_within(row: Row) -> Text:
    return _styled(memory_range(row.memory_bytes), row.memory_bytes.status)


def _styled(words: str, status: str) -> Text:
    return Text(words, "italic" if status == "estimated" else "")


def _state(row: Row) -> str:
    """A long reason would make the table a narrow tower; it stands below it."""
    return "unavailable, see below" if row.latency_ms.status == "unavailable" else state_words(row)


def _why_not(row: Row) -> str:
    return (row.latency_ms.reason or "no reason was given") if row.latency_ms.status == "unavailable" else ""


CHECKS: Columns[Check] = Columns(
    [
        Column("check", attrgetter("name")),
        Column("result", attrgetter("status"), mark=True),
        Column("artifact", attrgetter("artifact")),
        Column("limit", attrgetter("limit"), text=lambda check: quantity(check.limit, check), number=True),
        Column("at", attrgetter("batch"), text=at_words),
        Column("value", attrgetter("value"), text=value_words, number=True, narrow=value_range),
        Column("known_by", lambda check: check.basis if check.value is not None else None, leaves=1),
        Column("why", attrgetter("reason"), text=lambda check: check.reason or "", wraps=True),
    ]
)
"""Each limit of the device against what is known."""

SIZES: Columns[SizeParts] = Columns(
    [
        Column("artifact", attrgetter("artifact")),
        Column("embeddings", attrgetter("embeddings"), "bytes"),
        Column("block", attrgetter("block"), "bytes", "layers or shared block"),
        Column("heads", attrgetter("heads"), "bytes"),
        Column("other", attrgetter("other"), "bytes"),
    ]
)

Numbered = tuple[int, int, Candidate]
"""Number in tables and pictures, position in the search, candidate."""


def candidates(search: Search, *names: str) -> Columns[Numbered]:
    """Columns of what a search compared, without those in which nothing would stand."""
    metric, several = metric_named(search.metric), len({c.provider for c in search.candidates}) > 1
    has_intervals = any(candidate.score_low is not None for candidate in search.candidates)

    def score(row: Numbered) -> str:
        candidate, text = row[2], metric.text(row[2].score)
        if candidate.score_low is None:
            return text
        return f"{text} ({metric.text(candidate.score_low)} to {metric.text(candidate.score_high)})"

    def number(row: Numbered) -> Text:
        return Text(f"▶ {row[0]}", "green") if row[1] == search.pick else Text(f"  {row[0]}")

    columns = Columns(
        [
            Column[Numbered]("number", lambda row: row[0], heading="", text=number),
            Column("artifact", lambda row: row[2].artifact),
            Column("runtime", lambda row: provider_facts(row[2].provider).label if several else None),
            Column("threads", lambda row: row[2].threads, number=True, leaves=2),
            Column(
                "score",
                lambda row: row[2].score,
                heading=metric.name + (" (95 % interval)" if has_intervals else ""),
                text=score,
                narrow=lambda row: metric.text(row[2].score),
                number=True,
            ),
            Column("latency", lambda row: row[2].latency_ms, "ms", text=_candidate_latency),
            Column("size", lambda row: row[2].size_bytes, "bytes"),
            Column("memory", lambda row: row[2].memory_bytes, "bytes", text=_candidate_memory, leaves=1),
            Column("energy", lambda row: row[2].energy_mj, "mj", leaves=1),
            Column("front", lambda row: row[2].on_front, text=lambda row: "●" if row[2].on_front else "", leaves=3),
            Column("feasible", lambda row: row[2].feasible),
            Column("verdict", lambda row: row[2].reason, heading="", text=_verdict, flows=True),
        ]
    )
    return columns.pick(*names).known_in(numbered(search), "runtime", "threads", "energy")


def _candidate_latency(row: Numbered) -> str:
    candidate = row[2]
    if candidate.latency_ms is None:
        return DASH
    text = f"{format_milliseconds(candidate.latency_ms)} ms"
    if candidate.latency_status != "estimated":
        return text + (" (unstable)" if candidate.stable is False else "")
    if candidate.low_ms is None or candidate.high_ms is None:
        return f"{ABOUT} {text}"
    return f"{ABOUT} {format_milliseconds(candidate.low_ms)} to {format_milliseconds(candidate.high_ms)} ms"


def _candidate_memory(row: Numbered) -> str:
    candidate = row[2]
    estimated = candidate.latency_status == "estimated" and candidate.memory_bytes is not None
    return (f"{ABOUT} " if estimated else "") + format_bytes(candidate.memory_bytes)


def _verdict(row: Numbered) -> Text:
    candidate = row[2]
    if not candidate.feasible:
        return Text(shorten(candidate.reason or "not feasible", _REASON, placeholder=" …"), "red")
    parts = [Text(f"not known: {', '.join(candidate.unknown)}", "yellow")] if candidate.unknown else []
    parts += [Text(f"score of {candidate.scored_as}", "dim")] if candidate.scored_as else []
    parts += [Text(f"scored on {candidate.scored_on}", "dim")] if candidate.scored_on else []
    return Text("; ").join(parts) if parts else Text("feasible", "green")


def print_report(report: Report, files: Sequence[Path], console: Console) -> None:
    """Print the whole report.

    Args:
        report: what `profile` found.
        files: where it was written.
        console: of the terminal.
    """
    _print_rows(report, console)
    shapes = {at_words(check) for check in report.verdict.checks} - {""}
    at, wrapped = ("at",) if len(shapes) > 1 else (), any(row.inputs for row in report.rows)
    terminal = CHECKS.pick("check", "artifact", *at, "limit", "value", "known_by", "result")
    said = f", at {next(iter(shapes))} ({shape_heading(report)})" if len(shapes) == 1 and not wrapped else ""
    console.print(terminal.terminal(f"Budget of {report.device}{said}", report.verdict.checks))
    verdict = (f"Verdict for {report.device}: ", "bold"), coloured(verdict_words(report))
    console.print(Text.assemble(*verdict, f". {in_words(report)}\n"))
    # Where no files are written, this is all that says why.
    unknown: dict[str, list[str]] = {}
    for check in report.verdict.checks if not files else ():
        if check.status == "unknown":
            unknown.setdefault(check.reason or "no reason was given", []).append(f"{check.name} of {check.artifact}")
    why = [f"not known: {', '.join(names)}: {reason}" for reason, names in unknown.items()]
    for note in (*report.notes, *why, *absent_words(report), *warning_words(report, bool(files))):
        console.print(f"[yellow]note[/yellow] {escape(note)}", soft_wrap=True)
    if files and not any(path.suffix == ".png" for path in files):
        console.print(f"no pictures: {NO_PICTURE}", soft_wrap=True, markup=False)
    for path in files:
        console.print(f"{_KINDS.get(path.suffix, 'report ')} {path}", soft_wrap=True, markup=False)
        if path.suffix == ".svg":
            console.print(f"        {badge_markdown(report, f'reports/{path.name}')}", soft_wrap=True, markup=False)


def _print_rows(report: Report, console: Console) -> None:
    columns, warned = measurements(report), "".join(f"; {caution}" for caution in cautions(report))
    host = f"{report.host.get('cpu', 'CPU')}, {report.host.get('cores', '?')} cores"
    where = "on this host" if report.judged_from is None else "elsewhere"
    title = f"{report.run} for {report.device_title}\nmeasured {where}: {host}{warned}"
    here = [row for row in report.rows if row.where == "host" and row.phase != "cold"]
    # What was left out of the verdict and did not run here either has a line below, and no figure.
    here = [row for row in here if row.artifact not in report.left_out or row.latency_ms.status != "unavailable"]
    several = ("provider",) if len({row.provider for row in here}) > 1 else ()
    figures = ("first_call", "p50", "p90", "throughput", "memory_peak", "state")
    console.print(columns.pick("artifact", "size", *several, "shape", *figures).terminal(title, here))
    guessed = [row for row in report.rows if row.where == "device" and row.latency_ms.status == "estimated"]
    if guessed:
        known = sorted({row.threads for row in guessed if row.threads is not None})
        counts = ", ".join(map(thread_words, known))
        title = f"NOT MEASURED: estimated for {report.device_title}" + (f", with {counts}" if counts else "")
        shown = columns.pick("artifact", "shape", "p50", "memory_peak")
        console.print(shown.terminal(title, guessed, Text(estimate_words(report) or "")))


def print_search(search: Search, console: Console) -> None:
    """Print every candidate, the pick and why, and what export could add.

    Args:
        search: what `profile --search` found.
        console: of the terminal.
    """
    metric = metric_named(search.metric)
    sign = "≥" if metric.higher_is_better else "≤"
    bound = f" with {search.metric} {sign} {search.bound:g}" if search.bound is not None else ""
    title = f"Search: least {search.minimize}{bound}; {_BASES[search.basis]}"
    about = ("number", "artifact", "runtime", "threads")
    shown = candidates(search, *about, "score", "latency", "size", "memory", "energy", "front", "verdict")
    console.print(shown.terminal(title, numbered(search)))
    pick = "[green]pick[/green]" if search.pick is not None else "[red]no pick[/red]"
    console.print(f"{pick} {escape(search.reason)}", soft_wrap=True)
    for line in search.not_in_bundle:
        console.print(f"[dim]not in the bundle[/dim] {escape(line)}", soft_wrap=True, highlight=False)
