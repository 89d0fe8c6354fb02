"""What the measuring child is told (one JSON document) and what it answers (one JSON document per line).

Rows are sent as they are finished, so that a child that dies later takes only the unfinished ones with it.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter

from edgeformer.backends import ArtifactFiles
from edgeformer.formats.base import Frozen
from edgeformer.formats.golden import GOLDEN_FILE
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.report import Energy, Latency, Memory, Row
from edgeformer.stages.profiling.process import End

if TYPE_CHECKING:
    from edgeformer.tasks import Task

Shape = tuple[int, int]
"""(batch, seq)"""

Phase = Literal["steady", "decode"]
"""Whole inputs in one call; or the next token of a text, with what was kept of the tokens before it."""

Item = tuple[Phase, int, int]
"""What gets one answer: (phase, batch, seq)."""


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
    golden: str = Field(description="absolute path of golden.npz")
    file: str = Field(description="absolute path")
    parts: dict[str, str] = Field({}, description="step artifacts: part → absolute path")
    loops: int | None = Field(None, description="step artifacts: how often the loop graph is called")
    max_positions: int | None = None

    @classmethod
    def of(cls, files: ArtifactFiles, bundle: Path) -> CheckedArtifact:
        """For a child.

        Args:
            files: after they were checked.
            bundle: the bundle's folder.
        """
        artifact = files.artifact.model_copy(update={"score": None, "validation": None})
        return cls(
            artifact=artifact,
            golden=str((bundle / artifact.companions / GOLDEN_FILE).resolve()),
            file=str(files.file.resolve()),
            parts={name: str(path.resolve()) for name, path in files.parts.items()},
            loops=files.loops,
            max_positions=files.max_positions,
        )

    @property
    def files(self) -> ArtifactFiles:
        """As a backend takes them."""
        parts = {name: Path(path) for name, path in self.parts.items()}
        return ArtifactFiles(self.artifact, Path(self.file), parts, self.loops, self.max_positions)

    @property
    def size_bytes(self) -> int:
        """With its share of the weights that lie beside the graph."""
        return self.artifact.size_bytes or Path(self.file).stat().st_size


class MeasureSpec(Frozen):
    """One artifact, the shapes to measure it at, and the rules."""

    kind: Literal["measure"] = "measure"
    checked: CheckedArtifact
    provider: str | None = Field(description="None: the backend's choice for this machine")
    threads: int
    phases: tuple[Phase, ...] = Field(("steady",), strict=False)
    shapes: tuple[Shape, ...] = Field(strict=False)
    answered: tuple[Item, ...] = Field((), strict=False, description="by an earlier child, or what killed it")
    rules: dict[str, float] = Field(description="fields of MeasureRules")
    gpu_uuid: str | None = None

    @property
    def artifact(self) -> ArtifactManifest:
        """What is measured."""
        return self.checked.artifact

    @property
    def size_bytes(self) -> int:
        """Of what is measured."""
        return self.checked.size_bytes

    @property
    def items(self) -> tuple[Item, ...]:
        """Everything that is to be measured, in this order: shape by shape, and at each of them phase by phase."""
        return tuple((phase, *shape) for shape, phase in product(self.shapes, self.phases))


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


Message = Annotated[Start | FinishedRow | Refusal | End, Field(discriminator="kind")]
MESSAGES: TypeAdapter[Start | FinishedRow | Refusal | End] = TypeAdapter(Message)


def unavailable_row(
    artifact: ArtifactManifest,
    size_bytes: int,
    item: Item,
    provider: str,
    where: Literal["host", "device"],
    reason: str,
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
    phase, batch, seq = item
    return Row(
        artifact=artifact.id,
        precision=artifact.precision,
        provider=provider,
        where=where,
        phase=phase,
        batch=batch,
        seq=seq,
        latency_ms=Latency(status="unavailable", reason=reason),
        memory_bytes=Memory(status="unavailable", reason=reason),
        size_bytes=size_bytes,
        energy_mj=Energy(status="unavailable", reason=reason),
    )
