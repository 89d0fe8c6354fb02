"""Rows for a device that is not here, as ranges, and the records of how far such estimates were from measurements."""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, EstimateRecord, Phase
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ONNX, ArtifactManifest, BundleManifest
from edgeformer.artifacts.report import Energy, EstimateEvidence, Latency, Row
from edgeformer.bundle import Bundle
from edgeformer.estimate.listing import ItemNodes, ListJob, run_listing
from edgeformer.estimate.operators import (
    CONTROL,
    MOST_UNKNOWN,
    NodeWork,
    count_nodes,
    describe_operators,
    stored_weight_bytes,
    total,
    trust_of,
)
from edgeformer.estimate.published import KINDS, Estimated, Setting, phase_of, product_type, published_record
from edgeformer.estimate.roofline import calibrated_nodes_us, estimate_memory, rates_of, refused_calibration, work_ms
from edgeformer.measurement.artifact import Item, check_artifact, row_of
from edgeformer.report.sentences import published_sentence
from edgeformer.runtimes import ALL_RUNTIMES, all_runtimes, opener_of, provider_of, requested_providers, runtime_of
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode
from edgeformer.runtimes.session import Kind

RECORD_FILE = "record.json"
"""In this package; `python -m benchmarks.estimates` writes it with docs/results/estimates.md."""
WEIGHT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.55}
"""Bytes of a stored weight; those of four bits have scales."""
_UNVALIDATED_LOG2 = 0.6  # for a model whose estimation error is unknown: a factor of 1.5 both ways
_FEWEST_SHAPES = 4  # fewer shapes of a model say little of another shape of it


@lru_cache(maxsize=1)
def shipped_record() -> EstimateRecord:
    """Read the record that ships with the package: the error on models of a cross-validation on one CPU."""
    text = resources.files(__package__).joinpath(RECORD_FILE).read_text(encoding="utf-8")
    return EstimateRecord.model_validate_json(text)


def estimate_evidence(
    device: DeviceProfile, error: EstimateError | None, precisions: Collection[str]
) -> tuple[EstimateEvidence, ...]:
    """Return the records about estimates for a device, the nearest first; empty without estimated rows.

    ``error``: of the device's own calibration, or else of this host's (:func:`roofline.known_error`).
    """
    if not precisions:
        return ()
    evidence, calibration = list[EstimateEvidence](), device.calibration
    if error is not None:
        applies = calibration is not None and calibration.error == error
        other = "another processor"
        if error.kind != device.kind:
            other = "a CPU" if error.kind == "cpu" else "a GPU"
        evidence.append(
            EstimateEvidence(
                source="the calibrated profile", kind=error.kind, processor=error.device, measured=error.created[:10],
                cases=error.cases, models=error.models, median_error=2**error.median_log2 - 1,
                worst_error=2**error.worst_log2 - 1, applies=applies, why_not=None if applies else f"it is of {other}",
            )
        )  # fmt: skip
    record, why_not = shipped_record(), None
    if device.kind != record.kind:
        why_not = "it is of a CPU"
    elif calibration is None:
        why_not = "its estimates come from a calibration on that machine, these from the peak rates of the profile"
    elif calibration.processor != record.processor:
        why_not = f"it is of another processor than {calibration.processor}"
    elif record.cores is not None and calibration.threads != record.cores:
        why_not = f"it is of {record.cores} cores, the calibration of {calibration.threads} threads"
    elif unchecked := sorted(set(precisions) - set(record.precisions)):
        why_not = f"it has {' and '.join(record.precisions)}, but these estimates are of {' and '.join(unchecked)} too"
    return (*evidence, EstimateEvidence(**record.model_dump(), applies=why_not is None, why_not=why_not))


@dataclass(frozen=True)
class Case:
    """One artifact, and the device and the runtime that it is estimated for."""

    artifact: ArtifactManifest
    listed: ArtifactManifest  # the ONNX artifact whose nodes were listed: the artifact itself, or its origin
    device: DeviceProfile
    provider: str | None = None  # None: the usual one of the artifact's runtime
    run: str | None = None  # the bundle's name, under which a calibration knows it


def estimated_providers(artifact: ArtifactManifest, kind: Kind, runtime: str | None) -> tuple[str | None, ...]:
    """Return the providers to estimate an artifact with; ``runtime``: as of ``--runtime``, installed here or not."""
    if runtime is None:
        return (None,)
    if runtime != ALL_RUNTIMES:
        return requested_providers(artifact, runtime) or (None,)
    # Another runtime reads a float graph as its own; it has no good kernels for what ONNX Runtime quantized.
    is_float = artifact.precision in ("fp32", "fp16")
    providers = [
        opener.provider(artifact, kind=kind)
        for opener in all_runtimes()
        if (artifact.format in opener.formats or (is_float and opener.also_opens(artifact)))
        and published_record().knows(Setting(kind, "", opener.name, "", ""))
    ]
    return tuple(providers) or (None,)


