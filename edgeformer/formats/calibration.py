"""Calibration: what the estimator learned on a machine where it could be checked, and how wrong it was there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edgeformer.formats.base import Frozen

OperatorClass = Literal["gemm", "attention", "elementwise", "lookup", "layout"]
"""What limits an operator: matrix products with weights; products between activations, and softmax; arithmetic per
element and norms; reading rows of a table; moving or naming data (transpose, slice, concat, reshape)."""

Positive = Annotated[float, Field(gt=0)]


class Efficiency(Frozen):
    """How much of the device's peak rates one class of operators reaches, and what an operator costs at least.

    Its time is the sum of the overhead and of what each rate takes.
    """

    of_peak: Positive | None = Field(None, description="share of the peak rate; None: not limited by it")
    of_bandwidth: Positive | None = Field(
        None, description="share of the bandwidth for what a cache can hold; above 1 where it serves it faster"
    )
    of_memory: Positive | None = Field(
        None, description="share of the bandwidth for what no cache can hold; None: as `of_bandwidth`"
    )
    overhead_us: Annotated[float, Field(ge=0)] = Field(0.0, description="per operator, doing nothing")


class FittedCase(Frozen):
    """A shape of an artifact that was measured to fit or to validate."""

    run: str
    artifact: str
    precision: str = "fp32"
    batch: int
    seq: int
    measured_ms: float
    estimated_ms: float | None = None


class EstimateError(Frozen):
    """How far estimates were from measurements: |log2(estimated / measured)|, 0.25 is 19 % off, 1 is a factor of 2."""

    kind: Literal["cpu", "cuda"] = Field(description="the kind of device that it was found on")
    device: str = Field(description="the processor or card")
    cases: int
    median_log2: float
    worst_log2: float
    created: str


class Calibration(Frozen):
    """Efficiencies fitted on this host per precision, what they were fitted on, and the error on other cases."""

    created: str
    processor: str
    threads: int
    provider: str
    versions: dict[str, str] = Field({}, description="library → version")
    efficiencies: dict[str, dict[OperatorClass, Efficiency]] = Field(description="precision → class → efficiency")
    operators: dict[str, dict[str, Efficiency]] = Field(
        {}, description="precision → operator → efficiency, where it was seen often enough to differ from its class"
    )
    call_overhead_us: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="precision → microseconds per call, whatever its shape"
    )
    fitted_on: tuple[FittedCase, ...] = Field((), strict=False)
    validated_on: tuple[FittedCase, ...] = Field((), strict=False, description="cases that were not fitted")
    error: EstimateError | None = Field(None, description="on `validated_on`; None: never validated")
