"""Rows of one artifact, measured by worker processes of their own: whatever happens to one costs its own row only.

A stable row is measured a second time by another process, whose median may differ: its memory lies elsewhere, its
threads run on other cores, or other work has begun on the same hardware that no counter shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.golden import GOLDEN_FILE, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.process import End, Job, run_job
from edgeformer.bundle import Bundle
from edgeformer.runtimes import ArtifactFiles, on_gpu
from edgeformer.runtimes.session import Array
from edgeformer.tasks import Task, get_task

Shape = tuple[int, int]
"""(batch, seq)"""

Phase = Literal["steady", "decode"]
"""Whole inputs in one call; or the next token of a text, with caches of the tokens before it."""

Item = tuple[Phase, int, int]
"""(phase, batch, seq): what gets one row."""

Where = Literal["host", "device"]
"""Measured on this host, or a figure of the device that an artifact is judged for."""

ALLOWANCE_S = 120.0
"""Silence of a worker beyond the bound of its loops: opening a large artifact, and a slow last call."""


def phases_of(artifact: ArtifactManifest, task: Task) -> tuple[Phase, ...]:
    """Return the phases that can be measured of an artifact.

    A decode graph writes token by token; the step bundle of a language model does that and also takes whole texts.
    """
    if artifact.role == "decode":
        return ("decode",)
    return ("steady", "decode") if artifact.role == "step" and task.writes_text else ("steady",)


class CheckedArtifact(Frozen):
    """An artifact whose files match the manifest: all that a worker needs to open it."""

    artifact: ArtifactManifest = Field(description="without its scores, which only its task can parse")
    golden: Path
    file: Path
    parts: dict[str, Path] = Field({}, description="step artifacts: part → file")
    loops: int | None = Field(None, description="step artifacts: calls of the loop graph")
    max_positions: int | None = None
    task: str = Field(description="name of the task, which turns golden inputs into calls")
    axes: dict[str, tuple[str, ...]] = Field({}, description="input → what sizes each of its axes; empty: text")

    @classmethod
    def of(cls, bundle: Bundle, artifact: ArtifactManifest) -> CheckedArtifact:
        """Check the files of a built artifact; paths become absolute.

        Raises:
            ArtifactError: a file is missing, truncated or changed, or the golden inputs are damaged.
        """
        bundle.golden(artifact)
        files = bundle.files(artifact)
        return cls(
            artifact=artifact.model_copy(update={"score": None, "validation": None, "rounded": {}}),
            golden=(bundle.folder / artifact.companions / GOLDEN_FILE).resolve(),
            file=files.file.resolve(),
            parts={name: path.resolve() for name, path in files.parts.items()},
            loops=files.loops,
            max_positions=files.max_positions,
            task=bundle.task.name,
            axes=dict(bundle.task.axes(bundle.data)),
        )

    def calls(self, shape: Shape, count: int) -> list[dict[str, Array]]:
        """Return different real inputs of one shape. Raises GoldenError."""
        return get_task(self.task).calls(read_golden(self.golden), self.axes, shape, count)

    @property
    def files(self) -> ArtifactFiles:
        """The files as a runtime takes them."""
        return ArtifactFiles(self.artifact, self.file, self.parts, self.loops, self.max_positions)

    @property
    def size_bytes(self) -> int:
        """With its share of weights that are stored beside the graph."""
        return self.artifact.size_bytes or self.file.stat().st_size


class MeasureSpec(Job):
    """One artifact, the shapes to measure it at, and the rules."""

    name, answers = "measuring", "measurements"
    kind: Literal["measure", "pair"] = Field("measure", description="pair: blocks of calls on request, of one item")
    checked: CheckedArtifact
    provider: str | None = Field(description="None: the runtime's choice for this machine")
    phases: tuple[Phase, ...] = Field(("steady",), strict=False)
    shapes: tuple[Shape, ...] = Field(strict=False)
    answered: tuple[Item, ...] = Field((), strict=False, description="items that an earlier worker finished or died of")
    rules: MeasureRules
    repeat: int = Field(1, ge=1, description="pair: calls timed as one, by which a benchmark plants a slowdown")

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that are left, shape by shape, and phase by phase at each of them."""
        items: list[Item] = [(phase, *shape) for shape, phase in product(self.shapes, self.phases)]
        return tuple(item for item in items if item not in self.answered)


