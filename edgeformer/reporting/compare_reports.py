"""Two profile reports side by side: the rows that both have, their ratio, and whether it is more than noise."""

from __future__ import annotations

import glob
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from edgeformer.backends import provider_facts
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.escaping import markdown
from edgeformer.formats.report import Latency, Report, Row
from edgeformer.formats.report_file import read_report
from edgeformer.reporting.columns import DASH, Column, Columns
from edgeformer.reporting.compare import Record, Style
from edgeformer.reporting.words import latency_words, thread_words
from edgeformer.run import Location

RUN_TO_RUN = 0.10
"""Two runs of the same measurement may differ by this much: what a row that is called stable promises."""

_IN_BROWSERS = "onnxruntime-web"

_OF_A_MEDIAN = 1.96 * math.sqrt(math.pi / 2)
"""Half the 95 % interval of a median, in standard deviations over √n."""


def report_of(location: Location, device: str) -> Report:
    """The report of a run for a device.

    Args:
        location: the run, or a bundle without one.
        device: the profile's name.

    Raises:
        ArtifactError: there is none.
    """
    path = location.reports / f"{device}.json"
    if not path.is_file():
        made = f"make it: edgeformer profile {location.argument} --device {device}"
        others = sorted(other.name for other in location.reports.glob(f"{glob.escape(device)}-*.json"))
        if others:
            made += f"; or compare files: those there answer other questions ({', '.join(others)})"
        raise ArtifactError(f"{path.parents[1]}: has no report for {device}; {made}")
    return read_report(path)


def compare_reports(first: Report, second: Report) -> Record:
    """Every row of both, matched by artifact, where, phase, batch and sequence length.

    Where a report has several rows of one shape (a sweep over threads or runtimes), these tell rows apart too.

    Args:
        first: report A.
        second: report B, of which it is said whether it is slower or faster.

    Returns:
        ``a`` and ``b`` (what each report is), ``notes``, and ``rows``: the shape, ``a_ms`` and ``b_ms`` (p50), their
        ``ratio`` b/a, ``noise`` (smallest relative difference that says something), ``mark`` and ``status`` of both.
    """
    names = ["artifact", "where", "phase", "batch", "seq"]
    if any(len({_key(row, names) for row in report.rows}) < len(report.rows) for report in (first, second)):
        names += ["provider", "threads"]
    ours, theirs = ({_key(row, names): row for row in report.rows} for report in (first, second))
    return {
        "a": _about(first),
        "b": _about(second),
        "rows": [dict(key) | _pair(ours.get(key), theirs.get(key)) for key in {**ours, **theirs}],
        "notes": _notes(first, second),
    }


def _about(report: Report) -> Record:
    # Of the machine, not of the device that it was judged for: one machine has one name in both reports.
    parts = [report.host.get(part) for part in ("cpu", "gpu")]
    host = " with ".join(str(part) for part in parts if part) or report.device_title
    return {"run": report.run, "device": report.device, "measured_on": host, "created": report.created}


def _key(row: Row, names: Sequence[str]) -> tuple[tuple[str, object], ...]:
    return tuple((name, getattr(row, name)) for name in names)


def _pair(a: Row | None, b: Row | None) -> Record:
    sides = {"a": a.latency_ms if a else None, "b": b.latency_ms if b else None}
    ratio, noise, mark = _ratio(sides["a"], sides["b"])
    return {
        **{f"{side}_status": latency.status if latency else None for side, latency in sides.items()},
        **{f"{side}_ms": latency.p50 if latency else None for side, latency in sides.items()},
        "ratio": ratio,
        "noise": noise,
        "mark": mark,
        **{f"{side}_shown": latency_words(latency) if latency else DASH for side, latency in sides.items()},
    }


