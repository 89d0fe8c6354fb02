"""Records of the estimator's error, and which of them cover the estimates for a device."""

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
from edgeformer.benchmark.measurement import CheckedArtifact, Item, Phase, row_of, unavailable_row
from edgeformer.bundle import Bundle
from edgeformer.estimate.calibrate import PERCENT
from edgeformer.estimate.listing import ItemNodes, Listing, ListSpec, run_listing
from edgeformer.estimate.operators import (
    BROADCAST,
    CONTROL,
    MOST_UNKNOWN,
    NodeWork,
    count_nodes,
    stored_weight_bytes,
    total,
    trust_of,
    unchecked_words,
)
from edgeformer.estimate.rates import Rates, rates_of, refused_calibration, speed_words
from edgeformer.estimate.roofline import estimate_memory, fitted_nodes_us, range_us, widened_us
from edgeformer.runtimes import cannot_estimate, provider_of, runtime_of

RECORD_FILE = "record.json"
"""In this package; `python -m benchmarks.estimates` writes it from the measurements behind docs/estimator.md."""


@lru_cache(maxsize=1)
def shipped_record() -> EstimateRecord:
    """Read the record that ships with the package: calibrated estimates of left-out models on one CPU."""
    text = resources.files(__package__).joinpath(RECORD_FILE).read_text(encoding="utf-8")
    return EstimateRecord.model_validate_json(text)


def estimate_evidence(
    device: DeviceProfile, error: EstimateError | None, precisions: Collection[str]
) -> tuple[EstimateEvidence, ...]:
    """Return what is on record about estimates for a device, the nearest record first; empty if there are none.

    Args:
        device: whose rows are estimated.
        error: of the device's own calibration, or else of this host's, as ``known_error`` returns it.
        precisions: of the rows that are estimated.
    """
    if not precisions:
        return ()
    evidence = [] if error is None else [_of_calibration(device, error)]
    record, why_not = shipped_record(), None
    if device.kind != record.kind:
        why_not = "it is of a CPU"
    elif device.calibration is None:
        why_not = "its estimates come from a calibration on that machine, these from the peak rates of the profile"
    elif device.calibration.processor != record.processor:
        why_not = f"it is of another processor than {device.calibration.processor}"
    elif record.cores is not None and device.calibration.threads != record.cores:
        why_not = f"it is of {record.cores} cores, the calibration of {device.calibration.threads} threads"
    elif unchecked := sorted(set(precisions) - set(record.precisions)):
        why_not = f"it has {' and '.join(record.precisions)}, but these estimates are of {' and '.join(unchecked)} too"
    return (*evidence, EstimateEvidence(**record.model_dump(), applies=why_not is None, why_not=why_not))


def _of_calibration(device: DeviceProfile, error: EstimateError) -> EstimateEvidence:
    applies = device.calibration is not None and device.calibration.error == error
    kinds = {"cpu": "a CPU", "cuda": "a GPU"}
    other = f"it is of {kinds[error.kind]}" if error.kind != device.kind else "it is of another processor"
    return EstimateEvidence(
        source="the calibrated profile",
        kind=error.kind,
        processor=error.device,
        measured=error.created[:10],
        cases=error.cases,
        models=error.models,
        median_error=2**error.median_log2 - 1,
        worst_error=2**error.worst_log2 - 1,
        applies=applies,
        why_not=None if applies else other,
    )


# Rows for a device that is not here, as ranges: every node of the graph at the profile's rates, and its memory.


# For a model whose estimation error is unknown: a factor of 1.5 both ways.
_UNVALIDATED_LOG2 = 0.6
# Fewer shapes of a model say little of another shape of it.
_FEWEST_SHAPES = 4


@dataclass(frozen=True)
class Case:
    """One artifact of one bundle, and the device that it is estimated for.

    ``listed``: the ONNX artifact whose nodes were listed, which is the artifact itself, or an engine's origin;
    ``run``: the bundle's name, under which a calibration knows it if it was taught or checked with it.
    """

    artifact: ArtifactManifest
    listed: ArtifactManifest
    device: DeviceProfile
    run: str | None = None