class Start(Frozen):
    """Message: an item is being opened and measured."""

    kind: Literal["start"] = "start"
    item: Item = Field(strict=False)
    provider: str


class FinishedRow(Frozen):
    """Message: a row, sent as soon as it is finished."""

    kind: Literal["row"] = "row"
    row: Row


class Refusal(Frozen):
    """Message: one item cannot be measured or listed; the others continue."""

    kind: Literal["refusal"] = "refusal"
    item: Item = Field(strict=False)
    reason: str


MESSAGES: TypeAdapter[Start | FinishedRow | Refusal | End] = TypeAdapter(
    Annotated[Start | FinishedRow | Refusal | End, Field(discriminator="kind")]
)


def row_of(artifact: ArtifactManifest, item: Item, provider: str, where: Where, **figures: Any) -> Row:
    """Return a row of an artifact; ``figures`` are the row's other fields."""
    phase, batch, seq = item
    identity: Any = {"provider": provider, "where": where, "phase": phase, "batch": batch, "seq": seq}
    return Row(artifact=artifact.id, precision=artifact.precision, **identity, **figures)


def unavailable_row(
    artifact: ArtifactManifest, size_bytes: int, item: Item, provider: str, where: Where, reason: str
) -> Row:
    """Return a row without figures except the file's size, and with the reason."""
    absent: Any = {"status": "unavailable", "reason": reason}
    figures = {"latency_ms": Latency(**absent), "memory_bytes": Memory(**absent), "energy_mj": Energy(**absent)}
    return row_of(artifact, item, provider, where, size_bytes=size_bytes, **figures)


class MeasuringInterrupted(KeyboardInterrupt):
    """Ctrl-C while an artifact was measured; ``rows`` were finished before it."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def measure_artifact(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Return the rows of one artifact, in the order of ``spec.items``; a row without figures has a reason.

    Decode and step artifacts of language models get a row per decoded token (``phase: decode``) at every shape. After
    a worker died, a new one continues behind the shape that killed it, until two in a row have died without a row.
    Stable rows are measured again, for a third of the time, by a second process; see :func:`confirmed`.

    Args:
        spec: what to measure.
        progress: advanced once per item, and once more if the item is measured again.

    Raises:
        MeasuringInterrupted: Ctrl-C.
    """
    name = spec.checked.artifact.id
    try:
        with bar(progress, f"measuring {name}", len(spec.items), "shape"):
            rows = _measure_items(spec, progress)
    except MeasuringInterrupted as error:
        raise MeasuringInterrupted([_unconfirmed(row) for row in error.rows]) from None
    for row in rows:
        if row.latency_ms.status == "unavailable":
            phase = "" if row.phase == "steady" else f", {row.phase}"
            progress.message(f"{name} at {row.batch}×{row.seq}{phase}: not measured: {row.latency_ms.reason}")
    stable = stable_items(rows)
    if not stable:
        return rows
    unstable = tuple(item for item in spec.items if item not in stable)
    second = spec.model_copy(update={"rules": spec.rules.repeated(), "answered": unstable})
    interrupted = False
    try:
        with bar(progress, f"measuring {name} again", len(stable), "shape"):
            second_rows = _measure_items(second, progress)
    except MeasuringInterrupted as error:
        second_rows, interrupted = error.rows, True
    by_item = {item: row for row in second_rows if (item := item_of(row)) is not None}
    rows = [
        confirmed(row, by_item[item], spec.rules.repeat_tolerance)
        if (item := item_of(row)) in stable and item in by_item
        else _unconfirmed(row)
        for row in rows
    ]
    if interrupted:
        raise MeasuringInterrupted(rows)
    return rows


def item_of(row: Row) -> Item | None:
    """Return the item that a row answers; None for a cold row, which belongs to the row after it."""
    return None if row.phase == "cold" else (row.phase, row.batch, row.seq)


