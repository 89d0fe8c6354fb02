"""Reports of one model on several devices, side by side: times, verdicts, and the artifact to deploy on each."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Literal

from rich.text import Text

from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.report import Report, read_report
from edgeformer.benchmark.choice import cheapest_artifact
from edgeformer.report.columns import DASH, Column, Record, TableColumns, TerminalTable, format_value
from edgeformer.report.context import UNSTABLE, names_of_rows, shape_text
from edgeformer.report.documents import render_template
from edgeformer.report.sentences import verdict_sentence, verdict_status
from edgeformer.runtimes import provider_facts


def name_reports(paths: Sequence[Path]) -> dict[str, Report]:
    """Read reports, and return them by the address that they were measured at, else by their paths.

    Raises as :func:`read_report` does.
    """
    reports = {path: read_report(path) for path in paths}
    addresses = [report.host.get("address") for report in reports.values()]
    return {
        address if (address := report.host.get("address")) and addresses.count(address) == 1 else str(path): report
        for path, report in reports.items()
    }


def compare_devices(reports: Mapping[str, Report], errors: Mapping[str, str] | None = None) -> Record:
    """Compare measured rows of several devices; ``errors``: name of a device → why there is no report.

    Return ``devices``: name, machine, profile, verdict and ``choice``, the artifact that costs least within the limits;
    and ``rows``: artifact, phase, batch, seq, provider and threads (null if they do not distinguish rows of a device),
    and ``devices``: name → status, ``p50_ms``, ``stable``, and ``ratio`` to the fastest device.
    """
    # 1. The rows that were measured, each with its time on every device.
    measured = {
        name: [row for row in report.rows if row.where == "host" and row.phase != "cold"]
        for name, report in reports.items()
    }
    names = names_of_rows(measured.values(), "artifact", "phase", "batch", "seq")
    key_of = attrgetter(*names)
    rows_of = {name: {key_of(row): row for row in rows} for name, rows in measured.items()}
    rows: list[Record] = []
    for key in dict.fromkeys(key for by_key in rows_of.values() for key in by_key):
        cells: dict[str, Record] = {}
        for name, by_key in rows_of.items():
            if key in by_key:
                latency = by_key[key].latency_ms
                cells[name] = {"status": latency.status, "p50_ms": latency.p50, "stable": latency.stable}
        times = [cell["p50_ms"] for cell in cells.values() if cell["status"] == "measured" and cell["p50_ms"]]
        for cell in cells.values():
            cell["ratio"] = cell["p50_ms"] / min(times) if times and cell["p50_ms"] else None
        row = next(by_key[key] for by_key in rows_of.values() if key in by_key)
        report = next(report for name, report in reports.items() if key in rows_of[name])
        shape = shape_text(row.model_copy(update={"threads": None}), report)
        identity = {"provider": None, "threads": None, **dict(zip(names, key, strict=True))}
        rows.append({**identity, "shape": shape, "devices": cells})
    # 2. The devices, and those without a report.
    devices: list[Record] = []
    for name, report in reports.items():
        machine = " with ".join(str(report.host[part]) for part in ("cpu", "gpu") if report.host.get(part))
        devices.append({
            "name": name, "machine": machine, "cores": report.host.get("cores"), "threads": report.host.get("threads"),
            "profile": report.device, "verdict": report.verdict.status, "verdict_text": verdict_status(report),
            "sentence": verdict_sentence(report), "choice": cheapest_artifact(report), "error": None,
        })  # fmt: skip
    missing = dict.fromkeys(devices[0] if devices else (), None)
    devices += [{**missing, "name": name, "error": error} for name, error in (errors or {}).items()]
    run = next((report.run for report in reports.values()), None)
    runs = sorted({report.run for report in reports.values()})
    notes = [f"the reports are of different runs: {', '.join(runs)}"] if len(runs) > 1 else []
    notes += [UNSTABLE] if any(cell["stable"] is False for row in rows for cell in row["devices"].values()) else []
    return {"run": run, "devices": devices, "rows": rows, "notes": notes}


_DEVICES: TableColumns[Record] = TableColumns(
    Column("name", heading="device"),
    Column("verdict", mark=True),
    Column("choice", lambda device: (device["choice"] or {}).get("artifact"), heading="cheapest artifact"),
    Column("p50", lambda device: (device["choice"] or {}).get("p50_ms"), "ms", heading="typical (p50)"),
    Column("size", lambda device: (device["choice"] or {}).get("size_bytes"), "bytes"),
    Column("machine", leaves=2),
    Column("threads", number=True, leaves=3),
    Column("profile", leaves=1),
    Column("error", flows=True, dash=""),
)


def _cell_text(row: Record, name: str) -> str:
    """Return the p50 on a device, with its ratio to the fastest one; a dash if it was not measured there."""
    cell = row["devices"].get(name)
    if cell is None or cell["p50_ms"] is None:
        return DASH
    ratio = round(cell["ratio"] or 1.0, 1)
    times = f" ({ratio:,.{1 if ratio < 100 else 0}f}×)" if ratio > 1 else ""
    return f"{format_value(cell['p50_ms'], 'ms')}{times}{' unstable' if cell['stable'] is False else ''}"


def _row_columns(comparison: Record) -> TableColumns[Record]:
    """Return the columns of the rows: a column per device."""
    names = [device["name"] for device in comparison["devices"] if device["error"] is None]
    return TableColumns(
        Column("artifact"),
        Column("shape", heading="batch × tokens", number=True),
        Column("runtime", lambda row: row["provider"] and provider_facts(row["provider"]).label),
        Column("threads", number=True),
        *(Column(name, text=lambda row, name=name: _cell_text(row, name), number=True) for name in names),  # type: ignore[misc]
    ).drop_empty(comparison["rows"], "runtime", "threads")


def comparison_tables(comparison: Record) -> list[TerminalTable[Record]]:
    """Return the devices and the rows as tables for the terminal."""
    devices = _DEVICES.drop_empty(comparison["devices"], "error")
    return [
        devices.terminal(f"{comparison['run']} on {len(comparison['devices'])} devices", comparison["devices"]),
        _row_columns(comparison).terminal(
            "Typical call (p50), and how many times the fastest device",
            comparison["rows"],
            Text("\n".join(comparison["notes"])) if comparison["notes"] else None,
        ),
    ]


def format_devices(comparison: Record, style: Literal["markdown", "csv"]) -> str:
    """Format the devices and the rows in GitHub-flavoured Markdown; in CSV a line per row and device."""
    if style == "markdown":
        devices = _DEVICES.drop_empty(comparison["devices"], "error")
        tables = devices.markdown(comparison["devices"]), _row_columns(comparison).markdown(comparison["rows"])
        return "\n\n".join(tables)
    cells = [{**row, **cell, "device": name} for row in comparison["rows"] for name, cell in row["devices"].items()]
    keys = ("artifact", "phase", "batch", "seq", "provider", "threads", "status", "p50_ms", "stable", "ratio")
    columns: TableColumns[Record] = TableColumns(*map(Column, ("device", *keys)))
    return columns.csv(cells).rstrip("\n")


def write_comparison(comparison: Record, path: Path) -> None:
    """Write the page. It loads nothing."""
    names = [device["name"] for device in comparison["devices"] if device["error"] is None]
    slowest = max(
        (cell["p50_ms"] or 0.0 for row in comparison["rows"] for cell in row["devices"].values()), default=0.0
    )
    page = render_template(
        "devices.html", comparison=comparison, names=names, cell_text=_cell_text, slowest=slowest,
        devices=_DEVICES.omit("error").html(comparison["devices"]),  # errors are among the verdicts
    )  # fmt: skip
    write_text(path, page)