def estimate(
    bundle: Bundle, artifact: ArtifactManifest, device: DeviceProfile, items: Sequence[Item],
    providers: Sequence[str | None] = (None,),
) -> list[Row]:  # fmt: skip
    """Return one row per provider and item, `where: device`: estimated, or unavailable with the reason.

    A worker process runs the graph once per item, to list the nodes that ONNX Runtime really executes; how long that
    takes here has no influence. Other formats are estimated from the ONNX graph of the same exit.
    """
    listed_artifact = onnx_origin(bundle.manifest, artifact) or artifact
    listed: dict[Item, ItemNodes | str] | None = None
    rows: list[Row] = []
    for provider in providers:
        case = Case(artifact, listed_artifact, device, provider, bundle.name)
        try:
            if not listed_artifact.is_graph:
                raise EdgeformerError(f"an estimate needs an ONNX graph, and the bundle has none for {artifact.id}")
            if (reason := opener_of(artifact, provider).estimable(artifact, device)) is not None:
                raise EdgeformerError(reason)
            rates_of(device, artifact.precision)  # the profile may lack a fact
            if (reason := refused_calibration(device)) is not None:
                raise EdgeformerError(reason)
            if listed is None:
                files = check_artifact(bundle, listed_artifact)
                listed = run_listing(ListJob(files=files, items=tuple(items), threads=1))
            rows += [estimate_row(case, listed[item], item) for item in items]
        except EdgeformerError as error:
            rows += [estimate_row(case, str(error), item) for item in items]
    return rows


def onnx_origin(manifest: BundleManifest, artifact: ArtifactManifest) -> ArtifactManifest | None:
    """Return the ONNX artifact that computes the same: itself, or another format's graph of its exit.

    Other formats quantize in another way than ONNX Runtime, so their integer artifacts are those of a float graph.
    """
    if artifact.is_graph:
        return artifact
    order = ("fp16", "fp32") if artifact.precision == "fp16" else ("fp32", "fp16")
    identity = (artifact.role, artifact.exit, artifact.trimmed)
    graphs = [other for other in manifest.artifacts if other.is_graph and other.status == "built"]
    same = [g for g in graphs if g.precision in order and (g.role, g.exit, g.trimmed) == identity]
    return min(same, key=lambda graph: order.index(graph.precision), default=None)


def works_of(
    nodes: Sequence[ExecutedNode], precision: str, *, listed: str = "fp32", on_gpu: bool = False
) -> list[NodeWork]:
    """Return the work of the nodes of a graph for an artifact of a precision.

    ``listed``: precision of the graph; its weights are taken to be as wide as the artifact's. GPUs compute half and
    quantized precisions on activations in FP16, CPUs in FP32.
    """
    if precision == listed and not (on_gpu and precision == "fp16"):
        return count_nodes(nodes)
    float_bytes = 2 if on_gpu and precision in ("fp16", "int8", "int4") else 4
    works = count_nodes(nodes, float_bytes)
    if precision == listed:
        return works
    scale = WEIGHT_BYTES[precision] / float_bytes
    return [replace(work, weight_bytes=scale * work.weight_bytes) for work in works]


