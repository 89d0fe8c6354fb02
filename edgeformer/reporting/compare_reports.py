"""Two profile reports side by side: the rows that both have, their ratio, and whether it is more than noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.report import Latency, Report, Row
from edgeformer.formats.workspace import REPORTS_FOLDER, read_manifest
from edgeformer.reporting.columns import DASH, Column, Columns
from edgeformer.reporting.compare import Record, Style, bare_column
from edgeformer.reporting.words import latency_words, thread_words
from edgeformer.run import Location

RUN_TO_RUN = 0.10
"""Two runs of the same measurement may differ by this much: what a row that is called stable promises."""

_OF_A_MEDIAN = 1.96 * math.sqrt(math.pi / 2)
"""Half the 95 % interval of a median, in standard deviations over √n."""

_ONE_SIDED = "only in one report"


def report_of(location: Location, device: str) -> Report:
    """The report of a run for a device.

    Args:
        location: the run, or a bundle without one.
        device: the profile's name.

    Raises:
        ArtifactError: there is none.
    """
    base = location.run if location.run is not None else location.require_bundle()
    path = base / REPORTS_FOLDER / f"{device}.json"
    if not path.is_file():
        made = f"make it: edgeformer profile {location.argument} --device {device}"
        raise ArtifactError(f"{base}: has no report for {device}; {made}")
    return read_manifest(Report, path)


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
    detailed = any(n > 1 for report in (first, second) for n in Counter(map(_short, report.rows)).values())
    ours, theirs = _by_key(first.rows, detailed), _by_key(second.rows, detailed)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return {
        "a": _about(first),
        "b": _about(second),
        "rows": [_pair(key, ours.get(key), theirs.get(key)) for key in keys],
        "notes": _notes(first, second),
    }


def _about(report: Report) -> Record:
    host = report.host.get("cpu") if not report.on_target else report.device_title
    return {"run": report.run, "device": report.device, "measured_on": host, "created": report.created}


_Key = tuple[str, str, str, int, int, str, int | None]


def _short(row: Row) -> tuple[str, str, str, int, int]:
    return row.artifact, row.where, row.phase, row.batch, row.seq


def _by_key(rows: Iterable[Row], detailed: bool) -> dict[_Key, Row]:
    return {(*_short(row), *((row.provider, row.threads) if detailed else ("", None))): row for row in rows}


def _pair(key: _Key, a: Row | None, b: Row | None) -> Record:
    artifact, where, phase, batch, seq, provider, threads = key
    shape = {"artifact": artifact, "where": where, "phase": phase, "batch": batch, "seq": seq}
    if provider:
        shape |= {"provider": provider, "threads": threads}
    ratio, noise, mark = _ratio(a.latency_ms if a else None, b.latency_ms if b else None)
    return {
        **shape,
        "a_status": a.latency_ms.status if a else None,
        "b_status": b.latency_ms.status if b else None,
        "a_ms": a.latency_ms.p50 if a else None,
        "b_ms": b.latency_ms.p50 if b else None,
        "ratio": ratio,
        "noise": noise,
        "mark": mark,
        "a_shown": latency_words(a.latency_ms) if a else DASH,
        "b_shown": latency_words(b.latency_ms) if b else DASH,
    }


def _ratio(a: Latency | None, b: Latency | None) -> tuple[float | None, float | None, str]:
    """Ratio b/a, the noise that it is held against, and a word: faster, slower, noise, or why neither."""
    if a is None or b is None:
        return None, None, _ONE_SIDED
    if not a.p50 or not b.p50:
        return None, None, "a time is not known"
    ratio = b.p50 / a.p50
    if a.status != b.status:
        return ratio, None, "an estimate beside a measurement"
    if a.status == "estimated":
        return ratio, None, _estimates(a, b, ratio)
    noise = max(RUN_TO_RUN, _sampling(a, b))
    if a.n <= 1 or b.n <= 1:
        return ratio, None, "one call each: no spread is known"
    if a.stable is False or b.stable is False:
        return ratio, noise, "not stable"
    # Of the larger over the smaller, so that it does not matter which report comes first.
    if max(ratio, 1 / ratio) - 1 < noise:
        return ratio, noise, "within the noise"
    return ratio, noise, "slower" if ratio > 1 else "faster"


def _sampling(a: Latency, b: Latency) -> float:
    spread = [(latency.cv or 0.0) ** 2 / max(1, latency.n) for latency in (a, b)]
    return _OF_A_MEDIAN * math.sqrt(sum(spread))


def _estimates(a: Latency, b: Latency, ratio: float) -> str:
    if None in (a.low, a.high, b.low, b.high):
        return "estimates without a range"
    apart = (a.high or 0) < (b.low or 0) or (b.high or 0) < (a.low or 0)
    return f"estimated {'slower' if ratio > 1 else 'faster'}" if apart else "within the estimates' ranges"


def _notes(first: Report, second: Report) -> list[str]:
    notes = []
    machines = [_about(report)["measured_on"] for report in (first, second)]
    if machines[0] != machines[1]:
        notes.append(f"measured on different machines: {machines[0]} and {machines[1]}")
    if first.device != second.device:
        notes.append(f"judged for different devices: {first.device} and {second.device}")
    threads = [report.host.get("threads") for report in (first, second)]
    if threads[0] != threads[1]:
        notes.append(f"measured with different threads: {threads[0]} and {threads[1]}")
    versions = [str((report.host.get("versions") or {}).get("onnxruntime")) for report in (first, second)]
    if versions[0] != versions[1]:
        notes.append(f"measured with different versions of ONNX Runtime: {versions[0]} and {versions[1]}")
    return notes


def format_pairs(compared: Record, style: Style) -> str:
    """The comparison as text; CSV holds the rows only, every figure in full.

    Args:
        compared: of :func:`compare_reports`.
        style: how the table is written.
    """
    rows = compared["rows"]
    if style == "csv":
        names = dict.fromkeys(name for row in rows for name in row if name not in ("a_shown", "b_shown"))
        return Columns([bare_column(name) for name in names]).csv(rows).rstrip("\n")
    table = (
        (_PAIRS.markdown(rows) if style == "markdown" else _PAIRS.plain(rows)) if rows else "The reports hold no rows."
    )
    lines = [*(f"{side.upper()}: {_described(compared[side])}" for side in ("a", "b"))]
    lines += [f"note: {note}" for note in compared["notes"]]
    head = "\n".join(f"- {line}" for line in lines) if style == "markdown" else "\n".join(lines)
    return f"{head}\n\n{table}"


def _described(about: Record) -> str:
    return f"{about['run']} for {about['device']}, measured on {about['measured_on']}, {about['created']}"


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
