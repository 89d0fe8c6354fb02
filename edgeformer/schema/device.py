"""DeviceProfile: facts and budgets of a target device, each fact with its source."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from edgeformer.schema.base import Frozen
from edgeformer.schema.sources import Name
from edgeformer.schema.units import Bytes, Milliseconds

T = TypeVar("T")


class Fact(Frozen, Generic[T]):
    """A value, where it comes from, and whether somebody checked it on the device itself."""

    value: T
    source: str
    verified: bool


class Budget(Frozen):
    """What a model of one task may cost on this device. An absent limit is not checked."""

    latency_p50_ms: Milliseconds | None = None
    batch: Annotated[int, Field(ge=1)] = Field(1, description="batch size at which latency is judged")
    seq: Annotated[int, Field(ge=1)] = Field(128, description="sequence length at which latency is judged")
    size_bytes: Bytes | None = None


class Budgets(Frozen):
    """One budget per task."""

    classification: Budget = Budget()
    language_modeling: Budget = Field(Budget(), alias="language-modeling")

    def for_task(self, task: str) -> Budget:
        """The budget of ``task`` (a recipe's ``task``)."""
        return self.language_modeling if task == "language-modeling" else self.classification


class DeviceProfile(Frozen):
    """A target device. ``match`` is how the device is recognised when it is present."""

    name: Name
    title: str
    kind: Literal["cuda", "cpu"]
    match: str | None = Field(None, description="part of the GPU's name as the driver reports it; cpu: absent")
    compute_capability: Fact[str] | None = None
    memory_bytes: Fact[Bytes] | None = Field(None, description="absent: this host's memory")
    usable_memory_bytes: Fact[Bytes] | None = Field(None, description="what the system leaves to a process")
    bandwidth_bytes_per_s: Fact[float] | None = None
    budgets: Budgets = Budgets()
