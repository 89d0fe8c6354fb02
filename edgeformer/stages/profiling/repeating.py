"""Is a figure there again when it is measured again? A second process answers that.

Within one process everything may be calm and the next one still finds another median: its memory lies elsewhere, its
threads meet on other cores, a neighbour on the same hardware has begun to work, which no counter here shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeformer.formats.report import Row
from edgeformer.stages.profiling.messages import Item


def item_of(row: Row) -> Item | None:
    """What the row answers; None: a cold row, which answers nothing by itself."""
    return None if row.phase == "cold" else (row.phase, row.batch, row.seq)


def stable_items(rows: Sequence[Row]) -> tuple[Item, ...]:
    """What is worth measuring again: rows that nothing speaks against so far."""
    return tuple(item for row in rows if row.latency_ms.stable and (item := item_of(row)) is not None)


def confirmed(row: Row, again: Row, tolerance: float) -> Row:
    """The row, no longer stable where ``again``, from a second process, has a median outside the tolerance.

    The first one's sample is kept as it is; the second median is noted beside it.
    """
    first, second = row.latency_ms.p50, again.latency_ms.p50
    noted = {**row.conditions, "repeated_p50_ms": second}
    if first is not None and second is not None and max(first, second) <= min(first, second) * (1 + tolerance):
        return row.model_copy(update={"conditions": noted})
    found = f"found {second:.3g} ms" if second is not None else f"found nothing: {again.latency_ms.reason}"
    doubts = [f"not confirmed: this process has a median of {first:.3g} ms, a second one {found}"]
    # What disturbed the second process is no fact about the first one's calls, but it tells why they differ.
    doubts += [f"the second process: {text}" for text in again.latency_ms.warnings]
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, *doubts)})
    return row.model_copy(update={"latency_ms": latency, "conditions": noted})
