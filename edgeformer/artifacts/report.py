"""JSON of `profile`, for scripts: measurements, estimates and verdicts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)
from typing_extensions import Self

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import DeviceProfile, EstimateError, EstimateRecord, Phase
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, ImportProof, Role
from edgeformer.artifacts.workspace import parse_manifest, read_json_bytes

MeasurementStatus = Literal["measured", "estimated", "unavailable"]
CheckStatus = Literal["pass", "fail", "unknown"]


@dataclass(frozen=True)
class Figure:
    """A value with its basis; an estimate, or a time that varies, also has the ends of its range."""

    value: float | None
    basis: MeasurementStatus = "measured"
    low: float | None = None
    high: float | None = None
    reason: str | None = None


class PublishedTime(Frozen):
    """A time that others measured and published."""

    model: str
    runtime: str
    precision: str
    phase: Literal["call", "convolutions", "prefill", "decode"]
    batch: int
    size: int = Field(description="tokens of a text, or pixels of an image's side")
    ms: float
    source: str = Field(description="repository and file, or page")


class PublishedCheck(Frozen):
    """How far estimates of the same kind are from published times, each estimated without its source or device."""

    subject: str = Field(description="what was measured: runtime, precision, and this or other devices")
    rows: int
    sources: int
    median_error: float = Field(description="a fraction: 0.14 is 14%")
    worst_error: float
    within: float = Field(description="share of the times inside their ranges")
    nearest: tuple[PublishedTime, ...] = Field((), description="the device's most similar published times")


class Latency(Frozen):
    """Milliseconds per call. A percentile for which the sample is too small is null, with the reason."""

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
    check: PublishedCheck | None = Field(None, description="estimates without a calibration")
    reason: str | None = None
    warnings: tuple[str, ...] = ()
    quantiles_ms: tuple[float, ...] = Field((), description="quantiles of the sample at even steps, 0 to 100%")

    @property
    def figure(self) -> Figure:
        """The median, with the range of an estimate."""
        return Figure(self.p50, self.status, self.low, self.high)


class Work(Frozen):
    """Operations and memory traffic of one call at a row's shape, counted node by node."""

    operations: float = Field(description="a multiply-add counts as two")
    bytes_moved: float = Field(description="weights, inputs and outputs of every operator, at the artifact's precision")
    weight_bytes: float = Field(description="weight part of bytes_moved: a shared weight counts once per loop")
    operators: int
    kernels: int = Field(description="kernel launches after fusion")


class Memory(Frozen):
    """Memory in bytes that the artifact adds to a process that has loaded only the runtime."""

    status: MeasurementStatus
    peak: int | None = None
    baseline: int | None = None
    method: str | None = None
    low: int | None = None
    high: int | None = None
    reason: str | None = None


class Energy(Frozen):
    """Energy in millijoules per call above idle."""

    status: MeasurementStatus
    value: float | None = None
    reason: str | None = None


class Conditions(Frozen):
    """Conditions of a row's measurement: what others read of them. Further facts of runtime and system are beside them.

    Absent facts are left out of the JSON.
    """

    model_config = ConfigDict(extra="allow")

    threads: int | None = None
    loops: int | None = None
    context_tokens: int | None = Field(None, description="decode rows: tokens before the timed one")
    read_context_ms: float | None = None
    repeated_p50_ms: float | None = Field(None, description="median of a second process")
    measuring_s: float | None = Field(None, description="first call, warm-up and timed calls")
    repeated_measuring_s: float | None = None
    resident_bytes: int | None = Field(None, description="cold rows: memory of the opened artifact")
    power: str | None = None
    slowed_by: tuple[str, ...] | None = Field(None, description="why the system slows the processor")
    governor: str | None = None
    governor_scales: bool | None = Field(None, description="this governor still reaches the highest clock")
    gpu_slowed_by: tuple[str, ...] | None = None
    gpu_foreign_processes: tuple[str, ...] | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in write(self).items() if value is not None or name not in fields}


