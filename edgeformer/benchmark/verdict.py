"""Verdict: limits against values. A check passes, fails, or is unknown without the device.

A value measured on the device is compared directly. A time that a second process measured as well is a range, and so is
an estimate: a range passes if it lies wholly within the limit, fails if it lies wholly beyond it, and is else unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, sqrt
from typing import Any, Literal

from edgeformer.artifacts.report import (
    QUANTILES,
    Check,
    CheckStatus,
    MeasurementStatus,
    NotJudged,
    Row,
    Verdict,
)
from edgeformer.artifacts.units import format_bytes, format_milliseconds, format_threads
from edgeformer.measurement.artifact import absent_figures
from edgeformer.runtimes import provider_facts

_WORST_FIRST: tuple[CheckStatus, ...] = ("fail", "unknown", "pass")
_SUREST_FIRST: tuple[MeasurementStatus, ...] = ("measured", "estimated", "unavailable")
EXPECTED_CHECKS = ("size", "latency", "memory")
"""Kinds of check that a reader takes for granted in a pass; a verdict says which of them were not judged."""


@dataclass(frozen=True)
class Limits:
    """What an artifact may cost, and the shape at which it is judged. A limit of None is not checked."""

    size_bytes: int | None
    latency_ms: float | None
    memory_bytes: int | None
    batch: int
    seq: int
    phase: Literal["steady", "decode"] = "steady"  # of latency and energy: a whole call, or one decoded token
    shape_note: str | None = None  # why the shape is not the budget's
    energy_mj: float | None = None
    by_command: tuple[Limits, ...] = ()  # of the command line, at its shapes; the others are the device's budget
    profile: str | None = None  # name of the device profile with the budget

    @property
    def judges_calls(self) -> bool:
        """Whether anything but a file's size is limited at its own shape."""
        return any(limit is not None for limit in (self.latency_ms, self.memory_bytes, self.energy_mj))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (batch, seq) at which something is judged; without limits, the budget's."""
        budget = ((self.batch, self.seq),) if self.judges_calls or not self.by_command else ()
        return (*budget, *((limits.batch, limits.seq) for limits in self.by_command))

    @property
    def ranked(self) -> Limits:
        """The limits at the shape at which artifacts are compared: the largest that the command line names."""
        return self.by_command[-1] if self.by_command else self


def check_budget(rows: Sequence[Row], limits: Limits, whole_texts: Collection[str] = ()) -> Verdict:
    """Check every artifact. ``fail`` outweighs ``unknown``, which outweighs ``pass``; without a check it is unknown.

    Of an artifact's rows on the device, measured ones win over estimates. Judged is the one provider with one thread
    count that meets most limits, at all shapes together, then the fastest; a provider that rounds only if there is no
    other. ``whole_texts`` are graphs of language models without caches, to which every token costs a whole pass.
    """
    exempt = exempt_from_latency(rows, limits, whole_texts)
    checks: list[Check] = []
    for artifact in dict.fromkeys(row.artifact for row in rows):
        artifact_rows = [row for row in rows if row.artifact == artifact]
        checks += _artifact_checks(artifact_rows, limits, artifact in whole_texts, artifact not in exempt)
    statuses = {check.status for check in checks} or {"unknown"}
    judged = tuple(dict.fromkeys(check.name for check in checks if check.status != "unknown"))
    not_judged: list[NotJudged] = []
    for name in dict.fromkeys((*EXPECTED_CHECKS, *(check.name for check in checks))):
        if name in judged:
            continue
        unknown = next((check for check in checks if check.name == name), None)
        if unknown is not None:
            reason = unknown.reason or "no reason is recorded"
        elif not rows:
            reason = "no artifact can run on the device"
        else:
            reason = f"the profile {limits.profile} sets no limit" if limits.profile else "no limit is set"
        not_judged.append(NotJudged(name=name, reason=reason))
    return Verdict(
        status=next(status for status in _WORST_FIRST if status in statuses),
        checks=tuple(checks),
        judged=judged,
        not_judged=tuple(not_judged),
    )


