"""How a report's figures are written: an estimate never reads like a measurement, and what is not known says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from urllib.parse import quote

from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.escaping import markdown
from edgeformer.formats.report import Candidate, Check, Latency, Memory, Report, Row, Search, SizeParts
from edgeformer.formats.units import format_bytes, format_milliseconds
from edgeformer.reporting.columns import DASH
from edgeformer.tasks import Metric, all_tasks

ABOUT = "≈"
"""Stands before every estimated figure; its range follows."""


def latency_words(latency: Latency) -> str:
    """The p50: ``1.23 ms``, ``≈ 1.23 ms (0.80 to 1.90)`` or a dash."""
    if latency.p50 is None:
        return DASH
    middle = f"{format_milliseconds(latency.p50)} ms"
    if latency.status != "estimated":
        return middle
    return f"{ABOUT} {middle}{_range(latency.low, latency.high, format_milliseconds)}"


def _range(low: float | None, high: float | None, written: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f" ({written(low)} to {written(high)})"


def memory_words(memory: Memory) -> str:
    """The peak: ``118.6 MiB``, ``≈ 118.6 MiB (90.0 MiB to 150.0 MiB)`` or a dash."""
    if memory.status != "estimated":
        return format_bytes(memory.peak)
    middle = f"{ABOUT} {format_bytes(memory.peak)}" if memory.peak is not None else ABOUT
    return middle + _range(memory.low, memory.high, format_bytes)


def quantity(value: float | None, check: Check) -> str:
    """A figure in the unit of its check; a dash where there is none.

    Args:
        value: a limit, a value, or an end of its range.
        check: that it belongs to.
    """
    if value is None:
        return DASH
    return format_bytes(value) if check.unit == "bytes" else f"{format_milliseconds(value)} {check.unit}"


def value_words(check: Check) -> str:
    """A check's value in its unit; an estimate with its sign and range."""
    if check.basis != "estimated" or check.value is None:
        return quantity(check.value, check)
    span = _range(check.low, check.high, lambda value: quantity(value, check))
    return f"{ABOUT} {quantity(check.value, check)}{span}"


def latency_range(latency: Latency) -> str:
    """Where there is little room: of an estimate the range alone, which is what is judged."""
    return _ends(latency.low, latency.high, lambda end: f"{format_milliseconds(end)} ms") or latency_words(latency)


def memory_range(memory: Memory) -> str:
    """As :func:`latency_range`."""
    return _ends(memory.low, memory.high, format_bytes) or memory_words(memory)


def value_range(check: Check) -> str:
    """As :func:`latency_range`."""
    if check.basis != "estimated":
        return value_words(check)
    return _ends(check.low, check.high, lambda end: quantity(end, check)) or value_words(check)


def _ends(low: float | None, high: float | None, written: Callable[[float], str]) -> str:
    """``≈ 6.78 to 25.5 ms``: the unit once, where it is one."""
    if low is None or high is None:
        return ""
    (first, unit), (last, other) = written(low).rsplit(" ", 1), written(high).rsplit(" ", 1)
    return f"{ABOUT} {first}{'' if unit == other else f' {unit}'} to {last} {other}"


def at_words(check: Check) -> str:
    """Batch × tokens at which a check judges; empty for a file's size."""
    return "" if check.batch is None else f"{check.batch} × {check.seq}"


def shape_words(row: Row, report: Report) -> str:
    """Batch × tokens; ``per token`` of a decode row, and the threads where the report has several counts.

    Of a wrapped graph the sizes of its largest input, and how many others there are.

    Args:
        row: of the report.
        report: whose other rows say what has to be told apart.
    """
    decode = " per token" if row.phase == "decode" else ""
    # This host's rows and the device's have counts of their own, which is no sweep.
    same = {other.threads for other in report.rows if other.where == row.where and other.threads is not None}
    sweep = len(same) > 1
    threads = f", {thread_words(row.threads)}" if sweep and row.threads is not None else ""
    shape = f"{row.batch} × {row.seq}"
    if row.inputs:
        largest = max(row.inputs.values(), key=prod)
        shape = " × ".join(map(str, largest)) or "1"
        shape += f" (+{len(row.inputs) - 1})" if len(row.inputs) > 1 else ""
    return f"{shape}{decode}{threads}"


