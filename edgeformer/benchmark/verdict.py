"""Budgets against values: what passes, what fails, and what nobody can know without the device.

A value that was measured on the device is compared as it is, a time with what a second process found as well. That is a
range, as an estimate is: it passes when the whole range is within the limit, fails when the whole range is beyond it,
and is unknown in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from edgeformer.artifacts.report import (
    QUANTILES,
    Check,
    CheckStatus,
    Energy,
    Latency,
    MeasurementStatus,
    Memory,
    NotJudged,
    Row,
    Verdict,
)
from edgeformer.artifacts.units import format_bytes, format_milliseconds
from edgeformer.runtimes import provider_facts

_WORST_FIRST: tuple[CheckStatus, ...] = ("fail", "unknown", "pass")
_SUREST_FIRST: tuple[MeasurementStatus, ...] = ("measured", "estimated", "unavailable")
_EXPECTED_CHECKS = ("size", "latency", "memory")
"""Kinds of check that a reader takes for granted in a pass; a verdict says which of them were not judged."""
_Way = tuple[str, int | None]
"""Provider and threads."""


@dataclass(frozen=True)
class Limits:
    """What an artifact may cost, and at which shape it is judged. An absent limit is not checked.

    ``phase`` is what latency and energy are of: a whole call, or one decoded token. ``asked``: limits of the command
    line, at the shapes that it names; those of the device's budget are judged at the budget's. ``profile``: name of the
    device profile with that budget.
    """

    size_bytes: int | None
    latency_ms: float | None
    memory_bytes: int | None
    batch: int
    seq: int
    phase: Literal["steady", "decode"] = "steady"
    shape_note: str | None = None
    energy_mj: float | None = None
    asked: tuple[Limits, ...] = ()
    profile: str | None = None

    @property
    def judges_calls(self) -> bool:
        """Whether anything but a file's size is limited at its own shape."""
        return any(limit is not None for limit in (self.latency_ms, self.memory_bytes, self.energy_mj))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every (batch, seq) at which something is judged; without limits, the budget's."""
        own = ((self.batch, self.seq),) if self.judges_calls or not self.asked else ()
        return (*own, *((at.batch, at.seq) for at in self.asked))

    @property
    def ranked(self) -> Limits:
        """At the shape at which artifacts are compared with each other: the largest that limits were asked for at."""
        return self.asked[-1] if self.asked else self


@dataclass(frozen=True)
class Evidence:
    """What is known of one artifact: its file's size and its rows of the device, measured there or estimated for it.

    Attributes:
        rows: also those at other shapes and of several providers and thread counts; measured ones win over estimates.
            Judged is the one provider with one thread count that meets most limits, at all shapes together, then the
            fastest; a provider that rounds, whose answers are others, only where there is no other.
        why_no_rows: the reason of what is unknown because there is no row.
        whole_texts: a language model's graph without caches, to which every token costs a pass over the whole text.
    """

    artifact: str
    size_bytes: int
    rows: Sequence[Row]
    why_no_rows: str
    whole_texts: bool = False


@dataclass(frozen=True)
class Quantity:
    """What is known of one quantity. Estimates have a range and, as ``value``, its geometric middle; measured times
    have a range where they were measured twice, or were not stable."""

    value: float | None
    basis: MeasurementStatus
    reason: str
    low: float | None = None
    high: float | None = None


def check_budget(artifacts: Sequence[Evidence], limits: Limits) -> Verdict:
    """Check every artifact. ``fail`` outweighs ``unknown``, that outweighs ``pass``; no check is unknown.

    Args:
        artifacts: what is known of each.
        limits: what they may cost.
    """
    spared = spared_of_latency(artifacts, limits)
    checks = [check for artifact in artifacts for check in _checks(artifact, limits, artifact.artifact not in spared)]
    statuses = {check.status for check in checks} or {"unknown"}
    judged = tuple(dict.fromkeys(check.name for check in checks if check.status != "unknown"))
    return Verdict(
        status=next(status for status in _WORST_FIRST if status in statuses),
        checks=tuple(checks),
        judged=judged,
        not_judged=tuple(_not_judged(checks, judged, bool(artifacts), limits)),
    )


def _not_judged(
    checks: Sequence[Check], judged: Sequence[str], has_artifacts: bool, limits: Limits
) -> Iterator[NotJudged]:
    for name in dict.fromkeys((*_EXPECTED_CHECKS, *(check.name for check in checks))):
        if name in judged:
            continue
        open_checks = [check for check in checks if check.name == name]
        if open_checks:
            reason = open_checks[0].reason or "no reason was given"
        elif not has_artifacts:
            reason = "no artifact can run on the device"
        else:
            reason = f"the profile {limits.profile} sets no limit" if limits.profile else "no limit is set"
        yield NotJudged(name=name, reason=reason)


