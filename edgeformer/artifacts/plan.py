"""JSON of `plan`: predicted memory and time of training a recipe."""

from typing import Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen


class MemoryBreakdown(Frozen):
    """Peak memory of training in bytes, by use; the sum is the peak."""

    weights: int = Field(description="parameters and buffers")
    gradients: int = Field(description="gradients of the parameters")
    optimizer: int = Field(description="state of the optimizer: AdamW's two moments")
    activations: int = Field(description="the batch, and results of the forward pass that the backward pass needs")
    temporary: int = Field(description="backward pass (recomputed activations included), half-precision weights")
    reserve: int = Field(description="memory outside of tensors: allocator fragmentation, library workspaces")

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts in bytes."""
        return sum(self.model_dump().values())


class Suggestion(Frozen):
    """Change of a recipe, as ``--set`` takes it, and its predicted effect."""

    set: tuple[str, ...] = Field(description='"key.path=value", one for each --set')
    peak_bytes: int = Field(description="predicted peak of the recipe with this change")
    fits: bool
    note: str = Field(description="cost of the change, in words")


class PlannedTime(Frozen):
    """Predicted duration of training: a range, never a measurement."""

    status: Literal["estimated", "unavailable"]
    low_s: float | None = Field(
        None, description="lower end of the time of all epochs with validation; of `rows` if `steps` is null"
    )
    high_s: float | None = None
    steps: int | None = Field(None, description="optimizer steps of all epochs; null: the number of rows is unknown")
    rows: int = Field(description="training rows that the range covers, over all epochs; 1000 if `steps` is null")
    epochs: int = Field(1, description="epochs that `rows` covers; 1 if `steps` is null")
    rows_from: Literal["data", "recipe", "unknown"] = Field(
        "unknown", description="source of the row count: the data, the recipe's expected_rows, or unknown"
    )
    basis: str = Field(description="how the range was computed; for `unavailable`, the reason")


class Plan(Frozen):
    """JSON of `plan`: parameters, memory and time of training a recipe, compared with a device's memory budget."""

    recipe: str
    device: str
    parameters: int
    precision: str = Field(description="training precision on the device: fp32, bf16 or fp16")
    status: Literal["pass", "fail"]
    fits: bool
    peak_bytes: int = Field(description="predicted peak; the sum of `breakdown`")
    budget_bytes: int = Field(description="memory that a process can use on the device")
    budget_source: str = Field(description="source of the budget")
    breakdown: MemoryBreakdown
    suggestions: tuple[Suggestion, ...] = Field(
        (), description="if it does not fit: first the cheapest change that fits, then single changes"
    )
    larger_batches: tuple[Suggestion, ...] = Field((), description="if it fits: larger batch sizes that fit too")
    time: PlannedTime
    reason: str
    notes: tuple[str, ...] = Field((), description="warnings of training about local data files")
