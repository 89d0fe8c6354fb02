"""Measurements, verdicts and the report of `profile`; the JSON that scripts rely on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from edgeformer.schema.base import Frozen

MeasurementStatus = Literal["measured", "estimated", "unavailable"]
CheckStatus = Literal["pass", "fail", "unknown"]


class Latency(Frozen):
    """Milliseconds per call. A percentile that the sample cannot carry is null, with the reason."""

    status: MeasurementStatus
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None
    min: float | None = None
    cv: float | None = Field(None, description="coefficient of variation: standard deviation / mean")
    n: int = 0
    stable: bool | None = None
    low: float | None = Field(None, description="estimates: lower end")
    high: float | None = Field(None, description="estimates: upper end")
    reason: str | None = None
    warnings: tuple[str, ...] = Field((), strict=False)


class Memory(Frozen):
    """Bytes that the artifact adds to a process that has loaded the runtime and nothing else."""

    status: MeasurementStatus
    peak: int | None = None
    baseline: int | None = None
    method: str | None = None
    low: int | None = None
    high: int | None = None
    reason: str | None = None


class Energy(Frozen):
    """Millijoules per call above idle."""

    status: MeasurementStatus
    value: float | None = None
    reason: str | None = None


class Row(Frozen):
    """One artifact at one shape in one phase, on this host or on the device."""

    artifact: str
    precision: str
    provider: str
    where: Literal["host", "device"]
    phase: Literal["cold", "steady", "decode"]
    batch: int
    seq: int
    latency_ms: Latency
    memory_bytes: Memory
    size_bytes: int
    throughput_per_s: float | None = None
    energy_mj: Energy
    load_ms: float | None = Field(None, description="cold rows: opening the artifact, before the first call")
    conditions: dict[str, Any] = Field({}, description="threads, clocks, power source as they were for this row")


class Check(Frozen):
    """One budget limit against one value."""

    name: str
    artifact: str
    limit: float
    value: float | None
    unit: str
    status: CheckStatus
    reason: str | None = None


class Verdict(Frozen):
    """`fail` if any check fails, else `unknown` if any is unknown, else `pass`."""

    status: CheckStatus
    checks: tuple[Check, ...] = Field((), strict=False)


class Report(Frozen):
    """Measurements and verdict per artifact, for one device profile."""

    format_version: Literal[1] = 1
    device: str
    device_title: str
    host: dict[str, Any]
    on_target: bool
    run: str
    bundle: str
    created: str
    synthetic: bool
    leaks: bool = Field(False, description="the model sees what it is asked to predict; its scores are void")
    parameters: int
    rows: tuple[Row, ...] = Field(strict=False)
    verdict: Verdict
    notes: tuple[str, ...] = Field((), strict=False)
