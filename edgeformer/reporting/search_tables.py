"""A search on the terminal: every candidate, the Pareto front, the pick and why, and what export could add."""

from __future__ import annotations

from textwrap import shorten

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from edgeformer.formats.report import Candidate, Search
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.reporting.tables import DASH, new_table

_BASES = {
    "measured": "times measured on the device",
    "estimated": "times marked ≈ are estimates for the device",
    "host": "times of THIS HOST, which say nothing certain of the device",
}

_REASON = 80
"""Characters of a reason in the table; the whole one is in the JSON."""


def print_search(search: Search, console: Console) -> None:
    """Print the candidates and the pick."""
    console.print(search_table(search))
    pick = "[green]pick[/green]" if search.pick is not None else "[red]no pick[/red]"
    console.print(f"{pick} {escape(search.reason)}", soft_wrap=True)
    for line in search.not_in_bundle:
        console.print(f"[dim]not in the bundle[/dim] {escape(line)}", soft_wrap=True, highlight=False)


def search_table(search: Search) -> Table:
    """One line per candidate, the fastest first; ● is on the Pareto front of score, latency and size."""
    threads = any(candidate.threads is not None for candidate in search.candidates)
    providers = len({candidate.provider for candidate in search.candidates}) > 1
    energy = any(candidate.energy_mj is not None for candidate in search.candidates)
    columns = [
        "",
        "artifact",
        *(("runtime",) if providers else ()),
        *(("threads",) if threads else ()),
        search.metric,
        "latency",
        "size",
        "memory",
        *(("energy",) if energy else ()),
        "front",
        "",
    ]
    table = new_table(_title(search), *columns, right=("threads", search.metric, "latency", "size", "memory", "energy"))
    for position in _by_latency(search):
        candidate = search.candidates[position]
        cells = [
            "[green]▶[/]" if position == search.pick else "",
            escape(candidate.artifact),
            *((escape(candidate.provider.removesuffix("ExecutionProvider")),) if providers else ()),
            *((DASH if candidate.threads is None else str(candidate.threads),) if threads else ()),
            _score(candidate.score, search.metric),
            _latency(candidate),
            format_bytes(candidate.size_bytes),
            _memory(candidate),
            *((_energy(candidate.energy_mj),) if energy else ()),
            "●" if candidate.on_front else "",
            _verdict(candidate),
        ]
        table.add_row(*cells)
    return table


def _title(search: Search) -> str:
    sign = "≥" if search.metric == "accuracy" else "≤"
    bound = f" with {search.metric} {sign} {search.bound:g}" if search.bound is not None else ""
    return f"Search: least {search.minimize}{bound}; {_BASES[search.basis]}"


def _by_latency(search: Search) -> list[int]:
    """Positions, the fastest first; those without a time last."""

    def key(position: int) -> tuple[bool, float]:
        latency = search.candidates[position].latency_ms
        return latency is None, latency or 0.0

    return sorted(range(len(search.candidates)), key=key)


def _score(score: float | None, metric: str) -> str:
    return DASH if score is None else f"{score:.4f}" if metric == "accuracy" else f"{score:,.2f}"


def _latency(candidate: Candidate) -> str:
    if candidate.latency_ms is None:
        return DASH
    text = f"{format_milliseconds(candidate.latency_ms)} ms"
    if candidate.latency_status != "estimated":
        return text
    if candidate.low_ms is None or candidate.high_ms is None:
        return f"≈ {text}"
    return f"≈ {format_milliseconds(candidate.low_ms)} to {format_milliseconds(candidate.high_ms)} ms"


def _memory(candidate: Candidate) -> str:
    estimated = candidate.latency_status == "estimated" and candidate.memory_bytes is not None
    return ("≈ " if estimated else "") + format_bytes(candidate.memory_bytes)


def _energy(value: float | None) -> str:
    return DASH if value is None else f"{format_milliseconds(value)} mJ"


def _verdict(candidate: Candidate) -> str:
    if not candidate.feasible:
        return f"[red]{escape(shorten(candidate.reason or 'not feasible', _REASON, placeholder=' …'))}[/]"
    unknown = f"[yellow]not known: {', '.join(candidate.unknown)}[/]" if candidate.unknown else ""
    scored = f"[dim]score of {escape(candidate.scored_as)}[/]" if candidate.scored_as else ""
    return "; ".join(part for part in (unknown, scored) if part) or "[green]feasible[/]"