def estimate_row(case: Case, nodes: ItemNodes | str, item: Item) -> Row:
    """Return the row of one item from its nodes, or from the reason why they were not listed.

    It is `unavailable`, too, if operators without a work count may take most of the time.
    """
    artifact, device = case.artifact, case.device
    provider = case.provider or provider_of(artifact, kind=device.kind)
    size_bytes, calibration = artifact.size_bytes or 0, device.calibration  # which is of ONNX Runtime
    is_covered = calibration is not None and artifact.precision in calibration.efficiencies
    if not (is_covered and artifact.is_graph and opener_of(artifact, case.provider) == runtime_of(ONNX)):
        calibration = None
    try:
        if isinstance(nodes, str):
            raise EdgeformerError(nodes)
        works = works_of(nodes.nodes, artifact.precision, listed=case.listed.precision, on_gpu=device.kind == "cuda")
        # 1. By the device's rates and published measurements
        precision, phase, runtime = artifact.precision, nodes.item[0], opener_of(artifact, case.provider)
        weight_bytes = stored_weight_bytes(nodes.nodes, works, case.listed)
        computed = product_type(device, runtime.name, precision, published_record().tf32)
        rates = rates_of(device, computed)
        if not published_record().knows(Setting(device.kind, device.name, runtime.name, computed, "call")):
            missing = f"nobody published times of {runtime.name} on {KINDS[device.kind]}"
            raise EdgeformerError(f"no estimate, because {missing}; run profile on the device itself")

        def by_record(works: Sequence[NodeWork]) -> Estimated:
            work = work_ms(works, rates, weight_bytes, fused=runtime.fuses)
            setting = Setting(device.kind, device.name, runtime.name, computed, phase_of(phase, work))
            return published_record().estimate_ms(setting, work, sum(each.operations for each in works))

        p50, low, high, check = by_record(works)
        if unknown := Counter(node.op for node in nodes.nodes if trust_of(node) == "unknown"):
            counted = by_record([work for work in works if work.trust != "unknown"])
            if (share := 1 - counted.p50 / p50) > MOST_UNKNOWN:
                raise EdgeformerError(
                    f"no estimate, because reading and writing alone takes operators without a known cost {share:.0%} "
                    f"of the time: {describe_operators(unknown)}; run profile on the device itself"
                )
        reason = published_sentence(check)
        unchecked = Counter(work.operator for work in works if work.trust == "unknown")
        # 2. By the calibration, if it covers the artifact
        if calibration is not None:
            each_us = calibrated_nodes_us(works, rates, calibration, precision, weight_bytes)
            call_us = nodes.runs * calibration.call_overhead_us.get(precision, 0.0)
            fitted_operators = calibration.operators.get(precision, {})
            unchecked = Counter(
                work.operator for work in works if work.trust != "checked" and work.operator not in fitted_operators
            )
            log2, why = _uncertainty(case, phase, calibration)
            if unchecked:
                log2 = max(log2, math.log2(high / p50))
            fitted = f"calibrated on {calibration.processor} with {len(calibration.fitted_on)} shapes"
            reason = "; ".join(filter(None, (fitted, calibration.disturbed, why)))
            p50 = (call_us + sum(each_us)) / 1000
            low, high = p50 / 2**log2, p50 * 2**log2
        # 3. What no measurement supports
        warnings = []
        if unchecked:
            warnings.append(f"estimates of {describe_operators(unchecked)} were never checked on any device")
        if control := sorted(CONTROL & {node.op for node in nodes.nodes}):
            doubt = "counted as often as it ran on a golden input; other inputs may differ"
            warnings.append(f"{' and '.join(control)}: {doubt}")
        latency = Latency(
            status="estimated", p50=p50, low=low, high=high, check=check if calibration is None else None,
            reason="; ".join((reason, *warnings)), warnings=tuple(warnings),
        )  # fmt: skip
        # 4. Memory, and the row
        sharing, weights = artifact.sharing or case.listed.sharing, float(size_bytes)
        if sharing is not None:
            # An FP16 engine may have an FP32 graph only.
            halved = artifact.precision == "fp16" and case.listed.precision == "fp32"
            weights = sharing.weight_bytes / (2 if halved else 1)
        step_bytes = max((work.moved_bytes for work in works), default=0.0)
        threads = None
        if device.kind != "cuda":
            threads = calibration.threads if calibration is not None else device.cores and device.cores.value
        return row_of(
            artifact, item, provider, "device", latency_ms=latency, size_bytes=size_bytes,
            memory_bytes=estimate_memory(artifact, device, weights, step_bytes, nodes.feed_bytes),
            energy_mj=Energy(status="unavailable", reason="energy is measured, never estimated"),
            threads=threads, work=total(works),
        )  # fmt: skip
    except EdgeformerError as error:
        return row_of(artifact, item, provider, "device", str(error))


def _uncertainty(case: Case, phase: Phase, calibration: Calibration) -> tuple[float, str]:
    """Return how far off a calibrated estimate may be, as a power of two, and the reason.

    Other shapes of the same model show the error for that model; a cross-validation over models, for any.
    """
    precision, roles = case.artifact.precision, ("full", "exit") if phase == "steady" else ("decode",)
    if case.artifact.role not in roles:
        return _UNVALIDATED_LOG2, "estimates of step artifacts were never checked, so the range is a guess"
    errors_log2 = [
        abs(math.log2(validation.estimated_ms / validation.measured_ms))
        for validation in calibration.validated_on
        if (validation.run, validation.precision, validation.phase) == (case.run, precision, phase)
        and validation.stable
        and validation.estimated_ms
    ]
    if len(errors_log2) >= _FEWEST_SHAPES:
        worst = max(*errors_log2, 2 * statistics.median(errors_log2))
        return worst, f"the range is the worst error on {len(errors_log2)} other shapes of this model"
    error = calibration.error
    if error is None or error.spread_log2 is None:
        return _UNVALIDATED_LOG2, "the calibration has no cross-validation over models, so the range is a guess"
    validated = {(validation.precision, validation.phase) for validation in calibration.left_out}
    if (precision, phase) in validated:
        cases = f"{error.cases} cases of {error.models} models"
        return error.spread_log2, f"the range is the largest error in a cross-validation of {cases}"
    covered = " and ".join(sorted(f"{name} {'calls' if when == 'steady' else when}" for name, when in validated))
    why = f"the cross-validation covers {covered} only, so the range is a guess"
    return max(error.spread_log2, _UNVALIDATED_LOG2), why