def unjudged(reason: str) -> Verdict:
    """Return the verdict where no artifact was checked.

    Args:
        reason: why latency, memory and size were not judged.
    """
    return Verdict(status="unknown", not_judged=tuple(NotJudged(name=name, reason=reason) for name in _EXPECTED_CHECKS))


def unlimited_notes(verdict: Verdict) -> list[str]:
    """Return a note with the options that limit what has no limit; empty if latency, memory and size have one."""
    if not verdict.checks:
        return ["nothing was judged: neither the profile nor the command sets a limit"]
    flags = {"latency": "--max-latency", "memory": "--max-vram", "size": "--max-size"}
    checked = {check.name for check in verdict.checks}
    missing = [kind.name for kind in verdict.not_judged if kind.name in flags.keys() - checked]
    if not missing:
        return []
    return [f"no limit for {' and '.join(missing)}; set one with {' and '.join(flags[name] for name in missing)}"]


def spared_of_latency(artifacts: Sequence[Evidence], limits: Limits) -> tuple[str, ...]:
    """Artifacts whose latency and energy are not held against a limit per decoded token.

    Graphs for whole texts score texts; where the bundle has graphs that decode, those answer for decoding. Where it has
    none, a token costs a whole pass, and that is judged.

    Args:
        artifacts: all that are checked together.
        limits: what they may cost.
    """
    if limits.phase != "decode" or all(artifact.whole_texts for artifact in artifacts):
        return ()
    return tuple(artifact.artifact for artifact in artifacts if artifact.whole_texts)


def latency_of(row: Row) -> Quantity:
    """Typical milliseconds of one call; for a decode row, of one token."""
    latency = row.latency_ms
    known = _known(latency, latency.p50, "" if latency.stable else "; the measurement is not stable")
    others = list(_other_middles(row))
    if known.value is None or known.basis != "measured" or not others:
        return known
    return replace(known, low=min(known.value, *others), high=max(known.value, *others))


