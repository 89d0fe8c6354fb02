"""DeviceProfile: facts and budgets of a target device, each with its source, and the estimator's calibration."""

import re
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.data_config import Name
from edgeformer.artifacts.units import Bytes, Milliseconds

T = TypeVar("T")
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Phase = Literal["steady", "prefill", "decode"]
"""Whole inputs in one call; of a graph that writes: a prompt in one call, or the next token behind cached ones."""


class Fact(Frozen, Generic[T]):
    """A value with its source, and what checks it. ``true`` and ``false`` of earlier versions are read, too."""

    value: T
    source: str
    published: str | None = Field(None, description="what others measured, and their source")
    verified: Literal["no", "data sheet", "published", "measured here"]

    @field_validator("verified", mode="before")
    @classmethod
    def _of_earlier_versions(cls, value: Any) -> Any:
        return {True: "measured here", False: "no"}[value] if isinstance(value, bool) else value

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return a name for schemas that a person can read."""
        return f"Fact[{'bytes' if params[0] is Bytes else params[0].__name__}]"


class Peaks(Frozen):
    """Dense peak rates (no sparsity) in operations per second; a multiply-add counts as two operations.

    GeForce cards halve the rate of FP16 tensor cores that accumulate in FP32, so both are stated.
    """

    fp32: Fact[float] | None = None
    fp16: Fact[float] | None = Field(None, description="tensor cores, accumulating in FP16; CPUs: vector units")
    fp16_fp32_accumulate: Fact[float] | None = Field(None, description="tensor cores, accumulating in FP32")
    int8: Fact[float] | None = None

    def of(self, precision: str) -> tuple[Fact[float], ...]:
        """Return the peak rates for matrix products of a precision, the most certain first; empty: none is known."""
        candidates = {"fp32": (self.fp32,), "fp16": (self.fp16_fp32_accumulate, self.fp16), "int8": (self.int8,)}
        return tuple(fact for fact in candidates.get(precision, ()) if fact is not None)


class Power(Frozen):
    """Power draw of the device in watts: the lowest and highest power limit that it is sold or configured with."""

    low_w: Positive
    high_w: Positive


class Clocks(Frozen):
    """Boost clocks of a GPU that laptop makers build with different power limits."""

    at_peaks: Positive = Field(description="Hz, the clock that `peaks` are stated for")
    at_low_w: Positive = Field(description="Hz, at the lowest power limit")
    at_high_w: Positive = Field(description="Hz, at the highest power limit")


class Budget(Frozen):
    """Limits for a model of one task on this device. An absent limit is not checked."""

    latency_p50_ms: Milliseconds | None = None
    batch: Count = Field(1, description="batch size of the latency limit")
    seq: Count = Field(128, description="sequence length of the latency limit")
    size_bytes: Bytes | None = None
    memory_bytes: Bytes | None = Field(None, description="limit of peak memory; absent: the device's usable memory")
    energy_mj: Positive | None = Field(None, description="millijoules per call above idle")


OperatorClass = Literal["gemm", "attention", "elementwise", "lookup", "layout"]
"""Operator classes by bottleneck: matrix products with weights; products between activations, and softmax; elementwise
arithmetic and norms; table lookups; moving or naming data (transpose, slice, concat, reshape)."""


class Efficiency(Frozen):
    """Share of the device's peak rates that one operator class reaches, and its fixed cost per operator.

    The time of an operator is the overhead plus the time at each of the rates.
    """

    of_peak: Positive | None = Field(None, description="share of the peak rate; None: the peak rate is no limit")
    of_bandwidth: Positive | None = Field(None, description="share of bandwidth, for data in a cache; may exceed 1")
    of_memory: Positive | None = Field(None, description="share of bandwidth, beyond caches; None: as `of_bandwidth`")
    overhead_us: NotNegative = Field(0.0, description="per operator, without work")


class Speed(Frozen):
    """Result of the speed probe: microseconds of a matrix product and of a copy of fixed size."""

    product_us: Positive
    copy_us: Positive


class FittedCase(Frozen):
    """A measured shape of an artifact, used for the fit or for validation."""

    run: str
    artifact: str
    precision: str = "fp32"
    phase: Phase = "steady"
    batch: int
    seq: int
    measured_ms: float
    estimated_ms: float | None = None
    stable: bool = Field(True, description="false: the measurement does not repeat, and errors ignore it")


class EstimateError(Frozen):
    """Errors of estimates as |log2(estimated / measured)|: 0.25 is 19% off, 1 is a factor of 2."""

    kind: Literal["cpu", "cuda"] = Field(description="kind of device that was measured")
    device: str = Field(description="the processor or card")
    cases: int
    median_log2: float
    worst_log2: float
    models: int | None = Field(None, description="models, each estimated by a fit to the others (cross-validation)")
    spread_log2: NotNegative | None = Field(None, description="± range of 95% of the worst model's cases")
    created: str


class EstimateRecord(Frozen):
    """Errors of the estimator on one machine. Errors and shares are fractions: 0.068 is 6.8%."""

    source: str = Field(description="file that lists the cases")
    kind: Literal["cpu", "cuda"]
    processor: str = Field(description="the processor or card that the cases were measured on")
    cores: int | None = None
    measured: str = Field(description="date")
    cases: int
    models: int | None = Field(None, description="models, each estimated by a fit to the others (cross-validation)")
    precisions: tuple[str, ...] = Field((), strict=False)
    median_error: float
    worst_error: float
    within_15_percent: float | None = None
    ranges_held: float | None = Field(None, description="share of the measurements inside the estimate's range")


class Calibration(Frozen):
    """Efficiencies fitted on this host per precision, the cases of the fit, and the error on other cases."""

    created: str
    processor: str
    instructions: tuple[str, ...] | None = Field(None, strict=False, description="CPU flags for kernels; None: unknown")
    stated_cache_bytes: Bytes | None = Field(None, description="last-level cache, as the system reports it")
    threads: int
    disturbed: str | None = Field(None, description="other load on the machine during measurement")
    provider: str
    versions: dict[str, str] = Field({}, description="library → version")
    efficiencies: dict[str, dict[OperatorClass, Efficiency]] = Field(description="precision → class → efficiency")
    operators: dict[str, dict[str, Efficiency]] = Field({}, description="operators that differ from their class")
    call_overhead_us: dict[str, NotNegative] = Field({}, description="precision → microseconds per call")
    fitted_on: tuple[FittedCase, ...] = Field((), strict=False)
    validated_on: tuple[FittedCase, ...] = Field((), strict=False, description="`--validate`: further shapes")
    left_out: tuple[FittedCase, ...] = Field((), strict=False, description="each model, by a fit to the others")
    error: EstimateError | None = Field(None, description="error on `left_out` or `validated_on`; None: no validation")


def names_rtx(name: str) -> bool:
    """Return whether a card's name says RTX: GeForce RTX 4050, RTX4050, RTX-4070, Quadro RTX 4000; not GTX 1650."""
    return re.search(r"\bRTX", name, re.IGNORECASE) is not None


