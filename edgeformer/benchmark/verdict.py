"""Verdict: limits against values. A check passes, fails, or is unknown without the device.

A value measured on the device is compared directly. A time that a second process measured as well is a range, and so is
an estimate: a range passes if it lies wholly within the limit, fails if it lies wholly beyond it, and is else unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, sqrt
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


@dataclass(frozen=True)
class Limits:
    """What an artifact may cost, and the shape at which it is judged. A limit of None is not checked.

    Attributes:
        phase: what latency and energy are of: a whole call, or one decoded token.
        shape_note: why the shape is not the budget's.
        by_command: limits of the command line, at the shapes that it names; the other limits are the device's budget.
        profile: name of the device profile with the budget.
    """

    size_bytes: int | None
    latency_ms: float | None
    memory_bytes: int | None
    batch: int
    seq: int
    phase: Literal["steady", "decode"] = "steady"
    shape_note: str | None = None
    energy_mj: float | None = None
    by_command: tuple[Limits, ...] = ()
    profile: str | None = None

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


@dataclass(frozen=True)
class Evidence:
    """Size and rows of one artifact on the device, measured there or estimated for it.

    Attributes:
        rows: of all shapes, providers and thread counts; measured rows win over estimates. Judged is the one provider
            with one thread count that meets most limits, at all shapes together, then the fastest; a provider that
            rounds, which changes the answers, only if there is no other.
        why_no_rows: the reason of an unknown check without a row.
        whole_texts: a language model's graph without caches, to which every token costs a pass over the whole text.
    """

    artifact: str
    size_bytes: int
    rows: Sequence[Row]
    why_no_rows: str
    whole_texts: bool = False


@dataclass(frozen=True)
class Quantity:
    """A latency, memory, energy or size to judge. ``value`` of an estimated range is its geometric middle; a measured
    time has a range if it was measured twice or was not stable."""

    value: float | None
    basis: MeasurementStatus
    reason: str
    low: float | None = None
    high: float | None = None


def check_budget(artifacts: Sequence[Evidence], limits: Limits) -> Verdict:
    """Check every artifact. ``fail`` outweighs ``unknown``, which outweighs ``pass``; without a check it is unknown."""
    exempt = exempt_from_latency(artifacts, limits)
    checks = [check for artifact in artifacts for check in _checks(artifact, limits, artifact.artifact not in exempt)]
    statuses = {check.status for check in checks} or {"unknown"}
    judged = tuple(dict.fromkeys(check.name for check in checks if check.status != "unknown"))
    not_judged: list[NotJudged] = []
    for name in dict.fromkeys((*_EXPECTED_CHECKS, *(check.name for check in checks))):
        if name in judged:
            continue
        unknown = next((check for check in checks if check.name == name), None)
        if unknown is not None:
            reason = unknown.reason or "no reason was given"
        elif not artifacts:
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


def unjudged(reason: str) -> Verdict:
    """Return the verdict if no artifact was checked, with the reason for latency, memory and size."""
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


def exempt_from_latency(artifacts: Sequence[Evidence], limits: Limits) -> tuple[str, ...]:
    """Return the artifacts whose latency and energy are not held against a limit per decoded token.

    Graphs for whole texts score texts; if the bundle has graphs that decode, those are judged for decoding. Without
    them a token costs a whole pass, which is judged.
    """
    if limits.phase != "decode" or all(artifact.whole_texts for artifact in artifacts):
        return ()
    return tuple(artifact.artifact for artifact in artifacts if artifact.whole_texts)


def latency_of(row: Row) -> Quantity:
    """Return the typical milliseconds of one call; of a decode row, of one token.

    The range of a measured time holds the second process's median, and of an unstable sample both quartiles: the
    median of every half of its calls lies between them.
    """
    latency = row.latency_ms
    quantity = _quantity(latency, latency.p50, "" if latency.stable else "; the measurement is not stable")
    if quantity.value is None or quantity.basis != "measured":
        return quantity
    values, quantiles = [quantity.value], latency.quantiles_ms
    second_p50 = row.conditions.get("repeated_p50_ms")
    if isinstance(second_p50, (int, float)):
        values.append(float(second_p50))
    if latency.stable is False and len(quantiles) == QUANTILES:
        values += (quantiles[QUANTILES // 4], quantiles[-1 - QUANTILES // 4])
    return replace(quantity, low=min(values), high=max(values)) if len(values) > 1 else quantity


def memory_of(row: Row) -> Quantity:
    """Return the peak bytes."""
    return _quantity(row.memory_bytes, row.memory_bytes.peak)


def energy_of(row: Row) -> Quantity:
    """Return the millijoules of one call above idle."""
    return _quantity(row.energy_mj, row.energy_mj.value)


def _quantity(figure: Latency | Memory | Energy, value: float | None, doubt: str = "") -> Quantity:
    """Return a figure with its value; ``doubt`` about a measured value."""
    if figure.status == "measured" and value is not None:
        return Quantity(value, "measured", doubt)
    if isinstance(figure, Energy) or figure.status != "estimated":  # energy is never estimated
        return Quantity(None, "unavailable", figure.reason or "not measured")
    low, high = figure.low, figure.high
    if value is None and low is not None and high is not None:
        value = sqrt(low * high)
    return Quantity(value, "estimated", "", low, high)


def _checks(artifact: Evidence, limits: Limits, per_call: bool) -> list[Check]:
    """Return the checks of one artifact, with the provider and thread count that meet most limits at all shapes.

    ``per_call``: check latency and energy too.
    """
    exact = [row for row in artifact.rows if provider_facts(row.provider).rounds_to is None]
    judged, all_limits = replace(artifact, rows=exact or artifact.rows), (limits, *limits.by_command)
    rows = [{(row.provider, row.threads): row for row in judged_rows(judged, at_shape)} for at_shape in all_limits]

    def rank(checks: list[Check]) -> tuple[int, int, float]:
        statuses = [check.status for check in checks]
        latency = next((check.value for check in reversed(checks) if check.name == "latency"), None)
        return statuses.count("fail"), statuses.count("unknown"), inf if latency is None else latency

    settings: Sequence[tuple[str, int | None] | None] = [*dict.fromkeys(chain(*rows))] or [None]
    choices = [
        [
            check
            for at_shape, by_setting in zip(all_limits, rows, strict=True)
            for check in _row_checks(artifact, by_setting.get(setting) if setting else None, at_shape, per_call)
        ]
        for setting in settings
    ]
    return min(choices, key=rank)


def judged_rows(artifact: Evidence, limits: Limits) -> list[Row]:
    """Return one row per provider and thread count at the judged shape; estimates only if nothing was measured.

    A language model's graph for whole texts spends a whole pass on each token, so its passes compare with the tokens of
    a graph that decodes. Whole calls of a decoding graph, if it has no other rows, still have its memory.
    """
    phases = ("steady",) if artifact.whole_texts else (limits.phase, "steady")
    rows: dict[tuple[str, str, int | None], Row] = {}
    for row in sorted(artifact.rows, key=lambda row: row.phase != phases[0]):
        if (row.batch, row.seq) == (limits.batch, limits.seq) and row.phase in phases:
            rows.setdefault((row.where, row.provider, row.threads), row)
    by_status = ([row for row in rows.values() if row.latency_ms.status == status] for status in _SUREST_FIRST)
    return next(filter(None, by_status), [])


def _row_checks(artifact: Evidence, row: Row | None, limits: Limits, per_call: bool) -> list[Check]:
    """Return the checks at one shape, with one row's figures."""
    where = f"at {limits.batch}×{limits.seq}" + (f": {limits.shape_note}" if limits.shape_note else "")
    latency = memory = energy = Quantity(None, "unavailable", artifact.why_no_rows)
    if row is not None:
        # Provider and threads, if other rows differ in them, and what the provider rounds to.
        rounds_to = provider_facts(row.provider).rounds_to
        if rounds_to is not None or len({other.provider for other in artifact.rows}) > 1:
            where += f", on {row.provider}" + (f", which rounds to {rounds_to}" if rounds_to is not None else "")
        if row.threads is not None and len({other.threads for other in artifact.rows}) > 1:
            where += f", with {row.threads} {'thread' if row.threads == 1 else 'threads'}"
        memory = memory_of(row)
        # A decoding artifact's whole calls have its memory, but not the time of its tokens.
        if row.phase == limits.phase or artifact.whole_texts:
            latency, energy = latency_of(row), energy_of(row)
    passes = artifact.whole_texts and limits.phase == "decode"
    p50 = "p50 of a whole pass, which each token costs without caches," if passes else "p50"
    checks: list[Check] = []
    for name, limit, unit, quantity, description in (
        ("size", limits.size_bytes, "bytes", Quantity(artifact.size_bytes, "measured", ""), ""),
        ("latency", limits.latency_ms if per_call else None, "ms", latency, p50),
        ("memory", limits.memory_bytes, "bytes", memory, "peak"),
        ("energy", limits.energy_mj if per_call else None, "mJ", energy, "above idle, per call"),
    ):
        if limit is None:
            continue
        reason, value, low, high = quantity.reason, quantity.value, quantity.low, quantity.high
        if description and quantity.basis != "unavailable":
            estimated = "estimated " if quantity.basis == "estimated" else ""
            reason = f"{estimated}{description} {where}{reason}"
        status: CheckStatus = "unknown"
        if value is not None and low is not None and high is not None:
            if high <= limit or low > limit:
                status = "pass" if high <= limit else "fail"
            else:
                reason += f"; the limit lies within the range {shown(low, unit)} to {shown(high, unit)}"
        elif value is not None and quantity.basis == "measured":
            status = "pass" if value <= limit else "fail"
        elif value is not None:
            reason += "; an estimate without a range decides nothing"
        checks.append(
            Check(
                name=name,
                artifact=artifact.artifact,
                limit=limit,
                value=value,
                unit=unit,
                status=status,
                basis=quantity.basis,
                low=low,
                high=high,
                reason=reason or None,
                batch=limits.batch if name != "size" else None,
                seq=limits.seq if name != "size" else None,
            )
        )
    return checks


def shown(value: float | None, unit: str) -> str:
    """Format a quantity: ``12.3 MiB``, ``4.56 ms``."""
    return format_bytes(value) if unit == "bytes" else f"{format_milliseconds(value)} {unit}"