def verdict_notes(verdict: Verdict, rows: Sequence[Row], limits: Limits, whole_texts: Collection[str]) -> list[str]:
    """Return notes on what the verdict of :func:`check_budget` leaves out, with the options that set a limit."""
    notes: list[str] = []
    flags = {"latency": "--max-latency", "memory": "--max-vram", "size": "--max-size"}
    checked = {check.name for check in verdict.checks}
    missing = [kind.name for kind in verdict.not_judged if kind.name in flags.keys() - checked]
    if not verdict.checks:
        notes.append(
            "nothing was judged, because neither the profile nor the command sets a limit; set one with --max-latency, "
            "--max-size or --max-vram"
        )
    elif missing:
        options = " and ".join(flags[name] for name in missing)
        notes.append(f"not judged: {' and '.join(missing)}; set a limit with {options}")
    if exempt := exempt_from_latency(rows, limits, whole_texts):
        notes.append(f"latency per token is judged for the artifacts that decode only, not for {', '.join(exempt)}")
    return notes


def exempt_from_latency(rows: Sequence[Row], limits: Limits, whole_texts: Collection[str]) -> tuple[str, ...]:
    """Return the graphs for whole texts that no limit per decoded token concerns, because other artifacts decode."""
    artifacts = tuple(dict.fromkeys(row.artifact for row in rows))
    if limits.phase != "decode" or all(artifact in whole_texts for artifact in artifacts):
        return ()
    return tuple(artifact for artifact in artifacts if artifact in whole_texts)