class Row(Frozen):
    """One artifact at one shape in one phase, on this host or on the device."""

    artifact: str
    precision: str
    provider: str
    where: Literal["host", "device"]
    phase: Literal["cold", "steady", "prefill", "decode"]
    batch: int
    seq: int = Field(description="tokens per row; 1 if the graph has no such axis, see `inputs`")
    inputs: dict[str, tuple[int, ...]] = Field({}, description="wrapped graphs: input → sizes in this call")
    latency_ms: Latency
    memory_bytes: Memory
    size_bytes: int
    throughput_per_s: float | None = Field(None, description="inputs; of prefill and decode rows: tokens")
    energy_mj: Energy
    load_ms: float | None = Field(None, description="cold rows: time to load the artifact, before the first call")
    threads: int | None = Field(None, description="CPU rows: threads of one operator")
    device_ms: float | None = Field(None, description="GPU rows: p50 on the card, without copies and waiting")
    work: Work | None = Field(None, description="None: the graph was not analysed for this row")
    conditions: Conditions = Field(Conditions(), description="threads, clocks, power source of this row")


class Check(Frozen):
    """Comparison of one value with one budget limit."""

    name: str
    artifact: str
    limit: float
    value: float | None
    unit: str
    status: CheckStatus
    basis: MeasurementStatus | None = Field(None, description="status of `value`; an estimate also has low and high")
    low: float | None = Field(None, description="lower end of an estimate, or of a repeated or unstable time")
    high: float | None = Field(None, description="upper end; a limit between the two is undecided")
    reason: str | None = None
    batch: int | None = Field(None, description="batch size of the call; None: no call, a file's size")
    seq: int | None = Field(None, description="tokens per row of that call")


class NotJudged(Frozen):
    """A kind of check that was applied to no artifact, or whose values are all unknown."""

    name: str = Field(description="latency, memory, size or energy")
    reason: str


class Verdict(Frozen):
    """`fail` if any check fails, else `unknown` if any is unknown, else `pass`; covers only the checks in `judged`."""

    status: CheckStatus
    checks: tuple[Check, ...] = ()
    judged: tuple[str, ...] = Field((), description="kinds of check that passed or failed for at least one artifact")
    not_judged: tuple[NotJudged, ...] = Field((), description="the other kinds; energy only if it has a limit")

    @property
    def is_partial(self) -> bool:
        """Whether the verdict is a pass that does not cover latency, memory or size."""
        return self.status == "pass" and bool(self.not_judged)


class SizeParts(Frozen):
    """Bytes of an artifact's weights by part; `other` is the graph itself, code and the rest."""

    artifact: str
    embeddings: int
    block: int = Field(description="the layers or the looped block, each shared weight once")
    heads: int
    other: int

    @classmethod
    def of(cls, artifact: ArtifactManifest) -> Self:
        """Return the parts of an artifact; all are ``other`` if export did not count them (engines)."""
        counted = {name: artifact.parts_bytes.get(name, 0) for name in ("embeddings", "block", "heads")}
        other = max(0, (artifact.size_bytes or 0) - sum(counted.values()))
        return cls(artifact=artifact.id, **counted, other=other)