def estimate(bundle: Bundle, artifact: ArtifactManifest, device: DeviceProfile, items: Sequence[Item]) -> list[Row]:
    """One row per item (phase, batch, seq) of a built artifact, `where: device`: estimated, or unavailable and why.

    The graph is run once per item, in a process of its own, to list the nodes that ONNX Runtime really executes; how
    long that takes here has no influence. Files must have been checked against the manifest before.

    Args:
        bundle: the artifact's.
        artifact: a built one; an engine is estimated from the ONNX graph of the same exit.
        device: facts, and a calibration if there is one.
        items: what to estimate.
    """
    case = Case(artifact, onnx_origin(bundle.manifest, artifact) or artifact, device, bundle.name)
    try:
        _require_estimable(case)
        checked = CheckedArtifact.of(bundle, case.listed)
        listing = run_listing(ListSpec(checked=checked, items=tuple(items), threads=1))
    except EdgeformerError as error:
        listing = Listing(refused=dict.fromkeys(items, str(error)))
    return [estimate_listed(case, listing, item) for item in items]


def onnx_origin(manifest: BundleManifest, artifact: ArtifactManifest) -> ArtifactManifest | None:
    """The ONNX artifact that computes the same: itself, or for an engine the graph of its exit, FP16 before FP32.

    Args:
        manifest: of the bundle.
        artifact: of that bundle.
    """
    if artifact.is_graph:
        return artifact
    order = (artifact.precision, "fp16", "fp32")
    same = [
        candidate
        for candidate in manifest.artifacts
        if candidate.is_graph
        and candidate.status == "built"
        and candidate.precision in order
        and (candidate.role, candidate.exit, candidate.trimmed) == (artifact.role, artifact.exit, artifact.trimmed)
    ]
    return min(same, key=lambda candidate: order.index(candidate.precision), default=None)


def estimate_listed(case: Case, listing: Listing, item: Item) -> Row:
    """The row of one item whose nodes were listed before.

    Args:
        case: artifact and device.
        listing: of ``case.listed``.
        item: phase and shape.
    """
    provider = provider_of(case.artifact, kind=case.device.kind)
    reason = listing.refused.get(item, "the graph's nodes were not listed")
    try:
        if item in listing.items:
            return row_of(case.artifact, item, provider, "device", **_figures(case, listing.items[item]))
    except EdgeformerError as error:
        reason = str(error)
    return unavailable_row(case.artifact, case.artifact.size_bytes or 0, item, provider, "device", reason)


def _figures(case: Case, listed: ItemNodes) -> dict[str, Any]:
    device, artifact = case.device, case.artifact
    # GPUs compute FP16 graphs in FP16, CPUs in FP32 with casts.
    works = count_nodes(listed.nodes, 2 if device.kind == "cuda" and artifact.precision == "fp16" else None)
    step_bytes = max((work.moved_bytes for work in works), default=0.0)
    return {
        "latency_ms": _latency(case, listed, works),
        "memory_bytes": estimate_memory(artifact, device, _file_weights(case), step_bytes, listed.feed_bytes),
        "size_bytes": artifact.size_bytes or 0,
        "energy_mj": Energy(status="unavailable", reason="energy is measured, never estimated"),
        "threads": _threads(device),
        "work": total(works),
    }


def _latency(case: Case, listed: ItemNodes, works: Sequence[NodeWork]) -> Latency:
    calibration, precision = case.device.calibration, case.artifact.precision
    rates, weight_bytes = rates_of(case.device, precision), stored_weight_bytes(listed.nodes, works, case.listed)
    fitted_keys: Collection[str] = ()
    _require_counted(works, listed, rates, weight_bytes)
    if calibration is not None and precision in calibration.efficiencies:
        log2, why = _uncertainty(case, listed.item[0], calibration)
        fitted_keys = calibration.operators.get(precision, {})
        each = fitted_nodes_us(works, rates, calibration, precision, weight_bytes)
        nodes = widened_us(works, each, fitted_keys)
        called = listed.runs * calibration.call_overhead_us.get(precision, 0.0)
        middle = (called + sum(each)) / 1000  # what is doubted may be much slower: the ends are not alike
        low, high = (called + nodes[0]) / 1000 / 2**log2, (called + nodes[1]) / 1000 * 2**log2
        taught = f"calibrated on {calibration.processor} with {len(calibration.fitted_on)} shapes"
        reason = "; ".join(filter(None, (taught, calibration.disturbed, why, speed_words(calibration))))
    else:
        fused = runtime_of(case.artifact).fuses(case.artifact)
        low, high = (us / 1000 for us in range_us(works, rates, weight_bytes, fused))
        middle = (low * high) ** 0.5
        reason = (
            "from the profile's peak rates, not calibrated: the low end overlaps everything and reaches nearly the "
            "peaks, the high end overlaps nothing and reaches about a third of them"
        )
    doubts = _doubts(works, listed, fitted_keys)
    return Latency(
        status="estimated",
        p50=middle,
        low=low,
        high=high,
        reason="; ".join((reason, *doubts)),
        warnings=tuple(doubts),
    )


