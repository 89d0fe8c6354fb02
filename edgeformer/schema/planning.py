"""What `plan` answers: does training a recipe fit a device?"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgeformer.schema.base import Frozen


class MemoryBreakdown(Frozen):
    """Bytes of each kind; null where it is not counted yet."""

    weights: int
    gradients: int
    optimizer: int
    activations: int | None = None
    temporary: int | None = None
    reserve: int | None = None


class Plan(Frozen):
    """Parameters and training memory of a recipe against a device's budget."""

    recipe: str
    device: str
    parameters: int
    status: Literal["pass", "fail", "unknown"]
    fits: bool | None = Field(description="null: not known, because activations are not counted yet")
    peak_bytes: int | None = Field(description="null until activations are counted")
    at_least_bytes: int = Field(description="weights + gradients + optimizer: a lower bound of the peak")
    budget_bytes: int = Field(description="memory that the device leaves to a process")
    breakdown: MemoryBreakdown
    suggestions: tuple[str, ...] = Field((), strict=False)
    reason: str
