"""The JSON of `profile` that scripts rely on: measurements, verdicts."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import EstimateError, EstimateRecord
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.artifacts.workspace import parse_manifest, read_json_bytes

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
    warnings: tuple[str, ...] = ()
    quantiles_ms: tuple[float, ...] = Field((), description="of the sample, evenly spaced from 0 to 100 %; for drawing")


class Work(Frozen):
    """What one call of an artifact computes and moves at a row's shape, counted node by node."""

    operations: float = Field(description="a multiplication and an addition are two")
    bytes_moved: float = Field(description="weights, inputs and outputs of every operator, at the artifact's precision")
    weight_bytes: float = Field(description="of bytes_moved, the weights: a shared one counts once per loop")
    operators: int
    kernels: int = Field(description="launches that remain after fusion")


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
    seq: int = Field(description="tokens of a row; of a graph without such an axis 1, see `inputs`")
    inputs: dict[str, tuple[int, ...]] = Field({}, description="wrapped graphs: input → sizes in this call")
    latency_ms: Latency
    memory_bytes: Memory
    size_bytes: int
    throughput_per_s: float | None = None
    energy_mj: Energy
    load_ms: float | None = Field(None, description="cold rows: opening the artifact, before the first call")
    threads: int | None = Field(None, description="CPU rows: threads of one operator")
    device_ms: float | None = Field(None, description="GPU rows: p50 on the card alone, without copies and waiting")
    work: Work | None = Field(None, description="counted on rows at which the graph was listed")
    conditions: dict[str, Any] = Field({}, description="threads, clocks, power source of this row")


class Check(Frozen):
    """One budget limit against one value."""

    name: str
    artifact: str
    limit: float
    value: float | None
    unit: str
    status: CheckStatus
    basis: MeasurementStatus | None = Field(None, description="what `value` is; an estimate also has low and high")
    low: float | None = Field(None, description="of an estimate; or of a time that was measured twice or not stably")
    high: float | None = Field(None, description="the same; a limit between the two is neither kept nor broken")
    reason: str | None = None
    batch: int | None = Field(None, description="of the call that `value` is of; None: of no call, a file's size")
    seq: int | None = Field(None, description="tokens of a row of that call")


class NotJudged(Frozen):
    """A kind of check that no artifact was held against, or whose values are all unknown."""

    name: str = Field(description="latency, memory, size or energy")
    reason: str


class Verdict(Frozen):
    """`fail` if any check fails, else `unknown` if any is unknown, else `pass`: of what `judged` lists, and no more."""

    status: CheckStatus
    checks: tuple[Check, ...] = ()
    judged: tuple[str, ...] = Field((), description="kinds of check that passed or failed for at least one artifact")
    not_judged: tuple[NotJudged, ...] = Field((), description="the other kinds; energy only where it has a limit")

    @property
    def is_partial(self) -> bool:
        """Whether a pass leaves latency, memory or size unjudged."""
        return self.status == "pass" and bool(self.not_judged)


class SizeParts(Frozen):
    """Bytes of an artifact's weights by what they are for; `other` is the graph itself, code and the rest."""

    artifact: str
    embeddings: int
    block: int = Field(description="the layers or the looped block, each shared weight once")
    heads: int
    other: int


class Candidate(Frozen):
    """One way to deploy: an artifact with a runtime and a number of threads."""

    artifact: str
    precision: str
    exit: int | None
    trimmed: bool
    provider: str
    threads: int | None
    score: float | None = Field(description="accuracy, or perplexity of a language model, on the validation split")
    score_rows: int | None = Field(None, description="rows of that split; None: no interval is known of this metric")
    score_low: float | None = Field(None, description="lower end of the score's 95 % interval (Clopper and Pearson)")
    score_high: float | None = Field(None, description="upper end")
    bound_inside: bool | None = Field(None, description="whether the bound is inside that interval, so it is undecided")
    latency_ms: float | None
    latency_status: MeasurementStatus
    size_bytes: int
    memory_bytes: int | None
    energy_mj: float | None = None
    feasible: bool
    on_front: bool = Field(description="nothing else is at least as good in score, latency and size and better in one")
    reason: str | None = Field(None, description="why it is not feasible")
    low_ms: float | None = Field(None, description="lower end of latency_ms: of an estimate, or of two processes")
    high_ms: float | None = Field(None, description="upper end of latency_ms")
    unknown: tuple[str, ...] = Field((), description="undecided limits")
    scored_as: str | None = Field(None, description="the artifact that computes the same and was scored in its place")
    scored_on: str | None = Field(None, description="the target that scored it (`verify --write`); None: export did")
    stable: bool | None = Field(None, description="whether its time was measured stably; None: not measured")


class Comparison(Frozen):
    """Two candidates, measured in turns as `gate` does: their own times were taken minutes apart."""

    first: int = Field(description="position in `candidates`, of the smaller median")
    second: int = Field(description="of the other one")
    found: Literal["slower", "faster", "no different", "not known"] = Field(description="of the second")
    change: float = Field(description="(second - first) / first, of their times")
    low: float | None = Field(None, description="the change is at least this; holds together with all other looks")
    high: float | None = Field(None, description="the change is at most this")
    rounds: int = Field(description="pairs of fresh processes that were measured")