def _doubts(works: Sequence[NodeWork], listed: ItemNodes, fitted_keys: Collection[str]) -> list[str]:
    """Why a range is wider than it would be of a transformer, in words."""
    doubts = []
    doubtful = [work.key for work in works if work.trust != "checked" and work.key not in fitted_keys]
    unchecked = Counter(key.removesuffix(BROADCAST) for key in doubtful)
    if unchecked:
        doubts.append(f"the range is wider: never checked on any device are estimates of {unchecked_words(unchecked)}")
    inside = [operator for operator in sorted(CONTROL) if any(node.op == operator for node in listed.nodes)]
    if inside:
        doubts.append(
            f"{' and '.join(inside)}: counted as often as it ran on a golden input; others may take another way"
        )
    return doubts


def _require_counted(works: Sequence[NodeWork], listed: ItemNodes, rates: Rates, weight_bytes: float) -> None:
    """Raise EdgeformerError if operators without a work count may take most of the time."""
    unknown = Counter(node.op for node in listed.nodes if trust_of(node) == "unknown")
    if not unknown:
        return
    total_us = range_us(works, rates, weight_bytes, fused=False)[1]
    known_us = range_us([work for work in works if work.trust != "unknown"], rates, weight_bytes, fused=False)[1]
    share = 1 - known_us / total_us
    if share > MOST_UNKNOWN:
        raise EdgeformerError(
            f"no estimate: {share:.0%} of the time may go to operators whose work cannot be counted: "
            f"{unchecked_words(unknown)}; profile on the device itself"
        )


def _uncertainty(case: Case, phase: Phase, calibration: Calibration) -> tuple[float, str]:
    """How far off a calibrated estimate may be, as a power of two, and why that is so.

    What other shapes of the same model show holds for that model; what models show that were left out, for any.
    """
    precision, roles = case.artifact.precision, ("full", "exit") if phase == "steady" else ("decode",)
    if case.artifact.role not in roles:
        return _UNVALIDATED_LOG2, "parts of a call were never checked, so the range is a guess"
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
        return _UNVALIDATED_LOG2, "no model was left out of the calibration, so the range is a guess"
    validated = {(validation.precision, validation.phase) for validation in calibration.left_out}
    if (precision, phase) in validated:
        of = f"{error.cases} cases of {error.models} models, each left out once"
        return error.spread_log2, f"the range is the largest of the {PERCENT} % quantiles of the errors on {of}"
    only = " and ".join(sorted(f"{name} {'calls' if when == 'steady' else when}" for name, when in validated))
    return max(error.spread_log2, _UNVALIDATED_LOG2), f"models were left out in {only} only, so the range is a guess"


def _require_estimable(case: Case) -> None:
    """Raises EdgeformerError with what makes every row of this artifact impossible."""
    if not case.listed.is_graph:
        raise EdgeformerError(f"estimates need an ONNX graph, and the bundle has none for {case.artifact.id}")
    reason = cannot_estimate(case.artifact, case.device)
    if reason is None:
        rates_of(case.device, case.artifact.precision)  # the profile may lack a fact
        reason = refused_calibration(case.device)
    if reason is not None:
        raise EdgeformerError(reason)


def _file_weights(case: Case) -> float:
    sharing = case.artifact.sharing or case.listed.sharing
    if sharing is None:
        return case.artifact.size_bytes or 0
    # An FP16 engine whose only graph in the bundle is FP32.
    return sharing.weight_bytes / (2 if case.artifact.precision == "fp16" and case.listed.precision == "fp32" else 1)


def _threads(device: DeviceProfile) -> int | None:
    if device.kind == "cuda":
        return None
    if device.calibration is not None:
        return device.calibration.threads
    return device.cores.value if device.cores is not None else None
