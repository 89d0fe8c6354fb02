"""The picture of a profile report: latency on this host, and file size against the device's budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeformer.reporting.canvas import BLUE, PALETTE, RED, drawing
from edgeformer.reporting.caution import cautions
from edgeformer.schema.report import Report


def draw_report(report: Report, path: Path) -> Path:
    """Write the picture to ``path``."""
    where = "measured on this device" if report.on_target else f"times measured on {report.host.get('cpu')}, not on it"
    title = " · ".join((f"{report.run} for {report.device_title}", where, *cautions(report)))
    with drawing(path, title, 2, (11.5, 4.2)) as (latency, size):
        _draw_latency(latency, report)
        _draw_sizes(size, report)
    return path


def _draw_latency(axis: Any, report: Report) -> None:
    rows = [r for r in report.rows if r.phase == "steady" and r.where == "host" and r.latency_ms.p50 is not None]
    shapes = list(dict.fromkeys((r.batch, r.seq) for r in rows))
    names = list(dict.fromkeys(r.artifact for r in rows))
    width = 0.8 / max(1, len(names))
    for position, name in enumerate(names):
        for row in (r for r in rows if r.artifact == name):
            x = shapes.index((row.batch, row.seq)) + (position - (len(names) - 1) / 2) * width
            p50, p90 = row.latency_ms.p50 or 0.0, row.latency_ms.p90
            colour = PALETTE[position % len(PALETTE)]
            label = name if (row.batch, row.seq) == shapes[0] else None
            axis.bar(x, p50, width * 0.92, color=colour, label=label)
            axis.annotate(f"{p50:.3g}", (x, max(p50, p90 or 0)), ha="center", va="bottom", fontsize=8)
            if p90 is not None:
                axis.plot([x, x], [p50, p90], color="black", linewidth=1)
    axis.set_xticks(range(len(shapes)), [f"{batch} × {seq}" for batch, seq in shapes])
    axis.set(xlabel="batch × tokens", ylabel="ms per call on this host (p50, whisker p90)")
    axis.margins(y=0.12)
    if names:
        axis.legend(frameon=False)


def _draw_sizes(axis: Any, report: Report) -> None:
    mib = 2**20
    sizes = {row.artifact: row.size_bytes / mib for row in report.rows}
    bars = axis.barh(list(sizes), list(sizes.values()), 0.6, color=BLUE)
    axis.bar_label(bars, fmt=" %.3g", fontsize=8)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    limits = {c.limit / mib for c in report.verdict.checks if c.name.startswith("size")}
    for limit in limits:
        axis.axvline(limit, color=RED, linestyle="--", linewidth=1)
        axis.annotate(
            f"budget of {report.device}: {limit:.0f} MiB", (limit, 0.01), xycoords=("data", "axes fraction"),
            ha="right", va="bottom", rotation=90, fontsize=8, color=RED,
        )  # fmt: skip
    axis.set(xlabel="size (MiB)")
    axis.margins(x=0.15)
