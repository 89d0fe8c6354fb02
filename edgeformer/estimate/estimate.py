"""Rows for a device that is not here, as ranges, and the records of how far such estimates were from measurements."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, EstimateRecord
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.report import Energy, EstimateEvidence, Latency, Row
from edgeformer.bundle import Bundle
from edgeformer.estimate.listing import ItemNodes, ListJob, run_listing
from edgeformer.estimate.operators import (
    CONTROL,
    DOUBTS,
    MOST_UNKNOWN,
    NodeWork,
    count_nodes,
    describe_operators,
    stored_weight_bytes,
    total,
    trust_of,
)
from edgeformer.estimate.roofline import (
    calibrated_nodes_us,
    estimate_memory,
    range_us,
    rates_of,
    refused_calibration,
)
from edgeformer.measurement.artifact import Item, Phase, check_artifact, row_of
from edgeformer.runtimes import provider_of, runtime_of

RECORD_FILE = "record.json"
"""In this package; `python -m benchmarks.estimates` writes it with docs/results/estimates.md."""
# For a model whose estimation error is unknown: a factor of 1.5 both ways.
_UNVALIDATED_LOG2 = 0.6
# Fewer shapes of a model say little of another shape of it.
_FEWEST_SHAPES = 4


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
    """One artifact and the device that it is estimated for."""

    artifact: ArtifactManifest
    listed: ArtifactManifest  # the ONNX artifact whose nodes were listed: the artifact itself, or an engine's origin
    device: DeviceProfile
    run: str | None = None  # the bundle's name, under which a calibration knows it


def estimate(bundle: Bundle, artifact: ArtifactManifest, device: DeviceProfile, items: Sequence[Item]) -> list[Row]:
    """Return one row per item, `where: device`: estimated, or unavailable with the reason.

    A worker process runs the graph once per item, to list the nodes that ONNX Runtime really executes; how long that
    takes here has no influence. An engine is estimated from the ONNX graph of the same exit.
    """
    case = Case(artifact, onnx_origin(bundle.manifest, artifact) or artifact, device, bundle.name)
    try:
        if not case.listed.is_graph:
            raise EdgeformerError(f"an estimate needs an ONNX graph, and the bundle has none for {artifact.id}")
        if (reason := runtime_of(artifact).estimable(artifact, device)) is not None:
            raise EdgeformerError(reason)
        rates_of(device, artifact.precision)  # the profile may lack a fact
        if (reason := refused_calibration(device)) is not None:
            raise EdgeformerError(reason)
        listed = run_listing(ListJob(files=check_artifact(bundle, case.listed), items=tuple(items), threads=1))
    except EdgeformerError as error:
        listed = dict.fromkeys(items, str(error))
    return [estimate_row(case, listed[item], item) for item in items]


def onnx_origin(manifest: BundleManifest, artifact: ArtifactManifest) -> ArtifactManifest | None:
    """Return the ONNX artifact that computes the same: itself, or an engine's graph of its exit, FP16 before FP32."""
    if artifact.is_graph:
        return artifact
    order = (artifact.precision, "fp16", "fp32")
    identity = (artifact.role, artifact.exit, artifact.trimmed)
    graphs = [other for other in manifest.artifacts if other.is_graph and other.status == "built"]
    same = [g for g in graphs if g.precision in order and (g.role, g.exit, g.trimmed) == identity]
    return min(same, key=lambda graph: order.index(graph.precision), default=None)