class Candidate(Frozen):
    """One candidate of a choice: an artifact with a runtime and a thread count."""

    artifact: str
    precision: str
    exit: int | None
    trimmed: bool
    provider: str
    threads: int | None
    score: float | None = Field(description="accuracy or perplexity on the validation split")
    score_rows: int | None = Field(None, description="rows of that split; None: this metric has no interval")
    score_low: float | None = Field(None, description="lower end of the score's 95% interval (Clopper and Pearson)")
    score_high: float | None = Field(None, description="upper end")
    bound_inside: bool | None = Field(None, description="the bound is inside that interval: undecided")
    latency_ms: float | None
    latency_status: MeasurementStatus
    size_bytes: int
    memory_bytes: int | None
    energy_mj: float | None = None
    feasible: bool
    on_front: bool = Field(description="Pareto-optimal in score, latency and size")
    reason: str | None = Field(None, description="reason for being infeasible")
    low_ms: float | None = Field(None, description="lower end of latency_ms: estimates, or two processes")
    high_ms: float | None = Field(None, description="upper end of latency_ms")
    unknown: tuple[str, ...] = Field((), description="undecided limits")
    scored_as: str | None = Field(None, description="equivalent artifact whose score is used")
    scored_on: str | None = Field(None, description="target that scored it (`verify --write`); None: export")
    stable: bool | None = Field(None, description="whether its measurement is stable; None: not measured")
    row: Row | None = Field(None, exclude=True, description="row with its costs; None: read from a file")
    checks: tuple[Check, ...] = Field((), exclude=True, description="its figures against the limits")

    @property
    def latency(self) -> Figure:
        """The median latency, with its range."""
        return Figure(self.latency_ms, self.latency_status, self.low_ms, self.high_ms)


class Choice(Frozen):
    """Candidates of `--choose`, and its pick."""

    metric: str = Field(description="metric of the task: accuracy, perplexity")
    bound: float | None = Field(description="requested minimum accuracy or maximum perplexity")
    minimize: Literal["latency", "size", "memory", "energy"]
    candidates: tuple[Candidate, ...]
    pick: int | None = Field(description="position in `candidates`; None: nothing is feasible")
    closest: int | None = Field(None, description="models: without a pick, the usable candidate with the best score")
    reason: str
    basis: Literal["measured", "estimated", "host"] = Field(
        "measured", description="basis of the times; host: measured on this host, not compared with the device's limits"
    )
    not_in_bundle: tuple[str, ...] = Field((), description="further artifacts that export could add, and how")
    batch: int | None = Field(None, description="batch size of the candidates' time and memory")
    seq: int | None = Field(None, description="tokens per row of that call")

    @model_validator(mode="before")
    @classmethod
    def _without_former_comparison(cls, value: Any) -> Any:
        return {key: value[key] for key in value if key != "compared"} if isinstance(value, dict) else value


class SubjectArtifact(Frozen):
    """A measured artifact."""

    role: Role
    sha256: str | None


class Subject(Frozen):
    """Description of the measured model, for judging a report without the bundle."""

    task: str
    max_positions: int | None = Field(None, description="longest input in tokens; None: any length")
    max_length: int | None = Field(None, description="truncation length of its texts; None: earlier versions")
    artifacts: dict[str, SubjectArtifact] = Field(description="artifact id → role and checksum")
    manifest_sha256: str | None = Field(None, description="bundle.json's checksum of itself; None: earlier versions")

    @classmethod
    def of(cls, manifest: BundleManifest, artifacts: Iterable[ArtifactManifest]) -> Self:
        """Return the description of these artifacts of a bundle."""
        return cls(
            task=manifest.task, max_positions=manifest.max_positions, max_length=manifest.max_length,
            artifacts={entry.id: SubjectArtifact(role=entry.role, sha256=entry.sha256) for entry in artifacts},
            manifest_sha256=manifest.manifest_sha256,
        )  # fmt: skip


class EstimateEvidence(EstimateRecord):
    """A record of the estimator's error, and whether it applies to the estimates of this report."""

    applies: bool
    why_not: str | None = None