def quantities(row: Row) -> dict[str, Check]:
    """Return size, latency, memory and energy of a row, as checks whose limit is not set yet.

    The value of an estimated range is its geometric middle. The range of a measured time holds the second process's
    median, and of an unstable sample both quartiles: the median of every half of its calls lies between them.
    """
    latency, memory, energy = row.latency_ms, row.memory_bytes, row.energy_mj
    identity: Any = {"artifact": row.artifact, "limit": inf, "status": "unknown"}
    checks = {"size": Check(name="size", unit="bytes", value=row.size_bytes, basis="measured", **identity)}
    identity |= {"batch": row.batch, "seq": row.seq}
    for name, unit, figure, value, low, high in (
        ("latency", "ms", latency, latency.p50, latency.low, latency.high),
        ("memory", "bytes", memory, memory.peak, memory.low, memory.high),
        ("energy", "mJ", energy, energy.value, None, None),
    ):
        basis, reason = figure.status, None
        if basis == "measured" and value is not None:
            low = high = None
        elif basis == "estimated" and name != "energy":  # energy is never estimated
            value = sqrt(low * high) if value is None and low is not None and high is not None else value
        else:
            basis, value, low, high, reason = "unavailable", None, None, None, figure.reason or "not measured"
        checks[name] = Check(
            name=name, unit=unit, value=value, basis=basis, low=low, high=high, reason=reason, **identity
        )
    if checks["latency"].basis == "measured":
        values = [latency.p50 or 0.0]
        if isinstance(second_p50 := row.conditions.get("repeated_p50_ms"), (int, float)):
            values.append(float(second_p50))
        if latency.stable is False and len(latency.quantiles_ms) == QUANTILES:
            values += (latency.quantiles_ms[QUANTILES // 4], latency.quantiles_ms[-1 - QUANTILES // 4])
        update: dict[str, Any] = {"reason": None if latency.stable else "the measurement is unstable"}
        if len(values) > 1:
            update |= {"low": min(values), "high": max(values)}
        checks["latency"] = checks["latency"].model_copy(update=update)
    return checks


def judged_rows(rows: Sequence[Row], limits: Limits, is_whole_text: bool) -> list[Row]:
    """Return one row of an artifact per provider and thread count at the judged shape.

    Estimates count only if nothing was measured. A language model's graph for whole texts spends a whole pass on each
    token, so its passes compare with the tokens of a graph that decodes. Whole calls of a decoding graph, if it has no
    other rows, still have its memory.
    """
    phases = ("steady",) if is_whole_text else (limits.phase, "steady")
    by_setting: dict[tuple[str, str, int | None], Row] = {}
    for row in sorted(rows, key=lambda row: row.phase != phases[0]):
        if (row.batch, row.seq) == (limits.batch, limits.seq) and row.phase in phases:
            by_setting.setdefault((row.where, row.provider, row.threads), row)
    by_status = ([row for row in by_setting.values() if row.latency_ms.status == status] for status in _SUREST_FIRST)
    return next(filter(None, by_status), [])


def _artifact_checks(rows: Sequence[Row], limits: Limits, is_whole_text: bool, per_call: bool) -> list[Check]:
    """Return the checks of one artifact, with the provider and thread count that meet most limits at all shapes.

    ``per_call``: check latency and energy too.
    """
    exact = [row for row in rows if provider_facts(row.provider).rounds_to is None] or rows
    all_limits = (limits, *limits.by_command)
    by_setting = [
        {(row.provider, row.threads): row for row in judged_rows(exact, at_shape, is_whole_text)}
        for at_shape in all_limits
    ]
    choices = [
        [
            check
            for at_shape, shape_rows in zip(all_limits, by_setting, strict=True)
            for check in _row_checks(rows, shape_rows.get(setting), at_shape, is_whole_text, per_call)
        ]
        for setting in dict.fromkeys(chain(*by_setting)) or [("", None)]
    ]

    def rank(checks: list[Check]) -> tuple[int, int, float]:
        statuses = [check.status for check in checks]
        latency = next((check.value for check in reversed(checks) if check.name == "latency"), None)
        return statuses.count("fail"), statuses.count("unknown"), inf if latency is None else latency

    return min(choices, key=rank)


def _row_checks(
    rows: Sequence[Row], row: Row | None, limits: Limits, is_whole_text: bool, per_call: bool
) -> list[Check]:
    """Return the checks at one shape, with one of the artifact's rows; None: none has that shape."""
    where = f"at {limits.batch}×{limits.seq}" + (f": {limits.shape_note}" if limits.shape_note else "")
    nearest = sorted(rows, key=lambda other: (other.batch, other.seq) != (limits.batch, limits.seq))
    reasons = (other.latency_ms.reason for other in nearest if other.latency_ms.status == "unavailable")
    shape = f"{limits.batch}×{limits.seq}"
    shapes = ", ".join(dict.fromkeys(f"{other.batch}×{other.seq}" for other in rows))
    why_absent = (
        f"there is no row at {shape}, but at {shapes}" if row is None else f"decoding at {shape} was not measured"
    )
    why_absent = next(filter(None, reasons), why_absent)
    values = absent = quantities(rows[0].model_copy(update=absent_figures(why_absent)))
    if row is not None:
        # Provider and threads, if other rows differ in them, and what the provider rounds to.
        rounds_to = provider_facts(row.provider).rounds_to
        if rounds_to is not None or len({other.provider for other in rows}) > 1:
            where += f", on {row.provider}" + (f", which rounds to {rounds_to}" if rounds_to is not None else "")
        if row.threads is not None and len({other.threads for other in rows}) > 1:
            where += f", with {format_threads(row.threads)}"
        values = quantities(row)
        # A decoding artifact's whole calls have its memory, but not the time of its tokens.
        if row.phase != limits.phase and not is_whole_text:
            values |= {"latency": absent["latency"], "energy": absent["energy"]}
    passes = is_whole_text and limits.phase == "decode"
    p50 = "p50 of a whole pass, which a graph without caches needs for each token," if passes else "p50"
    checks: list[Check] = []
    for name, limit, description in (
        ("size", limits.size_bytes, ""),
        ("latency", limits.latency_ms if per_call else None, p50),
        ("memory", limits.memory_bytes, "peak"),
        ("energy", limits.energy_mj if per_call else None, "above idle, per call"),
    ):
        if limit is None:
            continue
        check = values[name]
        reason, value, low, high = check.reason, check.value, check.low, check.high
        if description and check.basis != "unavailable":
            estimated = "estimated " if check.basis == "estimated" else ""
            reason = f"{estimated}{description} {where}" + (f"; {reason}" if reason else "")
        status: CheckStatus = "unknown"
        if value is not None and low is not None and high is not None:
            if high <= limit or low > limit:
                status = "pass" if high <= limit else "fail"
            else:
                limit_range = f"{shown(low, check.unit)} to {shown(high, check.unit)}"
                reason = f"{reason}; the limit lies within the range {limit_range}"
        elif value is not None and check.basis == "measured":
            status = "pass" if value <= limit else "fail"
        elif value is not None:
            reason = f"{reason}; an estimate without a range gives no verdict"
        update = {"limit": float(limit), "status": status, "reason": reason}
        if name != "size":
            update |= {"batch": limits.batch, "seq": limits.seq}
        checks.append(check.model_copy(update=update))
    return checks


def shown(value: float | None, unit: str) -> str:
    """Format a quantity: ``12.3 MiB``, ``4.56 ms``."""
    return format_bytes(value) if unit == "bytes" else f"{format_milliseconds(value)} {unit}"