_FORMER_KEYS = {"speed", "response", "other_speed", "cache_ramp", "overlap", "one_thread"}
"""Keys of old calibrations, whose rates have another meaning. Such calibrations are ignored as a whole."""


class DeviceProfile(Frozen):
    """A target device. ``match`` identifies it among the devices of a host.

    An absent fact is unknown. An estimate that needs it is `unavailable` and names the missing fact.
    """

    name: Name
    title: str
    kind: Literal["cuda", "cpu"]
    tensorrt: Literal["rtx", "enterprise", "none"] | None = Field(
        None,
        description="builder of `export --trt`: rtx (TensorRT for RTX), enterprise (TensorRT, built on the device "
        "itself) or none; absent: rtx if a word of the title or of `match` begins with RTX, else enterprise",
    )
    address: str | None = Field(None, description="[USER@]HOST of the machine for ssh; written by `machines add`")
    match: str | None = Field(None, description="part of the card's (cuda) or processor's (cpu) name; absent: any")
    match_not: tuple[str, ...] = Field(
        (), strict=False, description="words in the names of other devices: SUPER, Laptop"
    )
    boards: tuple[str, ...] = Field((), strict=False, description="Jetson: compatible part numbers in the device tree")
    compute_capability: Fact[str] | None = None
    memory_bytes: Fact[Bytes] | None = Field(None, description="memory of the device; absent: this host's")
    memory_shared: bool = Field(False, description="CPU and GPU share one memory (Jetson, Apple)")
    system_bytes: Fact[Bytes] | None = Field(None, description="memory that system, desktop and driver use")
    usable_memory_bytes: Fact[Bytes] | None = Field(None, description="memory that a process can use")
    context_bytes: Fact[Bytes] | None = Field(None, description="memory of a process without a model: CUDA, libraries")
    bandwidth_bytes_per_s: Fact[float] | None = None
    cache_bytes: Fact[Bytes] | None = Field(None, description="last-level cache: L2 of a GPU, L3 (or L2) of a CPU")
    cores: Fact[int] | None = Field(None, description="CPUs: physical cores; GPUs: streaming multiprocessors")
    peaks: Peaks = Peaks()
    launch_overhead_us: Fact[float] | None = Field(None, description="microseconds between two kernels or operators")
    power: Fact[Power] | None = None
    clocks_hz: Fact[Clocks] | None = Field(None, description="absent: the same clock at every power limit")
    budgets: dict[str, Budget] = Field({}, description="task → its budget")
    calibration: Calibration | None = Field(None, description="written by `calibrate`; do not edit")

    @model_validator(mode="before")
    @classmethod
    def _without_former_calibration(cls, value: Any) -> Any:
        calibration = value.get("calibration") if isinstance(value, dict) else None
        if isinstance(calibration, dict) and _FORMER_KEYS & calibration.keys():
            return {key: value[key] for key in value if key != "calibration"}
        return value

    def budget(self, *tasks: str | None) -> Budget:
        """Return the budget of the first of these tasks that has one, else a budget without limits."""
        return next((self.budgets[task] for task in tasks if task in self.budgets), Budget())

    @property
    def tensorrt_edition(self) -> Literal["rtx", "enterprise", "none"]:
        """Value of ``tensorrt``; if absent, inferred from the device's name."""
        if self.tensorrt is not None:
            return self.tensorrt
        if self.kind != "cuda":
            return "none"
        return "rtx" if names_rtx(f"{self.title} {self.match or ''}") else "enterprise"

    @property
    def tensorrt_source(self) -> str:
        """Source of :attr:`tensorrt_edition` for messages: the profile, or a guess from the device's name."""
        if self.tensorrt is not None:
            return f"its profile states tensorrt: {self.tensorrt}"
        name = "has" if self.tensorrt_edition == "rtx" else "does not have"
        return (
            f"its profile has no key tensorrt, and {self.tensorrt_edition} is inferred, because its name {name} RTX "
            "in it (to choose, set tensorrt in the profile)"
        )
