"""What the measuring child is told (one JSON document) and what it answers (one JSON document per line).

Rows are sent as they are finished, so that a child that dies later takes only the unfinished ones with it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from edgeformer.formats.base import Frozen
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.report import Energy, Latency, Memory, Row

Shape = tuple[int, int]
"""(batch, seq)"""

Phase = Literal["steady", "decode"]
"""Whole inputs in one call; or the next token of a text, with what was kept of the tokens before it."""

Item = tuple[Phase, int, int]
"""What gets one answer: (phase, batch, seq)."""


class ChildSpec(Frozen):
    """One artifact, the shapes to measure it at, and the rules."""

    bundle: str
    file: str = Field(description="absolute path; its bytes were checked by the parent")
    size_bytes: int
    artifact: ArtifactManifest
    max_positions: int
    provider: str | None = Field(description="None: CUDA where it works, else the CPU")
    threads: int
    shapes: tuple[Shape, ...] = Field(strict=False)
    answered: tuple[Item, ...] = Field((), strict=False, description="by an earlier child, or what killed it")
    rules: dict[str, float] = Field(description="fields of MeasureRules")
    gpu_uuid: str | None = None


class Started(Frozen):
    """A shape is being opened and measured."""

    kind: Literal["started"] = "started"
    phase: Phase = "steady"
    batch: int
    seq: int
    provider: str


class Measured(Frozen):
    """A finished row."""

    kind: Literal["measured"] = "measured"
    row: Row


class Refused(Frozen):
    """One shape cannot be measured; the others go on."""

    kind: Literal["refused"] = "refused"
    phase: Phase = "steady"
    batch: int
    seq: int
    reason: str


class Failed(Frozen):
    """The artifact cannot be measured at all."""

    kind: Literal["failed"] = "failed"
    reason: str


class Done(Frozen):
    """Nothing follows."""

    kind: Literal["done"] = "done"


Message = Annotated[Started | Measured | Refused | Failed | Done, Field(discriminator="kind")]
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Message)


def parse_message(line: bytes) -> Message | None:
    """One line of the child's stdout; None when it is not a message."""
    try:
        return _MESSAGE.validate_json(line, strict=False)
    except ValidationError:
        return None


def unavailable_row(
    artifact: ArtifactManifest,
    size_bytes: int,
    shape: Shape,
    provider: str,
    where: Literal["host", "device"],
    reason: str,
) -> Row:
    """A row that says why nothing was measured; the file's size is known all the same."""
    return Row(
        artifact=artifact.id,
        precision=artifact.precision,
        provider=provider,
        where=where,
        phase="steady",
        batch=shape[0],
        seq=shape[1],
        latency_ms=Latency(status="unavailable", reason=reason),
        memory_bytes=Memory(status="unavailable", reason=reason),
        size_bytes=size_bytes,
        energy_mj=Energy(status="unavailable", reason=reason),
    )