def stable_items(rows: Sequence[Row]) -> tuple[Item, ...]:
    """Return the items whose rows are worth measuring again."""
    return tuple(item for row in rows if row.latency_ms.stable and (item := item_of(row)) is not None)


def confirmed(row: Row, second_row: Row, tolerance: float) -> Row:
    """Return the row with the second process's median noted; not stable if the two medians differ.

    Args:
        row: of the first process; its sample is kept.
        second_row: the same item from the second process.
        tolerance: relative difference of the medians that is allowed.
    """
    first, second = row.latency_ms.p50, second_row.latency_ms.p50
    conditions = {**row.conditions, "repeated_p50_ms": second}
    if (seconds := second_row.conditions.get("measuring_s")) is not None:
        conditions["repeated_measuring_s"] = seconds
    if first is not None and second is not None and max(first, second) <= min(first, second) * (1 + tolerance):
        return row.model_copy(update={"conditions": conditions})
    result = f"found {second:.3g} ms" if second is not None else f"found nothing: {second_row.latency_ms.reason}"
    warnings = [f"not confirmed: this process has a median of {first:.3g} ms, a second one {result}"]
    # Work that disturbed the second process does not concern the first one's calls, but may explain the difference.
    warnings += [f"the second process: {text}" for text in second_row.latency_ms.warnings]
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, *warnings)})
    return row.model_copy(update={"latency_ms": latency, "conditions": conditions})


def _unconfirmed(row: Row) -> Row:
    """Return the row of an interrupted measurement, no longer stable if it needed a second process."""
    if item_of(row) is None or not row.latency_ms.stable:
        return row
    warning = "not confirmed: interrupted before a second process measured it"
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, warning)})
    return row.model_copy(update={"latency_ms": latency})


def _measure_items(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Return a row per item of ``spec`` and a cold row: runs workers until every item has a row or a refusal."""
    rows: dict[Item, Row] = {}
    refusals: dict[Item, str] = {}
    cold: tuple[Item | None, Row] | None = None  # the first worker's first call, and the item it was measured with
    current: Item | None = None
    provider = spec.provider or "none"

    def take(message: Start | FinishedRow | Refusal) -> None:
        nonlocal cold, current, provider
        if isinstance(message, Start):
            provider, current = message.provider, message.item
        elif isinstance(message, Refusal):
            refusals[message.item] = message.reason
            progress.advance(1)
        elif (item := item_of(message.row)) is not None:
            rows[item] = message.row
            progress.advance(1, p50_ms=message.row.latency_ms.p50 or 0.0)
        elif cold is None:  # a worker that continues has a first call, too
            cold = current, message.row

    fruitless_workers = 0
    while open_items := [item for item in spec.items if item not in rows and item not in refusals]:
        current = None
        remaining = spec.model_copy(update={"answered": (*spec.answered, *rows, *refusals)})
        try:
            end = run_job(remaining, MESSAGES, spec.rules.longest_s + ALLOWANCE_S, take)
        except KeyboardInterrupt:
            raise MeasuringInterrupted([*([cold[1]] if cold is not None else []), *rows.values()]) from None
        reason = end.reason or "the measuring process did not measure this shape"
        unanswered = [item for item in open_items if item not in rows and item not in refusals]
        fruitless_workers = fruitless_workers + 1 if unanswered == open_items else 0
        if not end.died or fruitless_workers > 1:
            refusals |= dict.fromkeys(unanswered, reason)
        elif unanswered:
            fatal = next((item for item in unanswered if item == current), unanswered[0])
            refusals[fatal] = reason
    ordered: list[Row] = []
    for item in spec.items:
        if cold is not None and cold[0] == item:
            ordered.append(cold[1])
        row = rows.get(item)
        if row is None:
            row = unavailable_row(
                spec.checked.artifact, spec.checked.size_bytes, item, provider, "host", refusals[item]
            ).model_copy(update={"threads": None if on_gpu(provider) else spec.threads})
        ordered.append(row)
    return ordered