def estimate_row(case: Case, nodes: ItemNodes | str, item: Item) -> Row:
    """Return the row of one item from its nodes, or from the reason why they were not listed."""
    artifact, device = case.artifact, case.device
    provider = provider_of(artifact, kind=device.kind)
    size_bytes, calibration = artifact.size_bytes or 0, device.calibration
    try:
        if isinstance(nodes, str):
            raise EdgeformerError(nodes)
        # GPUs compute FP16 graphs in FP16, CPUs in FP32 with casts.
        works = count_nodes(nodes.nodes, 2 if device.kind == "cuda" and artifact.precision == "fp16" else None)
        sharing, weights = artifact.sharing or case.listed.sharing, float(size_bytes)
        if sharing is not None:
            # An FP16 engine may have an FP32 graph only.
            halved = artifact.precision == "fp16" and case.listed.precision == "fp32"
            weights = sharing.weight_bytes / (2 if halved else 1)
        step_bytes = max((work.moved_bytes for work in works), default=0.0)
        threads = None
        if device.kind != "cuda":
            threads = calibration.threads if calibration is not None else device.cores and device.cores.value
        figures: dict[str, Any] = {
            "latency_ms": _latency(case, nodes, works),
            "memory_bytes": estimate_memory(artifact, device, weights, step_bytes, nodes.feed_bytes),
            "size_bytes": size_bytes,
            "energy_mj": Energy(status="unavailable", reason="energy is measured, never estimated"),
            "threads": threads,
            "work": total(works),
        }
    except EdgeformerError as error:
        return row_of(artifact, item, provider, "device", str(error))
    return row_of(artifact, item, provider, "device", **figures)


def _latency(case: Case, nodes: ItemNodes, works: Sequence[NodeWork]) -> Latency:
    """Raise EdgeformerError if operators without a work count may take most of the time."""
    calibration, precision = case.device.calibration, case.artifact.precision
    rates, weight_bytes = rates_of(case.device, precision), stored_weight_bytes(nodes.nodes, works, case.listed)
    if unknown := Counter(node.op for node in nodes.nodes if trust_of(node) == "unknown"):
        counted = [work for work in works if work.trust != "unknown"]
        all_us, counted_us = (range_us(part, rates, weight_bytes, fused=False)[1] for part in (works, counted))
        if (share := 1 - counted_us / all_us) > MOST_UNKNOWN:
            raise EdgeformerError(
                f"no estimate, because up to {share:.0%} of the time goes to operators without a known cost: "
                f"{describe_operators(unknown)}; run profile on the device itself"
            )
    fitted_operators: Collection[str] = ()
    if calibration is not None and precision in calibration.efficiencies:
        each_us = calibrated_nodes_us(works, rates, calibration, precision, weight_bytes)
        call_us = nodes.runs * calibration.call_overhead_us.get(precision, 0.0)
        # A doubted operator may be much slower, so the ends of the range are not symmetric.
        fitted_operators = calibration.operators.get(precision, {})
        doubts = [DOUBTS["checked" if work.operator in fitted_operators else work.trust] for work in works]
        low_us = call_us + sum(us / doubt.faster for us, doubt in zip(each_us, doubts, strict=True))
        high_us = call_us + sum(us * doubt.slower for us, doubt in zip(each_us, doubts, strict=True))
        log2, why = _uncertainty(case, nodes.item[0], calibration)
        p50, low, high = (call_us + sum(each_us)) / 1000, low_us / 1000 / 2**log2, high_us / 1000 * 2**log2
        fitted = f"calibrated on {calibration.processor} with {len(calibration.fitted_on)} shapes"
        reason = "; ".join(filter(None, (fitted, calibration.disturbed, why)))
    else:
        fused = runtime_of(case.artifact).fuses
        low, high = (us / 1000 for us in range_us(works, rates, weight_bytes, fused))
        p50 = (low * high) ** 0.5
        reason = (
            "from the peak rates of the profile, without a calibration: the low end assumes nearly these rates and "
            "full overlap of compute and memory, the high end a third of them and no overlap"
        )
    warnings = []
    if unchecked := Counter(
        work.operator for work in works if work.trust != "checked" and work.operator not in fitted_operators
    ):
        operators = describe_operators(unchecked)
        warnings.append(f"the range is wider, because estimates of {operators} were never checked on any device")
    if control := [operator for operator in sorted(CONTROL) if any(node.op == operator for node in nodes.nodes)]:
        warnings.append(
            f"{' and '.join(control)}: counted as often as it ran on a golden input; other inputs may differ"
        )
    return Latency(
        status="estimated", p50=p50, low=low, high=high, reason="; ".join((reason, *warnings)),
        warnings=tuple(warnings),
    )  # fmt: skip


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
    return (
        max(error.spread_log2, _UNVALIDATED_LOG2),
        f"the cross-validation covers {covered} only, so the range is a guess",
    )