def _ratio(a: Latency | None, b: Latency | None) -> tuple[float | None, float | None, str]:
    """Ratio b/a, the noise that it is held against, and a word: faster, slower, noise, or why neither."""
    if a is None or b is None:
        return None, None, "only in one report"
    if not a.p50 or not b.p50:
        return None, None, "a time is not known"
    ratio = b.p50 / a.p50
    if a.status != b.status:
        return ratio, None, "an estimate beside a measurement"
    if a.status == "estimated":
        return ratio, None, _estimates(a, b, ratio)
    sampling = _OF_A_MEDIAN * math.hypot(*((latency.cv or 0.0) / math.sqrt(max(1, latency.n)) for latency in (a, b)))
    noise = max(RUN_TO_RUN, sampling)
    if a.n <= 1 or b.n <= 1:
        return ratio, None, "one call each: no spread is known"
    if a.stable is False or b.stable is False:
        return ratio, noise, "not stable"
    # Of the larger over the smaller, so that it does not matter which report comes first.
    if max(ratio, 1 / ratio) - 1 < noise:
        return ratio, noise, "within the noise"
    return ratio, noise, "slower" if ratio > 1 else "faster"


def _estimates(a: Latency, b: Latency, ratio: float) -> str:
    if None in (a.low, a.high, b.low, b.high):
        return "estimates without a range"
    apart = (a.high or 0) < (b.low or 0) or (b.high or 0) < (a.low or 0)
    return f"estimated {'slower' if ratio > 1 else 'faster'}" if apart else "within the estimates' ranges"


def _notes(first: Report, second: Report) -> list[str]:
    sides = [
        {
            "measured on different machines": report.host.get("cpu"),
            "judged for different devices": report.device,
            "measured with different threads": report.host.get("threads"),
            "measured with different versions of ONNX Runtime": _runtime_version(report),
            "computed by different providers": _providers(report),
        }
        for report in (first, second)
    ]
    return [f"{what}: {a} and {b}" for (what, a), b in zip(sides[0].items(), sides[1].values(), strict=True) if a != b]


def _runtime_version(report: Report) -> object:
    """As a browser or this machine had it; None: the report does not say."""
    versions = report.host.get("versions")
    return versions.get(_IN_BROWSERS, versions.get("onnxruntime")) if isinstance(versions, dict) else None


def _providers(report: Report) -> str:
    """What computed the rows that were measured."""
    found = {provider_facts(row.provider).label for row in report.rows if row.latency_ms.status == "measured"}
    return " and ".join(sorted(found)) or "nothing"


def format_pairs(compared: Record, style: Style) -> str:
    """The comparison as text; CSV holds the rows only, every figure in full.

    Args:
        compared: of :func:`compare_reports`.
        style: how the table is written.
    """
    rows = compared["rows"]
    if style == "csv":
        names = dict.fromkeys(name for row in rows for name in row if name not in ("a_shown", "b_shown"))
        return Columns.of_records(names).csv(rows).rstrip("\n")
    table = (
        (_PAIRS.markdown(rows) if style == "markdown" else _PAIRS.plain(rows)) if rows else "The reports hold no rows."
    )
    lines = [
        f"{side.upper()}: {about['run']} for {about['device']}, measured on {about['measured_on']}, {about['created']}"
        for side, about in (("a", compared["a"]), ("b", compared["b"]))
    ]
    lines += [f"note: {note}" for note in compared["notes"]]
    head = "\n".join(f"- {markdown(line)}" for line in lines) if style == "markdown" else "\n".join(lines)
    return f"{head}\n\n{table}"


def _name(row: Record) -> str:
    threads = f", {thread_words(row['threads'])}" if row.get("threads") is not None else ""
    return f"{row['artifact']} {row['batch']} × {row['seq']}{threads}"


def _formatted(name: str, layout: str) -> Any:
    return lambda row: layout.format(row[name]) if row[name] is not None else DASH


_PAIRS: Columns[Record] = Columns(
    [
        Column("row", _name, heading=""),
        Column("where", itemgetter("where")),
        Column("phase", itemgetter("phase")),
        Column("a", itemgetter("a_shown"), heading="A, p50", number=True),
        Column("b", itemgetter("b_shown"), heading="B, p50", number=True),
        Column("ratio", itemgetter("ratio"), heading="B / A", text=_formatted("ratio", "{:.2f}"), number=True),
        Column("noise", itemgetter("noise"), text=_formatted("noise", "±{:.0%}"), number=True),
        Column("mark", itemgetter("mark"), heading="B is"),
    ]
)