class EstimateCheck(Frozen):
    """Estimate of a row beside its measurement on the device."""

    artifact: str
    precision: str
    phase: Phase
    batch: int
    seq: int
    measured_ms: float
    estimated_ms: float
    low_ms: float | None = Field(None, description="lower end of the estimate")
    high_ms: float | None = Field(None, description="upper end of the estimate")
    stable: bool = Field(True, description="false: the measurement does not repeat")

    @property
    def error(self) -> float:
        """Error of the estimate as a share of the measurement."""
        return self.estimated_ms / self.measured_ms - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement is inside the estimate's range."""
        return (self.low_ms or self.estimated_ms) <= self.measured_ms <= (self.high_ms or self.estimated_ms)


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
    leaks: bool = Field(False, description="the model sees the tokens that it predicts; scores are void")
    proof: ImportProof | None = Field(None, description="imported models; None: trained here, or older versions")
    parameters: int
    rows: tuple[Row, ...]
    verdict: Verdict = Field(
        description="verdict on all artifacts that can run on the device; with --choose: on its pick"
    )
    left_out: dict[str, str] = Field({}, description="artifact → why it cannot run on the device; not judged")
    question: str = Field("", description="requirements beyond the device's budget; suffix of the file names")
    estimate_error: EstimateError | None = Field(
        None, description="error of estimated rows, from this device's or this host's calibration; None: not validated"
    )
    estimate_evidence: tuple[EstimateEvidence, ...] = Field((), description="records of the estimator's error")
    estimate_checks: tuple[EstimateCheck, ...] = Field((), description="--on: estimates beside measured rows")
    estimated_for: Literal["cpu", "cuda"] | None = Field(None, description="kind of device of the estimated rows")
    sizes: tuple[SizeParts, ...] = ()
    search: Choice | None = Field(None, description="--choose: candidates and pick")
    profile: DeviceProfile | None = Field(None, description="the device profile, without its calibration")
    notes: tuple[str, ...] = ()
    subject: Subject | None = Field(None, description="the measured model; None: earlier versions")
    measured_in: str | None = Field(None, description="`browser`: a page of `edgeformer page`; None: `profile`")
    judged_from: str | None = Field(None, description="report of another machine whose rows were judged")
    report_sha256: str | None = Field(
        None, description="sha256 of the JSON without this key, keys sorted, no spaces; None: earlier version or page"
    )

    @field_validator("profile", mode="before")
    @classmethod
    def _absent_profile(cls, value: Any) -> Any:
        return value or None  # {} of pages and earlier versions

    @field_serializer("profile")
    def _by_alias(self, profile: DeviceProfile | None) -> dict[str, Any]:
        """Write the keys of a profile's file, however the report is written: its checksum depends on them."""
        return {} if profile is None else profile.model_dump(mode="json", by_alias=True, exclude={"calibration"})

    @property
    def stem(self) -> str:
        """Stem of the file names: the device, and ``question`` if there is one."""
        return f"{self.device}-{self.question}" if self.question else self.device

    @property
    def split_sizes(self) -> dict[str, SizeParts]:
        """Artifact → its sizes, if the bundle says what its bytes are for."""
        return {parts.artifact: parts for parts in self.sizes if parts.embeddings or parts.block or parts.heads}


_LARGEST = 2**63 - 1  # maximum absolute value of a number in a report


def read_report(path: Path) -> Report:
    """Read a report. Raises ArtifactError: no report, NaN, infinite or huge numbers, or edited since it was written."""
    return parse_report(path, read_json_bytes(path))


def parse_report(path: Path, content: bytes) -> Report:
    """Return the report that was read from ``path``, which is for messages. Raises as :func:`read_report` does."""
    current = content
    if b'"speculate"' in content:  # rows of speculative decoding, which version 0.1 measured
        with suppress(ValueError, KeyError, TypeError):  # validation says what is wrong
            document = json.loads(content)
            document["rows"] = [row for row in document["rows"] if row["phase"] != "speculate"]
            current = json.dumps(document).encode()
    report = parse_manifest(Report, path, current)

    def check_number(text: str) -> float:
        number = float(text)
        if not abs(number) <= _LARGEST:
            raise ArtifactError(f"{path}: damaged: {text[:40]} cannot be a measured number; make the report again")
        return int(text) if text.lstrip("-").isdecimal() else number

    document = json.loads(content, parse_constant=check_number, parse_float=check_number, parse_int=check_number)
    if report.report_sha256 not in (None, _checksum(document)):
        raise ArtifactError(
            f"{path}: edited since it was written: its content differs from its checksum report_sha256; measure again "
            "with edgeformer profile"
        )
    return report