class Search(Frozen):
    """What `--search` looked at, and its pick."""

    metric: str = Field(description="of the task: accuracy, perplexity")
    bound: float | None = Field(description="lowest accuracy, or highest perplexity, that was asked for")
    minimize: Literal["latency", "size", "memory", "energy"]
    candidates: tuple[Candidate, ...]
    pick: int | None = Field(description="position in `candidates`; None: nothing is feasible")
    reason: str
    basis: Literal["measured", "estimated", "host"] = Field(
        "measured", description="of the times; host: this host's own, which do not count against the device's limits"
    )
    not_in_bundle: tuple[str, ...] = Field((), description="what export could add, and how")
    batch: int | None = Field(None, description="of the call whose time and memory the candidates have")
    seq: int | None = Field(None, description="tokens of a row of that call")
    compared: Comparison | None = Field(None, description="the two fastest, where their medians are close; None: not")


class SubjectArtifact(Frozen):
    """An artifact that was measured."""

    role: Literal["full", "exit", "step", "decode"]
    sha256: str | None


class Subject(Frozen):
    """What was measured, for whoever judges a report without the bundle."""

    task: str
    max_positions: int | None = Field(None, description="tokens that the model takes; None: any number")
    max_length: int | None = Field(None, description="tokens that its texts are cut to; None: earlier versions")
    artifacts: dict[str, SubjectArtifact] = Field(description="id → what it is")
    manifest_sha256: str | None = Field(None, description="bundle.json's checksum of itself; None: earlier versions")


class EstimateEvidence(EstimateRecord):
    """A record of the estimator's error, and whether it covers the estimates of this report."""

    applies: bool
    why_not: str | None = None


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
    leaks: bool = Field(False, description="the model sees the tokens that it predicts; its scores are void")
    parameters: int
    rows: tuple[Row, ...]
    verdict: Verdict = Field(description="of every artifact that could run on the device; of a search: of its pick")
    left_out: dict[str, str] = Field({}, description="artifact → why it can never run on the device; not judged")
    question: str = Field("", description="what else was asked than the device's budget; ends the files' names")
    estimate_error: EstimateError | None = Field(
        None, description="of estimated rows, by this device's or this host's calibration; None: neither was checked"
    )
    estimate_evidence: tuple[EstimateEvidence, ...] = Field((), description="records of the estimator's error")
    estimated_for: Literal["cpu", "cuda"] | None = Field(None, description="kind of device of the estimated rows")
    sizes: tuple[SizeParts, ...] = ()
    search: Search | None = None
    profile: dict[str, Any] = Field({}, description="the device profile's facts that were used")
    notes: tuple[str, ...] = ()
    subject: Subject | None = Field(None, description="what was measured; None: reports of earlier versions")
    measured_in: str | None = Field(None, description="`browser`: by a page of `edgeformer page`; None: by `profile`")
    judged_from: str | None = Field(None, description="the report, measured elsewhere, whose rows were judged")
    report_sha256: str | None = Field(
        None, description="of the JSON without this key, keys sorted, no spaces; None: earlier versions and pages"
    )

    @property
    def stem(self) -> str:
        """Of its files: the device, and the question where it is another than the device's own budget."""
        return f"{self.device}-{self.question}" if self.question else self.device


_LARGEST = 2**63 - 1
"""No quantity in a report is larger."""


def read_report(path: Path) -> Report:
    """Read a report. Raises ArtifactError: no report, with NaN, infinite or huge numbers, or edited since written."""
    content = read_json_bytes(path)
    report = parse_manifest(Report, path, content)

    def check_number(text: str) -> float:
        number = float(text)
        if not abs(number) <= _LARGEST:
            raise ArtifactError(f"{path}: damaged: {text[:40]} is no finite number that was measured; make it again")
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
    """Return the sha256 of a report's JSON; spaces and the order of keys do not count."""
    content = {key: value for key, value in document.items() if key != "report_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def checksum_notes(path: Path, report: Report, manifest: BundleManifest | None) -> list[str]:
    """Return what the checksums leave open, also against the ``manifest`` of a bundle with the measured artifacts."""
    notes = []
    if report.report_sha256 is None:
        notes.append(f"{path.name} has no checksum (written by a page or an earlier version): edits cannot be detected")
    measured = report.subject.manifest_sha256 if report.subject is not None else None
    if manifest is not None and measured not in (None, manifest.manifest_sha256):
        notes.append(f"bundle.json has changed since {path.name} was measured; its artifacts have the same checksums")
    return notes


PERCENTILE_NEEDS = {90: 64, 95: 130, 99: 662}
"""Samples that a percentile needs for 99 % confidence: MLPerf loadgen's early-stopping estimate."""
NOISY_CV = 0.025
"""Coefficient of variation above which calls are called noisy."""
QUANTILES = 41
"""Points of the sample's distribution that a report can draw: every 2.5 %."""
DRIFT_PARTS, DRIFT_PART_CALLS, DRIFT_FEWEST_CALLS = 10, 25, 20
"""A sample is cut into up to so many parts, of at least so many calls, to see whether it drifts; fewer calls cannot."""


@dataclass(frozen=True)
class MeasureRules:
    """When to stop. The defaults are what every report uses; tests use shorter ones, and a report says which were used.

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
        """For the second process: a third of the time and of the calls, and no energy."""
        return replace(
            self,
            warmup_max_s=self.warmup_max_s / 3,
            min_s=self.min_s / 3,
            min_calls=math.ceil(self.min_calls / 3),
            max_s=self.max_s / 3,
            idle_s=0.0,
            energy_s=0.0,
        )

    @classmethod
    def strict(cls) -> MeasureRules:
        """Rules for a figure to publish: enough calls for a p99, long enough for a laptop to heat up."""
        return cls(warmup_max_s=60.0, min_s=60.0, min_calls=662, max_s=900.0, idle_s=3.0, energy_s=10.0)

    @property
    def longest_s(self) -> float:
        """Upper bound of one shape's loops, without the time by which a last slow call overruns."""
        return self.warmup_max_s + self.max_s + self.idle_s * self.idle_windows + self.energy_s
