"""Verdict: limits against the figures of every artifact. A check passes, fails, or is unknown without the device.

A value measured on the device is compared directly. A time that a second process measured as well is a range, and so is
an estimate.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from math import inf

from edgeformer.artifacts.report import Check, CheckStatus, MeasurementStatus, NotJudged, Row, Verdict
from edgeformer.benchmark.limits import PER_CALL, UNITS, Limit, Requirements, compare, figures_of
from edgeformer.measurement.artifact import Shape, absent_figures
from edgeformer.report import sentences
from edgeformer.report.sentences import note
from edgeformer.runtimes import provider_facts

_WORST_FIRST: tuple[CheckStatus, ...] = ("fail", "unknown", "pass")
_SUREST_FIRST: tuple[MeasurementStatus, ...] = ("measured", "estimated", "unavailable")
EXPECTED_CHECKS = ("size", "latency", "memory")
"""Kinds of check that a reader takes for granted in a pass; a verdict says which of them were not judged."""


def check_budget(rows: Sequence[Row], requirements: Requirements, whole_texts: Collection[str] = ()) -> Verdict:
    """Check every artifact by its rows on the device.

    ``whole_texts`` are graphs of language models without caches, to which every token costs a whole pass.
    """
    exempt = exempt_from_latency(rows, requirements, whole_texts)
    checks: list[Check] = []
    for artifact in dict.fromkeys(row.artifact for row in rows):
        artifact_rows = [row for row in rows if row.artifact == artifact]
        checks += artifact_checks(artifact_rows, requirements, artifact in whole_texts, per_call=artifact not in exempt)
    return verdict_of(checks, requirements, has_rows=bool(rows))


def verdict_of(checks: Sequence[Check], requirements: Requirements, *, has_rows: bool) -> Verdict:
    """Sum up checks: ``fail`` outweighs ``unknown``, which outweighs ``pass``; without a check it is unknown."""
    statuses = {check.status for check in checks} or {"unknown"}
    judged = tuple(dict.fromkeys(check.name for check in checks if check.status != "unknown"))
    not_judged: list[NotJudged] = []
    for name in dict.fromkeys((*EXPECTED_CHECKS, *(check.name for check in checks))):
        if name not in judged:
            absent = "no rows" if not has_rows else "no limit of the profile" if requirements.profile else "no limit"
            reasons = [check.reason or sentences.NO_REASON for check in checks if check.name == name]
            reason = next(iter(reasons), note(absent, profile=requirements.profile))
            not_judged.append(NotJudged(name=name, reason=reason))
    return Verdict(
        status=next(status for status in _WORST_FIRST if status in statuses), checks=tuple(checks), judged=judged,
        not_judged=tuple(not_judged),
    )  # fmt: skip


def exempt_from_latency(
    rows: Sequence[Row], requirements: Requirements, whole_texts: Collection[str]
) -> tuple[str, ...]:
    """Return the graphs for whole texts that no limit per decoded token concerns, because other artifacts decode."""
    artifacts = tuple(dict.fromkeys(row.artifact for row in rows))
    if requirements.phase != "decode" or all(artifact in whole_texts for artifact in artifacts):
        return ()
    return tuple(artifact for artifact in artifacts if artifact in whole_texts)


def judged_rows(rows: Sequence[Row], shape: Shape, requirements: Requirements, is_whole_text: bool) -> list[Row]:
    """Return one row of an artifact per provider and thread count at a shape.

    Estimates count only if nothing was measured. A language model's graph for whole texts spends a whole pass on each
    token, so its passes compare with the tokens of a graph that decodes. Whole calls of a decoding graph, if it has no
    other rows, still have its memory.
    """
    phases = ("steady",) if is_whole_text else (requirements.phase, "steady")
    by_setting: dict[tuple[str, str, int | None], Row] = {}
    for row in sorted(rows, key=lambda row: row.phase != phases[0]):
        if (row.batch, row.seq) == shape and row.phase in phases:
            by_setting.setdefault((row.where, row.provider, row.threads), row)
    by_status = ([row for row in by_setting.values() if row.latency_ms.status == status] for status in _SUREST_FIRST)
    return next(filter(None, by_status), [])


def artifact_checks(
    rows: Sequence[Row], requirements: Requirements, is_whole_text: bool, *, per_call: bool
) -> list[Check]:
    """Return the checks of one artifact with the provider and thread count that meet most limits, then the fastest.

    Measured rows win over estimates; a provider that rounds is judged only if there is no other. ``per_call``: check
    latency and energy too.
    """
    exact = [row for row in rows if provider_facts(row.provider).rounds_to is None] or rows
    rows_at = {
        shape: {(row.provider, row.threads): row for row in judged_rows(exact, shape, requirements, is_whole_text)}
        for shape in requirements.shapes
    }
    limits = [limit for limit in requirements.limits if limit.quantity != "score"]
    limits = [limit for limit in limits if per_call or limit.quantity not in PER_CALL]
    choices = [
        [
            _check(rows, rows_at[limit.shape].get(setting) if limit.shape else None, limit, requirements, is_whole_text)
            for limit in limits
        ]
        for setting in dict.fromkeys(chain(*rows_at.values())) or [("", None)]
    ]

    def rank(checks: list[Check]) -> tuple[int, int, float]:
        statuses = [check.status for check in checks]
        latency = next((check.value for check in reversed(checks) if check.name == "latency"), None)
        return statuses.count("fail"), statuses.count("unknown"), inf if latency is None else latency

    return min(choices, key=rank)


def _check(
    rows: Sequence[Row], row: Row | None, limit: Limit, requirements: Requirements, is_whole_text: bool
) -> Check:
    """Compare one of an artifact's rows with a limit; ``row`` None: none has the limit's shape."""
    name, shape = limit.quantity, limit.shape or requirements.shape
    # A decoding artifact's whole calls have its memory, but not the time of its tokens.
    is_other_phase = row is not None and row.phase != requirements.phase and not is_whole_text
    figure = figures_of(row or rows[0])[name]
    if name != "size" and (row is None or (is_other_phase and name in PER_CALL)):
        nearest = sorted(rows, key=lambda other: (other.batch, other.seq) != shape)
        reasons = (other.latency_ms.reason for other in nearest if other.latency_ms.status == "unavailable")
        shapes = ", ".join(dict.fromkeys(f"{other.batch}×{other.seq}" for other in rows))
        absent = note("no decode row" if row else "no row", shape=f"{shape[0]}×{shape[1]}", shapes=shapes)
        reason = next(filter(None, reasons), absent)
        figure = figures_of(rows[0].model_copy(update=absent_figures(reason)))[name]
    call = sentences.Call(shape)
    if row is not None:
        rounds_to = provider_facts(row.provider).rounds_to
        is_of_budget = limit.origin == "profile" or requirements.command_shapes == (requirements.shape,)
        is_named = rounds_to is not None or len({other.provider for other in rows}) > 1
        call = sentences.Call(
            shape, shape_note=requirements.shape_note if is_of_budget else None,
            provider=row.provider if is_named else None, rounds_to=rounds_to,
            threads=row.threads if len({other.threads for other in rows}) > 1 else None,
            is_pass_per_token=is_whole_text and requirements.phase == "decode",
        )  # fmt: skip
    status = compare(figure, limit.limit)
    unit = UNITS[name]
    return Check(
        name=name, artifact=rows[0].artifact, limit=float(limit.limit), value=figure.value, unit=unit,
        status=status, basis=figure.basis, low=figure.low, high=figure.high,
        reason=sentences.check_reason(name, unit, figure, call, is_undecided=status == "unknown"),
        batch=limit.shape[0] if limit.shape else None, seq=limit.shape[1] if limit.shape else None,
    )  # fmt: skip