def seal_report(report: Report) -> Report:
    """Return the report with its checksum."""
    return report.model_copy(update={"report_sha256": _checksum(report.model_dump(mode="json", by_alias=True))})


def _checksum(document: dict[str, Any]) -> str:
    """Return the sha256 of a report's JSON, independent of spaces and key order."""
    content = {key: value for key, value in document.items() if key != "report_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_notes(path: Path, report: Report, manifest: BundleManifest | None) -> list[str]:
    """Return notes on what the checksums cannot confirm, also against the ``manifest`` of the measured bundle."""
    notes = []
    if report.report_sha256 is None:
        notes.append(f"{path.name} has no checksum (written by a page or an earlier version): edits cannot be detected")
    measured = report.subject.manifest_sha256 if report.subject is not None else None
    if manifest is not None and measured not in (None, manifest.manifest_sha256):
        notes.append(f"bundle.json has changed since {path.name} was measured; its artifacts have the same checksums")
    return notes


PERCENTILE_NEEDS = {90: 64, 95: 130, 99: 662}
"""Percentile → samples for 99% confidence (early-stopping estimate of MLPerf LoadGen)."""
NOISY_CV = 0.025  # coefficient of variation above which a sample counts as noisy
QUANTILES = 41  # number of quantiles of a sample in a report: every 2.5%
DRIFT_PARTS, DRIFT_PART_CALLS, DRIFT_FEWEST_CALLS = 10, 25, 20
"""Drift test of a sample: maximum number of parts, minimum calls per part, minimum calls for a test."""


@dataclass(frozen=True)
class MeasureRules:
    """Stopping rules of a measurement. Reports use the defaults, tests shorter ones; a report records its rules.

    Warm-up ends when ``warmup_min_s`` and ``warmup_min_calls`` have passed and the medians of the last
    ``windows`` windows of ``window_calls`` calls lie within ``window_tolerance`` of each other; at
    ``warmup_max_s`` it ends unsettled. Measuring ends when ``min_s`` and ``min_calls`` are both reached, or
    at ``max_s``. Energy is read over ``energy_s`` (0: not at all) once the idle power has settled: the means of the
    last ``windows`` windows of ``idle_s`` lie within ``window_tolerance`` of each other. After ``idle_windows``
    windows without that, energy is unavailable.
    """

    warmup_min_s: float = 0.2
    warmup_min_calls: int = 10
    warmup_max_s: float = 30.0
    window_calls: int = 25
    windows: int = 3
    window_tolerance: float = 0.10
    min_s: float = 3.0
    min_calls: int = 100
    max_s: float = 60.0
    idle_s: float = 1.0
    idle_windows: int = 30
    energy_s: float = 5.0
    repeat_tolerance: float = 0.05

    def repeated(self) -> MeasureRules:
        """Return the rules of the second process: a third of the time and of the calls, and no energy."""
        return replace(
            self, warmup_max_s=self.warmup_max_s / 3, min_s=self.min_s / 3, min_calls=math.ceil(self.min_calls / 3),
            max_s=self.max_s / 3, idle_s=0.0, energy_s=0.0,
        )  # fmt: skip

    @classmethod
    def strict(cls) -> MeasureRules:
        """Return rules for published figures: enough calls for a p99, long enough for a laptop to heat up."""
        return cls(warmup_max_s=60.0, min_s=60.0, min_calls=662, max_s=900.0, idle_s=3.0, energy_s=10.0)

    @property
    def longest_s(self) -> float:
        """Upper bound in seconds of one shape's loops, without the overrun of a last slow call."""
        return self.warmup_max_s + self.max_s + self.idle_s * self.idle_windows + self.energy_s