def _other_middles(row: Row) -> Iterator[float]:
    """What else the typical time may be: the median of the second process; and of a sample that was not stable both
    quartiles, between which the median of every half of its calls lies."""
    again, drawn = row.conditions.get("repeated_p50_ms"), row.latency_ms.quantiles_ms
    if isinstance(again, (int, float)):
        yield float(again)
    if row.latency_ms.stable is False and len(drawn) == QUANTILES:
        yield from (drawn[QUANTILES // 4], drawn[-1 - QUANTILES // 4])


def memory_of(row: Row) -> Quantity:
    """Peak bytes."""
    return _known(row.memory_bytes, row.memory_bytes.peak)


def energy_of(row: Row) -> Quantity:
    """Millijoules of one call above idle."""
    return _known(row.energy_mj, row.energy_mj.value)


def _known(figure: Latency | Memory | Energy, value: float | None, doubt: str = "") -> Quantity:
    """``doubt``: of a measured value."""
    if figure.status == "measured" and value is not None:
        return Quantity(value, "measured", doubt)
    if isinstance(figure, Energy) or figure.status != "estimated":  # energy is measured, never estimated
        return Quantity(None, "unavailable", figure.reason or "not measured")
    low, high = figure.low, figure.high
    if value is None and low is not None and high is not None:
        value = sqrt(low * high)
    return Quantity(value, "estimated", "", low, high)


def _checks(artifact: Evidence, limits: Limits, per_call: bool) -> list[Check]:
    """All checks of one artifact, at all shapes by one provider with one thread count: it is deployed as one.

    ``per_call``: latency and energy too.
    """
    exact = [row for row in artifact.rows if provider_facts(row.provider).rounds_to is None]
    judged, shapes = replace(artifact, rows=exact or artifact.rows), (limits, *limits.asked)
    found: list[dict[_Way | None, Row]] = [
        {(row.provider, row.threads): row for row in judged_rows(judged, at)} for at in shapes
    ]
    ways: Sequence[_Way | None] = [*dict.fromkeys(way for rows in found for way in rows)] or [None]

    def checks(way: _Way | None) -> Iterator[Check]:
        for at, rows in zip(shapes, found, strict=True):
            yield from _row_checks(artifact, rows.get(way), at, per_call)

    return min((list(checks(way)) for way in ways), key=_rank)


def judged_rows(artifact: Evidence, limits: Limits) -> list[Row]:
    """One row per provider and thread count at the judged shape; estimates only where nothing was measured.

    A language model's graph for whole texts spends a whole pass on each token, so its passes are what compares with
    the tokens of a graph that decodes. Where that one has whole calls only, these still tell its memory.

    Args:
        artifact: what is known of it.
        limits: the shape, and what latency is of.
    """
    phases = ("steady",) if artifact.whole_texts else (limits.phase, "steady")
    found: dict[tuple[str, str, int | None], Row] = {}
    for row in sorted(artifact.rows, key=lambda row: row.phase not in phases[:1]):
        if (row.batch, row.seq) == (limits.batch, limits.seq) and row.phase in phases:
            found.setdefault((row.where, row.provider, row.threads), row)
    by_status = ([row for row in found.values() if row.latency_ms.status == status] for status in _SUREST_FIRST)
    return next(filter(None, by_status), [])


def _rank(checks: list[Check]) -> tuple[int, int, float]:
    statuses = [check.status for check in checks]
    latency = next((check.value for check in reversed(checks) if check.name == "latency"), None)
    return statuses.count("fail"), statuses.count("unknown"), float("inf") if latency is None else latency


def _way_words(row: Row, others: Sequence[Row]) -> str:
    """Provider and threads of a row, where the others differ from it in them, and what the provider rounds to."""
    rounds_to, said = provider_facts(row.provider).rounds_to, ""
    if rounds_to is not None or len({other.provider for other in others}) > 1:
        said += f", on {row.provider}" + (f", which rounds to {rounds_to}" if rounds_to is not None else "")
    if row.threads is not None and len({other.threads for other in others}) > 1:
        said += f", with {row.threads} {'thread' if row.threads == 1 else 'threads'}"
    return said


def _row_checks(artifact: Evidence, row: Row | None, limits: Limits, per_call: bool) -> list[Check]:
    """All checks at one shape, with one row's figures."""
    where = f"at {limits.batch}×{limits.seq}" + (f": {limits.shape_note}" if limits.shape_note else "")
    where += _way_words(row, artifact.rows) if row is not None else ""
    # A decoding artifact's whole calls say nothing about its tokens; their memory is memory all the same.
    timed = row if row is not None and (row.phase == limits.phase or artifact.whole_texts) else None
    passes = artifact.whole_texts and limits.phase == "decode"
    p50 = "p50 of a whole pass, which each token costs without caches," if passes else "p50"
    missing = Quantity(None, "unavailable", artifact.why_no_rows)
    latency, energy = (missing, missing) if timed is None else (latency_of(timed), energy_of(timed))
    judged: list[tuple[str, float | None, str, Quantity, str]] = [
        ("size", limits.size_bytes, "bytes", Quantity(artifact.size_bytes, "measured", ""), ""),
        ("latency", limits.latency_ms if per_call else None, "ms", latency, p50),
        ("memory", limits.memory_bytes, "bytes", missing if row is None else memory_of(row), "peak"),
        ("energy", limits.energy_mj if per_call else None, "mJ", energy, "above idle, per call"),
    ]
    checks: list[Check] = []
    for name, limit, unit, quantity, what in judged:
        if limit is not None:
            if what and quantity.basis != "unavailable":  # that keeps its own reason
                estimated = "estimated " if quantity.basis == "estimated" else ""
                quantity = replace(quantity, reason=f"{estimated}{what} {where}{quantity.reason}")
            check = _compare(name, artifact.artifact, limit, quantity, unit)
            at = {"batch": limits.batch, "seq": limits.seq} if name != "size" else {}
            checks.append(check.model_copy(update=at))
    return checks


def _compare(name: str, artifact: str, limit: float, quantity: Quantity, unit: str) -> Check:
    status, why = _status(limit, quantity, unit)
    return Check(
        name=name,
        artifact=artifact,
        limit=limit,
        value=quantity.value,
        unit=unit,
        status=status,
        basis=quantity.basis,
        low=quantity.low,
        high=quantity.high,
        reason=(quantity.reason + why) or None,
    )


def _status(limit: float, quantity: Quantity, unit: str) -> tuple[CheckStatus, str]:
    """The status, and what the reason needs to explain it."""
    if quantity.value is None:
        return "unknown", ""
    low, high = quantity.low, quantity.high
    if low is None or high is None:
        if quantity.basis == "measured":
            return ("pass" if quantity.value <= limit else "fail"), ""
        return "unknown", "; an estimate without a range decides nothing"
    if high <= limit:
        return "pass", ""
    if low > limit:
        return "fail", ""
    return "unknown", f"; the limit lies within the range {shown(low, unit)} to {shown(high, unit)}"


def shown(value: float | None, unit: str) -> str:
    """A quantity for people: ``12.3 MiB``, ``4.56 ms``."""
    return format_bytes(value) if unit == "bytes" else f"{format_milliseconds(value)} {unit}"
