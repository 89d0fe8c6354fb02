"""The JSON of `plan`: what training a recipe would take of a device, in memory and in time."""

from typing import Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen


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


class PlannedTime(Frozen):
    """How long training would take: a range, never a measurement."""

    status: Literal["estimated", "unavailable"]
    low_s: float | None = Field(None, description="of all epochs with validation; of `rows` rows where `steps` is null")
    high_s: float | None = None
    steps: int | None = Field(None, description="optimizer steps of all epochs; null: the number of rows is not known")
    rows: int = Field(description="training rows that the range is for, over all epochs; 1000 where `steps` is null")
    epochs: int = Field(1, description="that `rows` are of; 1 where `steps` is null")
    rows_from: Literal["data", "recipe", "unknown"] = Field(
        "unknown", description="who counted the rows: the data that was read, the recipe's expected_rows, or unknown"
    )
    basis: str = Field(description="what the range is made of; of `unavailable` why there is none")
    low_reason: str | None = Field(None, description="what the low end assumes of the device")
    high_reason: str | None = Field(None, description="what the high end assumes of the device")
    share_of_peak: tuple[float, float] | None = Field(
        None, strict=False, description="of the stated rate of products that training reaches at the high and low end"
    )


class Plan(Frozen):
    """Parameters, predicted memory and time of training a recipe, against a device's budget of memory."""

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
    larger_batches: tuple[Suggestion, ...] = Field(
        (), strict=False, description="where it fits: more rows at a time that fit too, at the same effective batch"
    )  # fmt: skip
    time: PlannedTime
    reason: str
    notes: tuple[str, ...] = Field((), strict=False, description="what training would say of its own files of data")
