"""What `plan` answers: does training a recipe fit a device, and if not, what would make it fit?"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgeformer.formats.base import Frozen


class MemoryBreakdown(Frozen):
    """Bytes at the moment of the peak, by what holds them; their sum is the peak."""

    weights: int = Field(description="parameters and buffers")
    gradients: int = Field(description="gradients of the parameters")
    optimizer: int = Field(description="state of the optimizer: AdamW's two moments")
    activations: int = Field(description="the batch, and what the forward pass made and still holds")
    temporary: int = Field(description="made in the backward pass (recomputed activations too); half-precision weights")
    reserve: int = Field(description="what no tensor accounts for: the allocator's gaps, workspaces of the libraries")

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporary + self.reserve


class Suggestion(Frozen):
    """A change of a recipe, as ``--set`` takes it, and what it would bring."""

    set: tuple[str, ...] = Field(strict=False, description='"key.path=value", one for each --set')
    peak_bytes: int = Field(description="predicted peak of the recipe with this change")
    fits: bool
    note: str = Field(description="what the change costs, in words")


class Plan(Frozen):
    """Parameters and predicted training memory of a recipe against a device's budget."""

    recipe: str
    device: str
    parameters: int
    precision: str = Field(description="what training would compute in there: fp32, bf16 or fp16")
    status: Literal["pass", "fail"]
    fits: bool
    peak_bytes: int = Field(description="predicted; the sum of the breakdown")
    budget_bytes: int = Field(description="memory that the device leaves to a process")
    budget_source: str = Field(description="where the budget comes from")
    breakdown: MemoryBreakdown
    suggestions: tuple[Suggestion, ...] = Field(
        (), strict=False, description="where it does not fit: first what makes it fit at the least cost, if anything "
        "does, then single changes from the cheapest on"
    )  # fmt: skip
    reason: str
