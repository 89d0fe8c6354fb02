"""What the measuring child is told (one JSON document) and what it answers (one JSON document per line).

Rows are sent as they are finished, so that a child that dies later takes only the unfinished ones with it.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.golden import GOLDEN_FILE, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.process import End, Job
from edgeformer.bundle import Bundle
from edgeformer.runtimes import ArtifactFiles
from edgeformer.runtimes.session import Array
from edgeformer.tasks import Task, task_named

Shape = tuple[int, int]
"""(batch, seq)"""

Phase = Literal["steady", "decode"]
"""Whole inputs in one call; or the next token of a text, with what was kept of the tokens before it."""

Item = tuple[Phase, int, int]
"""What gets one answer: (phase, batch, seq)."""

Where = Literal["host", "device"]
"""On this host, or on the device that an artifact is judged for."""


def phases_of(artifact: ArtifactManifest, task: Task) -> tuple[Phase, ...]:
    """What can be measured of an artifact.

    A decode graph writes token by token; the step bundle of a model that writes does that too, and takes whole texts.

    Args:
        artifact: of any role.
        task: what its model is for.
    """
    if artifact.role == "decode":
        return ("decode",)
    return ("steady", "decode") if artifact.role == "step" and task.writes_text else ("steady",)


class CheckedArtifact(Frozen):
    """An artifact whose files the parent has compared with the manifest: all that a child needs to open it."""

    artifact: ArtifactManifest = Field(description="without its scores, which only its task could read")
    golden: Path
    file: Path
    parts: dict[str, Path] = Field({}, description="step artifacts: part → file")
    loops: int | None = Field(None, description="step artifacts: how often the loop graph is called")
    max_positions: int | None = None
    task: str = Field(description="what its model is for: it knows how golden inputs become calls")
    axes: dict[str, tuple[str, ...]] = Field({}, description="input → what sizes each of its axes; empty: text")

    @classmethod
    def of(cls, bundle: Bundle, artifact: ArtifactManifest) -> CheckedArtifact:
        """For a child, whose paths are absolute.

        Args:
            bundle: whose artifact it is.
            artifact: a built one of it.

        Raises:
            ArtifactError: a file is missing, truncated or changed, or the golden inputs are not what they should be.
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
        """Different real inputs of one shape. Raises GoldenError."""
        return task_named(self.task).calls(read_golden(self.golden), self.axes, shape, count)

    @property
    def files(self) -> ArtifactFiles:
        """As a backend takes them."""
        return ArtifactFiles(self.artifact, self.file, self.parts, self.loops, self.max_positions)

    @property
    def size_bytes(self) -> int:
        """With its share of the weights that lie beside the graph."""
        return self.artifact.size_bytes or self.file.stat().st_size


class MeasureSpec(Job):
    """One artifact, the shapes to measure it at, and the rules."""

    name, answers = "measuring", "measurements"
    kind: Literal["measure"] = "measure"
    checked: CheckedArtifact
    provider: str | None = Field(description="None: the backend's choice for this machine")
    phases: tuple[Phase, ...] = Field(("steady",), strict=False)
    shapes: tuple[Shape, ...] = Field(strict=False)
    answered: tuple[Item, ...] = Field((), strict=False, description="by an earlier child, or what killed it")
    rules: MeasureRules

    @property
    def items(self) -> tuple[Item, ...]:
        """Everything that is left to be measured: shape by shape, and at each of them phase by phase."""
        items: list[Item] = [(phase, *shape) for shape, phase in product(self.shapes, self.phases)]
        return tuple(item for item in items if item not in self.answered)


class Start(Frozen):
    """A shape is being opened and measured."""

    kind: Literal["start"] = "start"
    item: Item = Field(strict=False)
    provider: str


class FinishedRow(Frozen):
    """A finished row."""

    kind: Literal["row"] = "row"
    row: Row


class Refusal(Frozen):
    """One item cannot be measured or listed; the others go on."""

    kind: Literal["refusal"] = "refusal"
    item: Item = Field(strict=False)
    reason: str


MESSAGES: TypeAdapter[Start | FinishedRow | Refusal | End] = TypeAdapter(
    Annotated[Start | FinishedRow | Refusal | End, Field(discriminator="kind")]
)


def row_of(artifact: ArtifactManifest, item: Item, provider: str, where: Where, **figures: Any) -> Row:
    """A row of an artifact.

    Args:
        artifact: whose row it is.
        item: phase and shape.
        provider: what computes it.
        where: on this host, or on the device that it is judged for.
        figures: the row's other fields.
    """
    phase, batch, seq = item
    where_and_how: Any = {"provider": provider, "where": where, "phase": phase, "batch": batch, "seq": seq}
    return Row(artifact=artifact.id, precision=artifact.precision, **where_and_how, **figures)


def unavailable_row(
    artifact: ArtifactManifest, size_bytes: int, item: Item, provider: str, where: Where, reason: str
) -> Row:
    """A row that says why nothing was measured; the file's size is known all the same.

    Args:
        artifact: what was not measured.
        size_bytes: with its share of weights that lie beside it.
        item: phase and shape.
        provider: what would have computed it.
        where: on this host, or on the device that it is judged for.
        reason: why not.
    """
    why: Any = {"status": "unavailable", "reason": reason}
    figures = {"latency_ms": Latency(**why), "memory_bytes": Memory(**why), "energy_mj": Energy(**why)}
    return row_of(artifact, item, provider, where, size_bytes=size_bytes, **figures)
