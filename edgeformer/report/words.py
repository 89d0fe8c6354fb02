"""How a report's figures are written: an estimate never reads like a measurement, and what is not known says why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from urllib.parse import quote

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.report import (
    Candidate,
    Check,
    EstimateEvidence,
    Latency,
    Memory,
    Report,
    Row,
    Search,
    SizeParts,
)
from edgeformer.artifacts.units import format_bytes, format_milliseconds, markdown
from edgeformer.report.columns import DASH
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
        pick, bound = search.candidates[search.pick], ""
        if pick.bound_inside and search.bound is not None:
            rows = f"{pick.score_rows:,} rows do not decide whether its {search.metric}"
            bound = f"; {rows} is at least {search.bound:g}"
        sentence = f"The search picks {pick.artifact}{bound}. {sentence}"
    if not report.left_out:
        return sentence
    # Listed one by one in the notes.
    everything = report.left_out.keys() >= {row.artifact for row in report.rows}
    whole = "every artifact" if everything else numbers_of(len(report.left_out))
    return f"{sentence} Left out: {whole} that no {report.device_title} can run."


def numbers_of(count: int) -> str:
    """``1 artifact``, ``3 artifacts``."""
    return f"{count} artifact{'s' if count != 1 else ''}"


def verdict_words(report: Report, *, basis: bool = False) -> str:
    """Return the status as every headline shows it: ``fail``, ``pass``, or ``pass (size and memory only)``.

    Args:
        report: whose verdict it is.
        basis: add ``estimated`` where checks rest on estimates, as the badge does.
    """
    verdict = report.verdict
    remarks = [f"{_listed(verdict.judged)} only"] if verdict.is_partial else []
    if basis and verdict.status != "unknown" and any(check.basis == "estimated" for check in verdict.checks):
        remarks.append("estimated")
    return f"{verdict.status} ({', '.join(remarks)})" if remarks else verdict.status


def _listed(names: Sequence[str]) -> str:
    """``size``, ``size and memory``, ``size, latency and memory``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _not_judged_words(report: Report) -> str:
    """``latency and size were not judged: the profile x sets no limit``: kinds without any check; empty if none."""
    checked = {check.name for check in report.verdict.checks}
    by_reason: dict[str, list[str]] = {}
    for kind in report.verdict.not_judged:
        if kind.name not in checked:  # open checks are listed with their own words
            by_reason.setdefault(kind.reason, []).append(kind.name)
    parts = (
        f"{_listed(names)} {'was' if len(names) == 1 else 'were'} not judged: {reason}"
        for reason, names in by_reason.items()
    )
    return "; ".join(parts)


def _of_checks(report: Report) -> str:
    checks, left_open = report.verdict.checks, _not_judged_words(report)
    if not checks:
        return f"Nothing was checked; {left_open}." if left_open else "Nothing was checked."
    if report.verdict.is_partial:
        names = report.verdict.judged
        estimated = [name for name in names if any(c.name == name and c.basis == "estimated" for c in checks)]
        of_all = "" if len(estimated) == len(names) else f"{_listed(estimated)} "
        by_estimate = f" ({of_all}by estimate only)" if estimated else ""
        return f"Within the limit{'s' if len(names) > 1 else ''} for {_listed(names)}{by_estimate}; {left_open}."
    sentence = _outcome(report)
    return f"{sentence[:-1]}; {left_open}." if left_open else sentence


def _outcome(report: Report) -> str:
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
    applying = next((record for record in report.estimate_evidence if record.applies), None)
    if applying is not None:
        return f"estimated, not measured; the estimator's error on record is that of {_record_words(applying)}"
    checked_on = "a GPU" if report.estimated_for == "cuda" else report.device_title
    refused = (
        f"the record of {_record_words(record)} does not apply: {record.why_not}" for record in report.estimate_evidence
    )
    return "; ".join([f"estimated, not measured; never checked on {checked_on}", *refused])