def shape_heading(report: Report) -> str:
    """What :func:`shape_words` says."""
    return "largest input" if any(row.inputs for row in report.rows) else "batch × tokens"


def thread_words(threads: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{threads} thread{'s' if threads != 1 else ''}"


def metric_named(name: str) -> Metric:
    """The metric that a search was about. Raises ArtifactError for one of a task that this edgeformer does not know."""
    for task in all_tasks():
        if task.metric.name == name:
            return task.metric
    raise ArtifactError(f"metric {name!r} is of no task that is known here")


def state_words(row: Row) -> str:
    """What a reader must know of this row beside its figures: unavailable and why, estimated, unstable; else empty."""
    latency = row.latency_ms
    if latency.status == "unavailable":
        return f"unavailable: {latency.reason or 'no reason was given'}"
    if latency.status == "estimated":
        return "estimated"
    return "unstable" if latency.stable is False else ""


def in_words(report: Report) -> str:
    """The verdict in one or two sentences that a newcomer understands; of a search, that of what it picked."""
    search, sentence = report.search, _of_checks(report)
    if search is not None and search.pick is None:
        return f"The search picks nothing: {search.reason}."
    if search is not None and search.pick is not None:
        sentence = f"The search picks {search.candidates[search.pick].artifact}. {sentence}"
    if not report.left_out:
        return sentence
    # Listed one by one in the notes.
    everything = report.left_out.keys() >= {row.artifact for row in report.rows}
    whole = "every artifact" if everything else numbers_of(len(report.left_out))
    return f"{sentence} Left out: {whole} that no {report.device_title} can run."


def numbers_of(count: int) -> str:
    """``1 artifact``, ``3 artifacts``."""
    return f"{count} artifact{'s' if count != 1 else ''}"


def _of_checks(report: Report) -> str:
    checks = report.verdict.checks
    failed = [c for c in checks if c.status == "fail"]
    open_ = [c for c in checks if c.status == "unknown"]
    if failed:
        return "Over budget: " + ", ".join(f"{c.name} of {c.artifact}{_estimated([c])}" for c in failed) + "."
    passed = sorted({c.name for c in checks if c.status == "pass"})
    if open_:
        names = (f"{n}{_estimated(c for c in checks if c.status == 'pass' and c.name == n)}" for n in passed)
        done = f"{' and '.join(names)} within budget; " if passed else ""
        where = ""
        if all(c.value is None for c in open_) and not report.on_target:
            where = f", because no {report.device_title} is in this machine"
            if any(c.status == "pass" and c.basis == "estimated" for c in checks):  # so it is not for the device's sake
                artifacts = dict.fromkeys(c.artifact for c in open_)
                where = f" of {', '.join(artifacts)}: their rows say why"
        return f"{done}{' and '.join(sorted({c.name for c in open_}))} not known{where}."
    if not checks:
        return "Nothing was checked."
    guessed = " and ".join(sorted({c.name for c in checks if c.basis == "estimated"}))
    return f"Every check is within budget{f'; {guessed} only by estimate' if guessed else ''}."


def _estimated(checks: Iterable[Check]) -> str:
    return " (estimated)" if any(check.basis == "estimated" for check in checks) else ""


def has_estimates(report: Report) -> bool:
    """Does any figure of the report come from the estimator?"""
    rows = any("estimated" in (row.latency_ms.status, row.memory_bytes.status) for row in report.rows)
    return rows or any(check.basis == "estimated" for check in report.verdict.checks)


def estimate_words(report: Report) -> str | None:
    """How far the report's estimates may be trusted; None where it holds none."""
    if not has_estimates(report):
        return None
    kinds = {"cpu": "CPU", "cuda": "GPU", None: f"{report.device_title}"}
    wanted, error = kinds[report.estimated_for], report.estimate_error
    if error is None:
        return f"estimated, not measured: the estimator's error is not known; it was never checked on a {wanted}"
    found = (
        f"in {error.cases} cases on {error.device} it was off by a factor of {2**error.median_log2:.2f} in the middle "
        f"and {2**error.worst_log2:.2f} at worst"
    )
    if error.kind == report.estimated_for:
        return f"estimated, not measured: {found}"
    return f"estimated, not measured: checked on {kinds[error.kind]}s only ({found}); never checked on a {wanted}"


def not_measured(report: Report) -> list[tuple[str, str]]:
    """What the report holds no measurement of, and why; equal reasons together."""
    found: dict[str, dict[str, None]] = {}
    for row in report.rows:
        for what, reason in _row_gaps(row, report):
            found.setdefault(reason, {})[what] = None
    split = {part.artifact for part in split_sizes(report)}
    for name in dict.fromkeys(row.artifact for row in report.rows if row.artifact not in split):
        reason = "the bundle does not say: an engine, a wrapped file, or an export of an earlier version"
        found.setdefault(reason, {})[f"what the bytes of {name} are for"] = None
    for check in report.verdict.checks:
        if check.status == "unknown":
            found.setdefault(check.reason or _NO_REASON, {})[f"check of {check.name} of {check.artifact}"] = None
    return [
        (", ".join(names) if len(names) <= 4 else f"{', '.join([*names][:3])} and {len(names) - 3} more", reason)
        for reason, names in found.items()
    ]


_NO_REASON = "no reason was given"


def _row_gaps(row: Row, report: Report) -> list[tuple[str, str]]:
    """What of one row is not measured, and why. Of a row without a time only that is said; cold rows are one call."""
    name = f"{row.artifact} at {shape_words(row, report)}" + (" on the device" if row.where == "device" else "")
    latency = row.latency_ms
    if latency.status != "measured":
        here = latency.status == "unavailable" or report.on_target
        absent = "" if here else f"; there is no {report.device_title} in this machine"
        return [(f"latency of {name}", (latency.reason or _NO_REASON) + absent)]
    if row.phase == "cold":
        return []
    gaps = [(f"percentiles of {name}", latency.reason)] if latency.reason else []
    for what, status, reason in (
        ("memory", row.memory_bytes.status, row.memory_bytes.reason),
        ("energy", row.energy_mj.status, row.energy_mj.reason),
    ):
        if status == "unavailable":
            gaps.append((f"{what} of {name}", reason or _NO_REASON))
    return gaps


def split_sizes(report: Report) -> list[SizeParts]:
    """The artifacts of which it is known what their bytes are for; of the others, all is `other`."""
    return [part for part in report.sizes if part.embeddings or part.block or part.heads]


def rate_words(rate: float) -> str:
    """Operations per second: ``84.2 T/s``, ``120 G/s``."""
    return f"{rate / 1e12:.3g} T/s" if rate >= 1e12 else f"{rate / 1e9:.3g} G/s"


def numbered(search: Search) -> list[tuple[int, int, Candidate]]:
    """Number in pictures and tables, position in ``search``, candidate: the feasible ones first, fastest first."""
    order = sorted(
        enumerate(search.candidates), key=lambda c: (not c[1].feasible, c[1].latency_ms is None, c[1].latency_ms or 0.0)
    )
    return [(number, position, c) for number, (position, c) in enumerate(order, start=1)]


def badge_text(report: Report) -> str:
    """``rtx4050: fail``; a verdict that rests on estimates says so."""
    rests = any(check.basis == "estimated" for check in report.verdict.checks) and report.verdict.status != "unknown"
    return f"{report.device}: {report.verdict.status}{' (estimated)' if rests and has_estimates(report) else ''}"


def badge_markdown(report: Report, file: str) -> str:
    """One line of GitHub-flavoured Markdown that shows the badge.

    Args:
        report: whose verdict it is.
        file: the badge, as the document that shows it sees it.
    """
    return f"![edgeformer {markdown(badge_text(report))}]({quote(file)})"
