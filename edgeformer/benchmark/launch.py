"""An artifact's rows, from processes of their own: whatever happens to one of them costs its own row.

What is calm within one process is measured once more by another. Its median may be another one: its memory lies
elsewhere, its threads meet on other cores, a neighbour on the same hardware has begun to work, which no counter shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Row
from edgeformer.benchmark.messages import MESSAGES, FinishedRow, Item, MeasureSpec, Refusal, Start, unavailable_row
from edgeformer.benchmark.process import run_job
from edgeformer.runtimes import on_gpu

# On top of the loops' own bound: opening a large artifact, and a last slow call.
_ALLOWANCE_S = 120.0


class MeasuringInterrupted(KeyboardInterrupt):
    """Ctrl-C while an artifact was measured.

    Args:
        rows: of what was measured before it.
    """

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def measure_in_child(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Rows of one artifact, in the order of ``spec.items``; what could not be measured says why.

    Language models' step and decode artifacts get a row per decoded token (``phase: decode``) at every shape. Where a
    child dies, another one goes on behind the shape that killed it, until two in a row have died without an answer.
    What was stable is measured once more, for a third of the time, by a process of its own; see :func:`confirmed`.

    Args:
        spec: what to measure.
        progress: advanced once per shape and phase, and once more where it is measured again.

    Raises:
        MeasuringInterrupted: Ctrl-C; it has the rows that were measured before.
    """
    name = spec.checked.artifact.id
    try:
        with bar(progress, f"measuring {name}", len(spec.items), "shape"):
            rows = _measure_items(spec, progress)
    except MeasuringInterrupted as error:
        raise MeasuringInterrupted([_unconfirmed(row) for row in error.rows]) from None
    for row in rows:
        if row.latency_ms.status == "unavailable":
            what = "" if row.phase == "steady" else f", {row.phase}"
            progress.message(f"{name} at {row.batch}×{row.seq}{what}: not measured: {row.latency_ms.reason}")
    calm = stable_items(rows)
    if not calm:
        return rows
    others = tuple(item for item in spec.items if item not in calm)
    second = spec.model_copy(update={"rules": spec.rules.repeated(), "answered": others})
    tolerance = spec.rules.repeat_tolerance
    try:
        with bar(progress, f"measuring {name} again", len(calm), "shape"):
            again = {item_of(row): row for row in _measure_items(second, progress)}
    except MeasuringInterrupted as error:
        finished = {item: row for row in error.rows if (item := item_of(row)) is not None}
        rows = [
            confirmed(row, finished[item], tolerance) if (item := item_of(row)) in finished else _unconfirmed(row)
            for row in rows
        ]
        raise MeasuringInterrupted(rows) from None
    return [confirmed(row, again[item], tolerance) if (item := item_of(row)) in calm else row for row in rows]


def item_of(row: Row) -> Item | None:
    """What the row answers; None: a cold row, which answers nothing by itself."""
    return None if row.phase == "cold" else (row.phase, row.batch, row.seq)


def stable_items(rows: Sequence[Row]) -> tuple[Item, ...]:
    """What is worth measuring again: rows that nothing speaks against so far."""
    return tuple(item for row in rows if row.latency_ms.stable and (item := item_of(row)) is not None)


def confirmed(row: Row, again: Row, tolerance: float) -> Row:
    """The row, no longer stable where a second process has another median.

    Args:
        row: keeps its sample as it is; the second median is noted beside it.
        again: the same item from a process of its own.
        tolerance: by which share the medians may differ.
    """
    first, second = row.latency_ms.p50, again.latency_ms.p50
    noted = {**row.conditions, "repeated_p50_ms": second}
    if (took := again.conditions.get("measuring_s")) is not None:
        noted["repeated_measuring_s"] = took
    if first is not None and second is not None and max(first, second) <= min(first, second) * (1 + tolerance):
        return row.model_copy(update={"conditions": noted})
    found = f"found {second:.3g} ms" if second is not None else f"found nothing: {again.latency_ms.reason}"
    doubts = [f"not confirmed: this process has a median of {first:.3g} ms, a second one {found}"]
    # What disturbed the second process is no fact about the first one's calls, but it tells why they differ.
    doubts += [f"the second process: {text}" for text in again.latency_ms.warnings]
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, *doubts)})
    return row.model_copy(update={"latency_ms": latency, "conditions": noted})


def _unconfirmed(row: Row) -> Row:
    """Return the row of an interrupted measurement, no longer stable: no second process has measured it."""
    if item_of(row) is None or not row.latency_ms.stable:
        return row
    doubt = "not confirmed: interrupted before a second process measured it"
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, doubt)})
    return row.model_copy(update={"latency_ms": latency})


@dataclass
class _Answers:
    """Rows measured so far. ``at``: what the present one is measuring; ``cold``: the first call of the
    first one, and what was measured then."""

    progress: Progress
    rows: dict[Item, Row] = field(default_factory=dict)
    cold: tuple[Item | None, Row] | None = None
    refused: dict[Item, str] = field(default_factory=dict)
    provider: str | None = None
    at: Item | None = None

    def take(self, message: Start | FinishedRow | Refusal) -> None:
        """Keep one message."""
        if isinstance(message, Start):
            self.provider, self.at = message.provider, message.item
        elif isinstance(message, Refusal):
            self.refused[message.item] = message.reason
            self.progress.advance(1)
        elif (item := item_of(message.row)) is not None:
            self.rows[item] = message.row
            self.progress.advance(1, p50_ms=message.row.latency_ms.p50 or 0.0)
        elif self.cold is None:  # a child that goes on after another one has a first call, too
            self.cold = self.at, message.row

    @property
    def items(self) -> set[Item]:
        """Items that need no other child: measured, refused, or lost with the one that they killed."""
        return {*self.rows, *self.refused}


def _measure_items(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Rows of the items of ``spec``, and a cold row: runs children until every item is answered or given up."""
    answers, barren, silence_s = _Answers(progress), 0, spec.rules.longest_s + _ALLOWANCE_S
    while left := [item for item in spec.items if item not in answers.items]:
        answers.at = None
        told = spec.model_copy(update={"answered": (*spec.answered, *answers.items)})
        try:
            end = run_job(told, MESSAGES, silence_s, answers.take)
        except KeyboardInterrupt:
            cold = [answers.cold[1]] if answers.cold is not None else []
            raise MeasuringInterrupted([*cold, *answers.rows.values()]) from None
        reason = end.reason or "the measuring process did not measure this shape"
        unanswered = [item for item in left if item not in answers.items]
        barren = barren + 1 if unanswered == left else 0
        if not end.died or barren > 1:
            answers.refused |= dict.fromkeys(unanswered, reason)
        elif unanswered:
            fatal = next((item for item in unanswered if item == answers.at), unanswered[0])
            answers.refused[fatal] = reason
    rows: list[Row] = []
    for item in spec.items:
        if answers.cold is not None and answers.cold[0] == item:
            rows.append(answers.cold[1])
        if item in answers.rows:
            rows.append(answers.rows[item])
        else:
            reason, provider = answers.refused[item], answers.provider or spec.provider or "none"
            row = unavailable_row(spec.checked.artifact, spec.checked.size_bytes, item, provider, "host", reason)
            rows.append(row.model_copy(update={"threads": None if on_gpu(provider) else spec.threads}))
    return rows