def _record_words(record: EstimateEvidence) -> str:
    """``docs/estimator.md (248 cases of 9 models on …, 2 cores, 2026-11-23: median error 6.8 %, worst 32.2 %)``."""
    models = f" of {record.models} models" if record.models is not None else ""
    cores = f", {record.cores} cores" if record.cores is not None else ""
    where = f"{record.cases} cases{models} on {record.processor}{cores}, {record.measured}"
    return (
        f"{record.source} ({where}: median error of a time {record.median_error:.1%}, worst {record.worst_error:.1%})"
    )


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
    """``rtx4050: fail``, ``rtx4050: pass (memory only, estimated)``: device, status, what was judged and by what."""
    return f"{report.device}: {verdict_words(report, basis=True)}"


def badge_markdown(report: Report, file: str) -> str:
    """One line of GitHub-flavoured Markdown that shows the badge.

    Args:
        report: whose verdict it is.
        file: the badge, as the document that shows it sees it.
    """
    return f"![edgeformer {markdown(badge_text(report))}]({quote(file)})"


# What the terminal says below a report's tables: one line for what many rows have in common, the rest in the files.


_ONE_BY_ONE = 2
"""So many rows may each have a line of their own."""
_MOST_KINDS = 3
"""Different doubts that one line names; the commonest."""


def absent_words(report: Report) -> Iterator[str]:
    """A line per reason why something has no figures. What was left out of the verdict is in the report's notes."""
    why: dict[str, dict[str, None]] = {}
    for row in report.rows:
        if row.latency_ms.status == "unavailable" and row.artifact not in report.left_out:
            why.setdefault(state_words(row), {})[row.artifact] = None
    for reason, artifacts in why.items():
        yield f"{', '.join(artifacts)}: {reason}"


def warning_words(report: Report, written: bool) -> Iterator[str]:
    """Yield the warnings of the rows: measured rows and estimated rows apart, since only a measurement is noisy.

    Up to two rows of either get a line each, more of them one line with counts. Cold rows are single calls; their
    warnings are those of the process, which its other rows repeat.

    Args:
        report: of `profile`.
        written: whether report files exist, which hold every row's warnings.
    """
    rows = [row for row in report.rows if row.phase != "cold"]
    where = "the report" if written else "the report's rows"
    for status in ("measured", "estimated"):
        of_status = [row for row in rows if row.latency_ms.status == status]
        warned = [row for row in of_status if row.latency_ms.warnings]
        if len(warned) <= _ONE_BY_ONE:
            for row in warned:
                estimate = "estimate of " if status == "estimated" else ""
                yield f"{estimate}{row.artifact} {shape_words(row, report)}: {'; '.join(row.latency_ms.warnings)}"
            continue
        kinds = Counter(kind for row in warned for kind in dict.fromkeys(map(_kind, row.latency_ms.warnings)))
        named = [f"{kind} ({_rows(count)})" for kind, count in kinds.most_common(_MOST_KINDS)]
        more = f"; and {len(kinds) - _MOST_KINDS} more" if len(kinds) > _MOST_KINDS else ""
        counted = f"{len(warned)} of {len(of_status)} estimated rows are less certain"
        if status == "measured":
            unstable = sum(row.latency_ms.stable is False for row in warned)
            counted = f"{len(warned)} of {len(of_status)} rows are noisy, {unstable} not stable"
        yield f"{counted}: {'; '.join(named)}{more}; row by row in {where}"


def _rows(count: int) -> str:
    return f"{count} row{'s' if count != 1 else ''}"


def _kind(warning: str) -> str:
    """What a warning says without its figures: up to a colon or a bracket, numbers left out."""
    words = re.split(r"[:(]", warning)[0]
    return re.sub(r"\s+", " ", re.sub(r"\s*\bby \d[\d.]*%?|\b\d[\d.]*%?( ms)?", "", words)).strip()
